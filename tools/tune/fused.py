"""`python tools/tune/fused.py`: does a span of training rows pay in the batch of a decode step, on this CPU?

Two vLLMs of one random model whose weights are larger than the caches: one as it serves, one as a fused lane needs it
(LoRA on, the span with an adapter, what backward needs cloned). Beside them the trainer's own forward tile. In turns
of one round each, on one thread; CPU time, so that others on the machine count less. Needs the engines' environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
from valve_tune.options import option

MODEL_LEN = 4096
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
SPANS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class Round:
    """CPU seconds of one round, everything once."""

    plain: float = 0.0
    """A decode step of the engine as it serves."""
    plain_again: float = 0.0
    lane: float = 0.0
    """A decode step of the engine that a fused lane needs."""
    alone: dict[int, float] = field(default_factory=dict)
    """The span alone, in the engine of the lane."""
    fused: dict[int, float] = field(default_factory=dict)
    """Span and readers in one step."""
    tile: dict[int, float] = field(default_factory=dict)
    """The trainer's own forward of the span, through all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of paired ratios, and an interval of 95 % for it."""

    median: float
    low: float
    high: float


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of pairs taken in the same round: a ratio of medians would mix the loads of different moments."""
    pairs = np.divide(ones, others)
    drawn = np.median(np.random.default_rng(0).choice(pairs, (2000, len(pairs))), axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Ratio(median=float(np.median(pairs)), low=float(low), high=float(high))


def of_lane(rounds: Sequence[Round], span: int) -> Ratio:
    """Fused over what the same engine takes for the two apart: what sharing a read of the weights gives."""
    return ratio([each.fused[span] for each in rounds], [each.lane + each.alone[span] for each in rounds])


def of_whole(rounds: Sequence[Round], span: int) -> Ratio:
    """Fused over a plain engine's step and the trainer's own tile: what a service gets or loses by the lane."""
    return ratio([each.fused[span] for each in rounds], [each.plain + each.tile[span] for each in rounds])


def of_token(rounds: Sequence[Round], span: int) -> Ratio:
    """What a fused token adds to a plain step, over a token of the trainer's longest tile: the tiles that a trainer
    really runs are one layer of the whole sequence, and read the weights once for all of its tokens.
    """
    longest = max(rounds[0].tile)
    added = [(each.fused[span] - each.plain) / span for each in rounds]
    return ratio(added, [each.tile[longest] / longest for each in rounds])


class Side:
    """An engine in a process of its own: two of them do not go into one."""

    def __init__(self, model: Path, dtype: str, adapter: str) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("fused_side.py")), str(model), dtype, adapter]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENGINE_ENVIRONMENT
        )
        self._orders, self._answers = cast(TextIO, self._process.stdin), cast(TextIO, self._process.stdout)
        self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the engine ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, **order: Any) -> Any:
        print(json.dumps(order), file=self._orders, flush=True)
        return self._answer()

    def step(self, span: int = 0, *, alone: bool = False) -> float:
        return float(self.ask(span=span, alone=alone)[0])

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


class OwnTile:
    """The trainer's forward of one span through all layers, on its own copy of the base."""

    def __init__(self, config: Any, state: Any, adapter: Any) -> None:
        from valve_tune.base.own import OwnCopy
        from valve_tune.model.explicit import ExplicitModel

        self._layers = config.num_hidden_layers
        self._model = ExplicitModel(config, OwnCopy(state, self._layers), adapter)

    def seconds(self, span: int) -> float:
        from valve_tune.model.dropout import Draw
        from valve_tune.tiles.grid import Grid, Phase, TileShape
        from valve_tune.tiles.orders import layer_major
        from valve_tune.train.batch import MicroBatch

        ids = np.random.default_rng(0).integers(3, 2048, (1, span))
        one, where = np.ones_like(ids), np.arange(span)[None]
        batch = MicroBatch(input_ids=ids, labels=ids, segments=one, positions=where)
        grid = Grid(layers=self._layers, tokens=span, forward=TileShape(layers=0), backward=TileShape())
        work = self._model.start(batch, scale=1.0, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
        began = time.process_time()
        for tile in layer_major(grid, Phase.FORWARD):
            work.run(tile)
        took = time.process_time() - began
        work.close()
        return took


def make(folder: Path, hidden: int, layers: int, dtype: str) -> tuple[OwnTile, float]:
    """The model and its adapter on disk, the trainer's tile in memory; MB of the weights that a step reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from valve_tune.model.adapter import Adapter
    from valve_tune.model.explicit import adapter_sites
    from valve_tune.model.names import short_targets

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=MODEL_LEN,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).requires_grad_(False)
    model.save_pretrained(folder / "model")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = Adapter(adapter_sites(config, short_targets(names)), rank=8, alpha=16)
    adapter.write(folder / "adapter", str(folder / "model"))
    read = sum(each.nbytes for name, each in model.state_dict().items() if "embed" not in name)
    return OwnTile(config, model.state_dict(), adapter), read / 1e6


def measure(plain: Side, lane: Side, tile: OwnTile, spans: Sequence[int], rounds: int) -> list[Round]:
    found = []
    for number in range(rounds + 1):
        each = Round(plain=plain.step(), lane=lane.step())
        order = list(spans) if number % 2 else list(reversed(spans))
        for span in order:
            each.alone[span] = lane.step(span, alone=True)
            lane.step()  # the readers come back into the runner's batch: no part of anything measured
            each.fused[span] = lane.step(span)
            each.tile[span] = tile.seconds(span)
        each.plain_again = plain.step()
        found.append(each)
    return found[1:]  # the first warms up


def said(value: Ratio) -> str:
    return f"{value.median:.3f} ({value.low:.3f} to {value.high:.3f})"


def table(rounds: Sequence[Round], spans: Sequence[int]) -> list[str]:
    def ms(values: Sequence[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f}"

    lines = [
        "| span | span alone, ms | fused, ms | trainer's own tile, ms | fused / apart in that engine | fused / "
        "(plain step + own tile) | token added / token of the longest own tile |",
        "|---|---|---|---|---|---|---|",
    ]
    for span in spans:
        alone, fused, tile = ([getattr(each, name)[span] for each in rounds] for name in ("alone", "fused", "tile"))
        ratios = " | ".join(said(of(rounds, span)) for of in (of_lane, of_whole, of_token))
        lines.append(f"| {span} | {ms(alone)} | {ms(fused)} | {ms(tile)} | {ratios} |")
    plain, lane, again = ([getattr(each, name) for each in rounds] for name in ("plain", "lane", "plain_again"))
    lines += [
        "",
        f"A decode step: {ms(plain)} ms in the engine as it serves, {ms(lane)} ms in the engine that the lane needs,"
        f" ratio {said(ratio(lane, plain))}; the same step twice, ratio {said(ratio(again, plain))}.",
    ]
    return lines


CASES = (
    ("Against the same engine with span and step apart", of_lane),
    ("Against a plain engine with an own tile of the same span", of_whole),
    ("Against a plain engine with own tiles as long as the longest span", of_token),
)


def verdict(rounds: Sequence[Round], spans: Sequence[int]) -> list[str]:
    words = []
    for what, of in CASES:
        found = [span for span in spans if of(rounds, span).high < 1.0]  # cheaper with all of its interval
        even = f"fused pays at spans of {', '.join(map(str, found))}" if found else "fused breaks even at no span"
        words.append(f"- {what}, {even}.")
    return words


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python tools/tune/fused.py", description=__doc__)
    option(parser, "--hidden", 1024, "The width of the model, a number that 256 divides.")
    option(parser, "--layers", 12, "The number of layers.")
    option(parser, "--dtype", "float32", "The number format of the weights.", choices=("float32", "bfloat16"))
    option(parser, "--readers", 4, "The number of requests that decode.")
    option(parser, "--rounds", 12, "The number of rounds.")
    option(parser, "--spans", list(SPANS), "The lengths of the training spans in tokens.", type=int, nargs="+")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        tile, megabytes = make(folder, asked.hidden, asked.layers, asked.dtype)
        sides = [Side(folder / "model", asked.dtype, adapter) for adapter in ("", str(folder / "adapter"))]
        for side in sides:
            side.ask(running=asked.readers)
        before = os.getloadavg()[0]
        rounds = measure(sides[0], sides[1], tile, asked.spans, asked.rounds)
        for side in sides:
            side.close()
    print(
        f"{asked.dtype}, {megabytes:.0f} MB of weights read in a step, {asked.readers} readers, {asked.rounds} rounds, "
        f"CPU time on one thread, load {before:.1f} to {os.getloadavg()[0]:.1f}\n"
    )
    print("\n".join([*table(rounds, asked.spans), "", *verdict(rounds, asked.spans)]))


if __name__ == "__main__":
    main()
