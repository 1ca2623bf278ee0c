"""How often 1,000 nodes of eight GPUs write their reports: the daemons' own rule, on series of what their GPUs do.

The series come from a file of samples (VALVE_TELEMETRY_TRACE, columns pod,t_s,duty; .gz or not) or, without one, from a
seeded generator of bursts and quiet times. Time is virtual: a node is looked at when a sample or its own rule says so.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_tools.bench.row import Row, row_of

from valved.policy.report_rate import SECOND_NS, RateSettings, RateState, decide_report, side_of

NODES, GPUS = 1_000, 8
SAMPLE_S = 57
SAMPLES = 63  # an hour
WINDOW_SAMPLES = 10  # the daemon judges ten minutes of idle time
BIN_S = 10
BUDGET_PER_S = 40.0

Floats = NDArray[np.float64]


def generated(seed: int = 1, count: int = 400) -> list[Floats]:
    """Idle shares of services that are busy for minutes, quiet for longer, and neither exactly."""
    random = np.random.default_rng(seed)
    series = []
    for _ in range(count):
        busy = bool(random.random() < 0.5)
        samples: list[float] = []
        while len(samples) < 4 * SAMPLES:
            length = 1 + int(random.exponential(4.0 if busy else 8.0))
            level = random.uniform(0.05, 0.5) if busy else random.uniform(0.7, 1.0)
            samples += list(np.clip(random.normal(level, 0.1, length), 0.0, 1.0))
            busy = not busy
        series.append(np.array(samples))

    return series


def recorded(path: Path) -> list[Floats]:
    """One series per pod; a pod with less than an hour of samples is left out."""
    pods: dict[str, list[float]] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["duty"]:
                pods.setdefault(row["pod"], []).append(1.0 - float(row["duty"]) / 100.0)

    return [np.array(samples) for samples in pods.values() if len(samples) > SAMPLES]


def writes_per_s(series: list[Floats], settings: RateSettings, seed: int = 2) -> tuple[list[float], Counter[str]]:
    """Writes a second in each bin once every node has reported, and why they were made."""
    random = np.random.default_rng(seed)
    bins, why = Counter[int](), Counter[str]()
    period_s = settings.period_ns // SECOND_NS
    for node in range(NODES):
        begun_s = float(random.uniform(0, period_s))
        standings = _standings(series, random, settings)
        for at_s, reason in _node(standings, begun_s, node / NODES, settings):
            bins[int(at_s // BIN_S)] += 1
            why[reason] += at_s >= period_s
    first, last = 2 * period_s // BIN_S, SAMPLES * SAMPLE_S // BIN_S

    return [bins[index] / BIN_S for index in range(first, last)], why


def _standings(series: list[Floats], random: np.random.Generator, settings: RateSettings) -> list[tuple[bool, ...]]:
    """Per sample on which side of the asked-for share each GPU of a node is."""
    idle = []
    for index in random.integers(0, len(series), GPUS):
        offset = int(random.integers(0, len(series[index]) - SAMPLES + 1))
        found = series[index][offset : offset + SAMPLES]
        sums = np.cumsum(np.insert(found, 0, 0.0))
        starts = np.maximum(0, np.arange(1, SAMPLES + 1) - WINDOW_SAMPLES)
        idle.append((sums[1:] - sums[starts]) / (np.arange(1, SAMPLES + 1) - starts))
    sides: list[tuple[bool, ...]] = []
    for sample in range(SAMPLES):
        before = sides[-1] if sides else [None] * GPUS
        sides.append(tuple(side_of(float(idle[gpu][sample]), before[gpu], settings) for gpu in range(GPUS)))

    return sides


def _node(
    standings: list[tuple[bool, ...]], begun_s: float, phase: float, settings: RateSettings
) -> Iterator[tuple[float, str]]:
    """When a node writes, and why."""
    state = RateState()
    looks = [begun_s + sample * SAMPLE_S for sample in range(SAMPLES)]
    heapq.heapify(looks)
    end_s = begun_s + SAMPLES * SAMPLE_S
    while looks:
        at_s = heapq.heappop(looks)
        sample = min(SAMPLES - 1, int((at_s - begun_s + 1e-9) // SAMPLE_S))
        now_ns = round(at_s * SECOND_NS)
        state, decision = decide_report(state, (standings[sample],), phase, now_ns, settings)
        if decision.write:
            yield at_s, decision.reason
        again_s = max(decision.again_ns / SECOND_NS, at_s + 0.001)
        if again_s < end_s and (not looks or again_s < looks[0]):
            heapq.heappush(looks, again_s)


def bench() -> Iterable[Row]:
    path = os.environ.get("VALVE_TELEMETRY_TRACE", "")
    series = recorded(Path(path)) if path else generated()
    rates, why = writes_per_s(series, RateSettings())
    early = why["changed"] / max(1, sum(why.values()))
    note = f"{len(series)} series, {'recorded' if path else 'generated'}; {early:.0%} of the writes came early"

    return [row_of("telemetry", f"report writes, {NODES} nodes", "writes/s", rates, BUDGET_PER_S, note=note)]


BENCHES = {"telemetry": bench}
