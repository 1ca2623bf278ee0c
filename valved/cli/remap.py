"""Says how KV memory is taken from offline processes, for `valve status` and `valve doctor` (docs/memory.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from valved.cli import words
from valved.model.ids import TRIED_FIRST, Remap, TrialOutcome

WANTED = {way.value for way in TRIED_FIRST}


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
    return found


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
