"""`valve replay rivals`: every rival under every value of its setting, on the traces that settings are chosen on.

The pages of pairs run each rival at the value that is best here. A value's worth on a pair is the offline work that it
gets, as a share of the job alone, where it keeps the marks, and nothing where it does not; its score is the mean over
the pairs. The marks are those of the rivals' own papers; beside them stands the score under ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from valve_tools.replay.pair_results import LATENCY_MARKS, PAPER_MARKS, Marks, increase_of
from valve_tools.replay.report import Cell, Report, ReportTable
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import run_combination, run_job_alone, run_own, run_solo
from valve_tools.sim.metrics import Claim, Summary, at_least, summarise
from valve_tools.sim.pairs import Bound, bind
from valve_tools.sim.rivals import SWEEPS, Sweep
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Context

NEAR = 0.98
"""Two values whose scores differ by less are as good as each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalTask:
    bound: Bound
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One rival at one value on one pair under one seed."""

    pair: str
    seed: int
    rival: str
    value: str
    summary: Summary


def run_task(task: RivalTask) -> list[Tried]:
    bound, seed = task.bound, task.seed
    own, solo = run_own(bound, seed), run_solo(bound, seed)
    alone = run_job_alone(bound, seed).offline_tokens_per_s
    context = Context(bound=bound, seed=seed, solo=solo)
    return [
        Tried(
            pair=bound.pair.key,
            seed=seed,
            rival=sweep.rival,
            value=value,
            summary=summarise(run_combination(one, context), solo, alone, own),
        )
        for sweep in SWEEPS
        for value, one in sweep.tried.items()
    ]


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    tasks = [RivalTask(bound=bound, seed=seed) for seed in seeds for bound in bind(folder)]
    found = spread(run_task, tasks, progress, workers or Workers(), label="rivals")
    return report([one for some in found for one in some], seeds)


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    return report([msgspec.convert(one, Tried) for one in data["tried"]], seeds)


def keeps(one: Summary, marks: Marks) -> bool:
    return all(increase_of(metric, quantile)(one) <= mark for metric, quantile, mark in marks)


def score(found: Sequence[Tried], marks: Marks) -> tuple[float, float]:
    """Mean over the runs of what is harvested within the marks, and the share of runs that keep them."""
    kept = [keeps(one.summary, marks) for one in found]
    worth = [one.summary.share_of_alone if good else 0.0 for one, good in zip(found, kept, strict=True)]
    return sum(worth) / len(worth), sum(kept) / len(kept)


def report(found: Sequence[Tried], seeds: Sequence[int]) -> Report:
    return Report(
        name="rivals",
        title="Rivals: the setting that is best for each",
        summary=(
            "Every rival that has a setting, under every value of it, on the half of the traces that settings are "
            "chosen on; the pages of pairs are made on the other half, with the value that is best here. The score of "
            "a value is the offline work it gets over that of the job alone, the mean over all pairs, where a pair "
            "whose marks it misses counts nothing. The papers' marks (mean TTFT +5 %, mean TPOT +2 %, over a GPU of "
            "the service's own) decide; beside them stands the score under ours.",
        ),
        claims=tuple(claim for sweep in SWEEPS for claim in _claims(sweep, _of(found, sweep.rival))),
        tables=(_table(found),),
        data={"tried": [asdict(one) for one in found]},
        seeds=tuple(seeds),
    )


def _of(found: Sequence[Tried], rival: str) -> dict[str, list[Tried]]:
    values: dict[str, list[Tried]] = {}
    for one in found:
        if one.rival == rival:
            values.setdefault(one.value, []).append(one)
    return values


def _claims(sweep: Sweep, values: Mapping[str, Sequence[Tried]]) -> list[Claim]:
    """That the pages run the value that is best by each kind of marks."""
    claims = []
    for words, used, marks in (
        ("papers' marks", sweep.best, PAPER_MARKS),
        ("our marks", sweep.careful or sweep.best, LATENCY_MARKS),
    ):
        scores = {value: score(some, marks)[0] for value, some in values.items()}
        best = max(scores, key=lambda value: scores[value])
        share = [scores[used] / scores[best]] if scores[best] > 0 else []
        name = f"score of the value on the pages over the best, {words}"
        claims.append(at_least(name, sweep.rival, share, NEAR, f"{used}; best is {best}"))
    return claims


def _used(sweep: Sweep, value: str) -> str:
    words = ["papers' marks"] if value == sweep.best else []
    words += ["our marks"] if value == (sweep.careful or sweep.best) else []
    return ", ".join(words)


def _table(found: Sequence[Tried]) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for sweep in SWEEPS:
        for value, some in _of(found, sweep.rival).items():
            cells = (score(some, PAPER_MARKS), score(some, LATENCY_MARKS))
            rows.append(
                (sweep.rival, sweep.setting, value, _used(sweep, value), *(cell for pair in cells for cell in pair))
            )
    return ReportTable(
        title="Values tried",
        columns=("rival", "setting", "value", "on the pages for", "score, papers' marks", "runs that keep them",
                 "score, our marks", "runs that keep them"),
        rows=tuple(rows),
    )  # fmt: skip
