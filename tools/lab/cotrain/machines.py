"""Cards and models as the laws see them: from published layer times where there are any, else rooflines, named so.

Vidur's tables give the linear layers of an A100 and an H100. The Ada and the 3090 have no published table: their layer
times are rooflines with half of the peak, which is HARLI's own 10 ms for a layer over 2,048 tokens.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from pathlib import Path

from valve_hook.cotrain.laws import Laws
from valve_tools.sim.traces import TraceError

TABLES = "perf_tables/vidur_layer_times.csv.gz"
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    bandwidth: float
    peak: float
    memory: float
    """Bytes."""
    copy_bytes_s: float = 24e9
    """From the host."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model as its layers."""

    name: str
    layers: int
    hidden: int
    layer_params: float
    kv_bytes: float
    other_bytes: float
    """Embedding and head."""
    kept_bytes: float
    """Activations of one token in one layer that backward needs: nothing is recomputed."""

    @property
    def weights(self) -> float:
        return 2 * self.layer_params * self.layers + self.other_bytes


A100_40 = Card(name="A100 40 GB", bandwidth=1.56e12, peak=312e12, memory=40e9)
A100 = Card(name="A100 80 GB", bandwidth=2.04e12, peak=312e12, memory=80e9)
H100 = Card(name="H100", bandwidth=3.35e12, peak=989e12, memory=80e9, copy_bytes_s=50e9)
ADA = Card(name="RTX 6000 Ada", bandwidth=0.96e12, peak=182e12, memory=48e9)
RTX3090 = Card(name="RTX 3090", bandwidth=0.936e12, peak=71e12, memory=24e9)

LLAMA8B = Base(
    name="Llama-3-8B",
    layers=32,
    hidden=4096,
    layer_params=218.1e6,
    kv_bytes=131072,
    other_bytes=2.1e9,
    kept_bytes=139264,
)
QWEN7B = Base(
    name="Qwen2.5-7B",
    layers=28,
    hidden=3584,
    layer_params=233.0e6,
    kv_bytes=57344,
    other_bytes=2.18e9,
    kept_bytes=139264,
)
USABLE = 0.92
ADAPTERS = 0.3e9


@dataclass(frozen=True, kw_only=True)
class Machine(Laws):
    """A base on one or more cards, as the lab's truth."""

    card: Card
    base: Base
    cards: int = 1
    source: str = "roofline"
    """Of the layer times."""
    table: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """(rows, ms of one layer)."""

    @property
    def name(self) -> str:
        cards = self.card.name if self.cards == 1 else f"{self.cards} x {self.card.name}"
        pair = self.base.name if self.job is None else f"{self.base.name} trains {self.job_base.name}"
        return f"{cards}, {pair}, {self.source}"

    @property
    def job_base(self) -> Base:
        return self.job.base if isinstance(self.job, Machine) else self.base

    def training_bytes(self, tokens: int) -> float:
        """Activations of a micro-batch, and adapters with their optimizer state."""
        return self.job_base.kept_bytes * tokens * self.job_base.layers + ADAPTERS

    def layer_ms(self, rows: float) -> float:
        table = self.table
        if not table:
            return Laws.layer_ms(self, rows)
        at = bisect_left(table, (rows, 0.0))
        if at == 0:
            return table[0][1]
        if at == len(table):
            return table[-1][1] * rows / table[-1][0]
        (few, low), (many, high) = table[at - 1], table[at]
        return low + (high - low) * (rows - few) / (many - few)

    def assumed(self) -> Laws:
        """What a planner is told before it has measured: data sheet figures, a sixth off, and no table."""
        names = (
            "layers",
            "layer_bytes",
            "layer_work",
            "kv_bytes",
            "hidden",
            "fixed_ms",
            "seq_ms",
            "copy_ms",
            "saturation",
        )
        known = {name: getattr(self, name) for name in names}
        job = self.job.assumed() if isinstance(self.job, Machine) else None
        return Laws(bandwidth=self.bandwidth / 0.85, speed=self.speed * 0.85, job=job, **known)


def roofline(card: Card, base: Base, cards: int = 1) -> Machine:
    reduce_ms = 2 * base.layers * 0.015 if cards > 1 else 0.0
    return Machine(
        layers=base.layers,
        layer_bytes=2 * base.layer_params / cards,
        layer_work=2 * base.layer_params / cards,
        bandwidth=0.85 * card.bandwidth,
        speed=0.5 * card.peak,
        kv_bytes=base.kv_bytes / cards,
        hidden=base.hidden // cards,
        fixed_ms=base.other_bytes / 2 / cards / (0.85 * card.bandwidth) * 1e3 + reduce_ms,
        copy_ms=2 * base.layer_params / cards / card.copy_bytes_s * 1e3,
        card=card,
        base=base,
        cards=cards,
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Whose layer times: a model of Vidur's on a card, `scale` as long where reading weights is the limit."""

    gpu: str
    model: str
    params: float
    scale: float = 1.0


LLAMA8B_A100 = Table(gpu="a100", model="Meta-Llama-3-8B", params=218.1e6)
LLAMA8B_A100_40 = Table(gpu="a100", model="Meta-Llama-3-8B", params=218.1e6, scale=2.04 / 1.56)
LLAMA7B_H100 = Table(gpu="h100", model="Llama-2-7b-hf", params=202.4e6)


def from_table(folder: Path, card: Card, base: Base, of: Table, cards: int = 1) -> Machine:
    """A base with another layer than the table's takes longer by its parameters."""
    path = folder / TABLES
    if not path.is_file():
        raise TraceError(f"{path} is missing: the machines with layer tables need it")
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if (row["gpu"], row["model"], row["tp"]) == (of.gpu, of.model, str(cards)):
                ms = float(row["gemm_ms_per_layer"]) + float(row["elementwise_ms_per_layer"])
                ms *= base.layer_params / of.params
                rows.append((float(row["num_tokens"]), ms))
    if not rows:
        raise TraceError(f"{path} holds no {of.model} on {cards} x {of.gpu}")
    rows.sort()
    floor = of.scale * rows[0][1]
    table = tuple((count, max(ms, floor)) for count, ms in rows)
    large, ms = table[-1]
    machine = roofline(card, base, cards)
    speed = large * machine.layer_work / (ms * 1e-3)
    return replace(machine, speed=speed, table=table, source=f"{of.gpu} layer table of {of.model}")
