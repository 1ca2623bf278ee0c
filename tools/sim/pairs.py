"""The ten online/offline pairs: what runs on what, and the shape of the trace each of them is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from valve_tools.sim.generator import summaries
from valve_tools.sim.machine import MODELS
from valve_tools.sim.shape import LoadShape, ShapedTrace, assign, candidates, window_s
from valve_tools.sim.traces import Folder, JobLengths, Trace, largest
from valve_tools.sim.world import OfflineSide, OnlineSide

LENGTHS_SEED = 1
MISALIGNED = 0.3
"""Rank skew of the tensor-parallel service: the last rank is busy for up to this share of a busy period longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A row of the experiment before it has a trace."""

    key: str
    title: str
    about: str
    online: str
    offline: str
    shape: LoadShape
    tp: int = 1
    skew_max: float = 0.0
    work: str = "summarise"
    """summarise, long-answers, long-prompts or train."""
    train_tokens: int = 0
    train_memory_gib: float = 0.0


def _shape(harvestable: float, idle_per_hour: float, kv_peak_tokens: float) -> LoadShape:
    return LoadShape(harvestable=harvestable, idle_per_hour=idle_per_hour, kv_peak_tokens=kv_peak_tokens)


PAIRS = (
    PairRow(key="P1", title="chat", about="compute bursts, Poisson-like", online="8B", offline="8B",
         shape=_shape(0.51, 1100, 7_000)),
    PairRow(key="P2", title="code", about="arrival bursts, KV bursts", online="8B", offline="8B",
         shape=_shape(0.85, 1550, 57_000), work="long-answers"),
    PairRow(key="P3", title="long context", about="compute and KV bursts", online="8B", offline="8B",
         shape=_shape(0.46, 67, 256_000)),
    PairRow(key="P4", title="reasoning", about="compute and KV, long answers", online="8B", offline="8B",
         shape=_shape(0.40, 44, 415_000), work="train", train_tokens=2048, train_memory_gib=5.0),
    PairRow(key="P5", title="short gaps", about="thousands of idle periods an hour", online="8B", offline="8B",
         shape=_shape(0.35, 3780, 7_700)),
    PairRow(key="P6", title="tiny TTFT", about="prompts of tens of tokens", online="3B", offline="8B",
         shape=_shape(0.70, 1070, 1_500), work="long-prompts"),
    PairRow(key="P7", title="tight memory", about="KV bursts in a small pool", online="8B", offline="14B",
         shape=_shape(0.66, 320, 128_000)),
    PairRow(key="P8", title="rollout", about="periodic, huge KV swing, misaligned ranks", online="32B", offline="14B",
         shape=_shape(0.66, 20, 130_000), tp=2, skew_max=MISALIGNED),
    PairRow(key="P9", title="busy control", about="hardly idle: must harm nobody", online="70B", offline="14B",
         shape=_shape(0.10, 280, 264_000), tp=4),
    PairRow(key="P10", title="adapter", about="compute bursts beside fine-tuning", online="8B", offline="8B",
         shape=_shape(0.52, 263, 30_000), work="train", train_tokens=4096, train_memory_gib=6.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """A pair with its trace."""

    pair: PairRow
    trace: Trace
    shape: LoadShape
    service: OnlineSide
    job: OfflineSide

    @property
    def seconds(self) -> float:
        return window_s(self.trace)


def bind(folder: Folder, pairs: Sequence[PairRow] = PAIRS) -> list[Bound]:
    """Give every pair the trace of the folder that is nearest to its shape."""
    offered = candidates(folder.traces)
    chosen = assign({pair.key: pair.shape for pair in pairs}, offered)
    lengths = batch_lengths(folder)
    return [_bound(pair, chosen[pair.key], lengths) for pair in pairs]


def batch_lengths(folder: Folder) -> JobLengths:
    """The folder's own lengths of a batch job, else the shipped ones."""
    if folder.lengths:
        return largest(folder.lengths)
    return summaries(np.random.default_rng(LENGTHS_SEED))


def _bound(pair: PairRow, candidate: ShapedTrace, lengths: JobLengths) -> Bound:
    return Bound(
        pair=pair,
        trace=candidate.trace,
        shape=candidate.shape,
        service=OnlineSide(model=MODELS[pair.online], tp=pair.tp, skew_max=pair.skew_max),
        job=_job(pair, lengths),
    )


def _job(pair: PairRow, lengths: JobLengths) -> OfflineSide:
    model = MODELS[pair.offline]
    if pair.work == "train":
        return OfflineSide(
            model=model, tp=pair.tp, train_tokens=pair.train_tokens, train_memory_gib=pair.train_memory_gib
        )
    if pair.work == "long-answers":
        return OfflineSide(model=model, tp=pair.tp, lengths=_fixed("512/1024", 512, 1024))
    if pair.work == "long-prompts":
        return OfflineSide(model=model, tp=pair.tp, lengths=_fixed("32k/128", 32_000, 128), budget_tokens=32_768)
    return OfflineSide(model=model, tp=pair.tp, lengths=lengths)


def _fixed(name: str, prompt: int, answer: int) -> JobLengths:
    return JobLengths(name=name, in_tok=np.asarray([prompt]), out_tok=np.asarray([answer]))
