"""What an operator asks `whatif`: a load, a card, two models; and what of a long load is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from valve_tools.replay.fleet_input import prometheus_of, requests_of
from valve_tools.sim.machine import GPUS, MODELS, Gpu, Settings
from valve_tools.sim.pairs import Bound, PairRow, batch_lengths
from valve_tools.sim.sample import sampled
from valve_tools.sim.shape import LoadShape, window_s
from valve_tools.sim.traces import Folder, Trace, TraceError
from valve_tools.sim.world import OfflineSide, OnlineSide

PLAUSIBLE = {"memory_gib": (1.0, 10_000.0), "bandwidth_bytes_s": (1e9, 1e15), "flops": (1e10, 1e18)}
SHARE, TIMES_NS = (0.01, 1.0), (1e-3, 1e9)
"""What a figure of a card can be: by its name, of an efficiency, of a time."""
LEAST_REQUESTS, LEAST_S = 50, 60.0
"""A shorter load says nothing about a service: no answer is given."""
NOT_ASKED = LoadShape(harvestable=math.nan, idle_per_hour=math.nan, kv_peak_tokens=math.nan)
"""The shape says which pair a trace is for; here the operator said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the operator has."""

    requests: Path | None = None
    prometheus: Path | None = None
    machine: Path | None = None
    gpu: str = "H100"
    online: str = "8B"
    offline: str = "8B"
    tp: int = 1
    replicas: int = 1
    """The load is that of so many replicas; one of them is simulated."""
    hours: float | None = None
    """Only the first so many hours of the load."""


def machine_of(question: Question) -> Settings:
    """The card by name, or its figures from a JSON file that names the fields of `Gpu` to change."""
    if question.gpu not in GPUS:
        raise TraceError(f"--gpu {question.gpu}: known are {', '.join(GPUS)}; describe another with --machine FILE")
    gpu = GPUS[question.gpu]
    if question.machine is None:
        return Settings(gpu=gpu)
    try:
        changes = json.loads(question.machine.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{question.machine}: not readable as JSON: {error}") from error
    if not isinstance(changes, dict):
        raise TraceError(f'{question.machine}: not a JSON object of figures, such as {{"memory_gib": 44}}')
    for name, value in changes.items():
        _check_figure(f"{question.machine}: {name}", name, value)
    return Settings(gpu=replace(gpu, **changes))


def _check_figure(place: str, name: str, value: object) -> None:
    known = [field.name for field in fields(Gpu)]
    if name not in known:
        raise TraceError(f"{place}: unknown field {name!r}; known are {', '.join(known)}")
    if name == "name":
        if not isinstance(value, str):
            raise TraceError(f"{place} is {value!r}, it must be a word")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TraceError(f"{place} is {value!r}, it must be a number above zero")
    least, most = PLAUSIBLE.get(name, SHARE if name.endswith("_efficiency") else TIMES_NS)
    if not least <= value <= most:
        raise TraceError(f"{place} is {value!r}, it must be at least {least:g} and at most {most:g}")


def trace_of(question: Question, seed: int) -> Trace:
    if (question.requests is None) == (question.prometheus is None):
        raise TraceError("pass one of --requests FILE (CSV) and --prometheus FILE (query_range JSON)")
    whole = requests_of(question.requests) if question.requests else prometheus_of(Path(str(question.prometheus)), seed)
    load = whole.thinned(question.replicas)
    return sampled(load if question.hours is None else load.first(question.hours * 3600))


def words_of_load(trace: Trace) -> str:
    """What is judged, and of how much."""
    found = f"{trace.requests:,} requests in {window_s(trace) / 3600:.1f} h"
    if trace.sample is None:
        return found
    return f"{found}, a sample of {trace.sample.of_requests:,} in {trace.sample.of_s / 3600:.1f} h,"


def bound_of(question: Question, trace: Trace) -> Bound:
    for name in (question.online, question.offline):
        if name not in MODELS:
            raise TraceError(f"model {name}: known are {', '.join(MODELS)}")
    if trace.requests == 0:
        raise TraceError("the load holds no request")
    if trace.requests < LEAST_REQUESTS or window_s(trace) < LEAST_S:
        raise TraceError(
            f"no answer: {words_of_load(trace)} say nothing about a service; "
            f"bring at least {LEAST_REQUESTS} over {LEAST_S:.0f} s, better a day"
        )
    online, offline, shape = question.online, question.offline, NOT_ASKED
    pair = PairRow(key="fleet", title="your load", about="", online=online, offline=offline, shape=shape)
    lengths = batch_lengths(Folder(traces=(), lengths=(), ignored=()))
    return Bound(
        pair=pair,
        trace=trace,
        shape=shape,
        service=OnlineSide(model=MODELS[online], tp=question.tp),
        job=OfflineSide(model=MODELS[offline], tp=question.tp, lengths=lengths),
    )


def bounds_of(question: Question, seeds: Sequence[int]) -> list[Bound]:
    """One for each seed; only an export's load is drawn anew."""
    first = bound_of(question, trace_of(question, seeds[0]))
    if question.prometheus is None:
        return [first] * len(seeds)
    return [first, *(bound_of(question, trace_of(question, seed)) for seed in seeds[1:])]
