"""Says how KV memory is taken from offline processes, for `valve status` and `valve doctor` (docs/memory.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from valved.cli import words
from valved.model.ids import TRIED_FIRST, Remap, TrialOutcome

WANTED = {way.value for way in TRIED_FIRST}
LOADS = (0.5, 1.0, 8.0)
"""Requests of the service that are open on average."""
PRICES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "sparse": ((7.5, 3.7, 14.3), (3.9, -1.4, 16.4), (-5.8, -23.6, 3.2)),
    "helper": ((7.9, 2.3, 12.6), (5.5, -0.9, 20.2), (-3.4, -18.5, 15.4)),
    "cooperative": ((18.6, 10.6, 29.1), (14.8, 9.6, 19.0), (5.5, -18.5, 12.5)),
}
"""Per cent of mean TTFT over the service alone at each load: median and ends of the interval. Measured by `valve bench
rungs` on the emulated GPU with a reclaim for every third request, on a machine too busy to tell 2.5 % apart
(docs/memory.md has the table, docs/results/memory.md the run)."""


def lines(memory: Any) -> list[str]:
    """What the trials of the processes here have shown, and what was let run for it."""
    counts = Counter(trial.rung for trial in memory.trials)
    found = []
    if counts:
        found.append("taken by: " + ", ".join(f"{rung} from {count}" for rung, count in sorted(counts.items())))
    found += [f"GPU {one.gpu}, pid {one.pid}, {one.rung}: {_why(one)}" for one in memory.trials if one.reason]
    if memory.lets:
        again = f", {memory.lets_again} of them once more for the same need" if memory.lets_again else ""
        took = words.duration(memory.let_ns)
        found.append(f"offline steps let end beside a waiting request: {memory.lets}, in {took}{again}")
    return found + [price(rung) for rung in sorted(counts or {memory.remap}) if rung in PRICES]


def price(rung: str) -> str:
    """What a service pays where memory is so scarce that every third request needs a reclaim."""
    told = ", ".join(f"{PRICES[rung][i][0]:+.1f} % at {load:g}" for i, load in enumerate(LOADS))
    return f"measured price of {rung}, mean TTFT by open requests, a reclaim for one request in three: {told}"


def _why(trial: Any) -> str:
    if trial.outcome == TrialOutcome.UNTRIED.value:
        return f"not tried yet ({trial.reason})"
    return f"trial {trial.outcome} ({trial.reason})"


def failed(memory: Any) -> list[str]:
    """Processes that were to be treated otherwise."""
    if memory.remap not in WANTED:
        return []
    bad = {TrialOutcome.REFUSED.value, TrialOutcome.WRONG.value, TrialOutcome.HUNG.value}
    return [f"pid {one.pid} on GPU {one.gpu}: {_why(one)}" for one in memory.trials if one.outcome in bad]


def passed(memory: Any) -> str:
    """In words; empty where none was tried."""
    good = [one for one in memory.trials if one.outcome == TrialOutcome.PASSED.value]
    if memory.remap not in WANTED:
        return f"memory.remap = {memory.remap}: nothing is tried"
    if not good:
        return "no offline process has been tried yet"
    slowest = words.duration(max(one.took_ns for one in good))
    return f"{len(good)} processes passed the trial of {Remap.SPARSE.value}, the slowest call took {slowest}"
