"""`valve replay early`: how early memory is taken where it comes only between two steps of the offline engine.

Each value of `pressure_ratio` (memory is taken when so much of what is mapped is in use) under steps as short as they
are cut to, and as long as they are without that; the last row takes memory under the gate, as `sparse` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from valve_tools.replay.report import Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import BY_NAME, OURS, run_combination, run_job_alone, run_solo
from valve_tools.sim.metrics import Summary, interval, summarise
from valve_tools.sim.pairs import PAIRS, Bound, bind
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Context, Tuning

MS = 1_000_000
RATIOS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
STEPS_MS = (30, 200)
SHAPES = ("P1", "P3", "P5", "P7", "P8")
SECONDS = 2 * 3600.0
GATED = (0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyTask:
    bound: Bound
    seed: int


def settings() -> list[tuple[int, float]]:
    """(offline step in ms, ratio)."""
    return [*((step, ratio) for step in STEPS_MS for ratio in RATIOS), GATED]


def tuning_of(step_ms: int, ratio: float) -> Tuning:
    base = Tuning()
    return replace(base, reservation=replace(base.reservation, pressure_ratio=ratio), offline_step_ns=step_ms * MS)


def run_task(task: EarlyTask) -> dict[tuple[int, float], Summary]:
    bound = replace(task.bound, trace=task.bound.trace.first(SECONDS))
    solo, alone = run_solo(bound, task.seed), run_job_alone(bound, task.seed).offline_tokens_per_s
    found = {}
    for step_ms, ratio in settings():
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=tuning_of(step_ms, ratio))
        found[step_ms, ratio] = summarise(run_combination(BY_NAME[OURS], context), solo, alone)
    return found


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    bounds = bind(folder, [pair for pair in PAIRS if pair.key in SHAPES])
    tasks = [EarlyTask(bound=bound, seed=seed) for seed in seeds for bound in bounds]
    runs = spread(run_task, tasks, progress, workers or Workers(), label="early")
    keys = [task.bound.pair.key for task in tasks]
    rows: list[tuple[Any, ...]] = []
    data: list[dict[str, Any]] = []
    for step_ms, ratio in settings():
        figures = [one[step_ms, ratio] for one in runs]
        rows.append((step_ms or "under the gate", ratio, *_cells(keys, figures)))
        data += [
            {"step_ms": step_ms, "ratio": ratio, "pair": key, **asdict(one)}
            for key, one in zip(keys, figures, strict=True)
        ]
    return Report(
        name="early",
        title="How early to take memory that comes between two offline steps",
        summary=(
            f"Five shapes of load, {SECONDS / 3600:g} hours each, Valve's own policies; increases are over solo runs. "
            "A reclaim waits for what is left of an offline step, twice as long because it runs beside online work.",
        ),
        tables=(ReportTable(title="Steps and ratios", columns=COLUMNS, rows=tuple(rows)),),
        data={"rows": data},
        seeds=tuple(seeds),
    )


COLUMNS = (
    *("offline step, ms", "pressure ratio", "TTFT mean %, mean of pairs", "worst pair", "TTFT P99 %, mean of pairs"),
    *("offline over alone", "reclaims an hour, mean", "worst hour"),
)


def _cells(keys: Sequence[str], figures: Sequence[Summary]) -> tuple[Any, ...]:
    of_pair = {key: [one for name, one in zip(keys, figures, strict=True) if name == key] for key in keys}
    means = {key: interval([one.ttft_increase["mean"] for one in some]) for key, some in of_pair.items()}
    hours = [count for one in figures for count in one.reclaims_by_hour]
    return (
        plus_minus(interval([one.ttft_increase["mean"] for one in figures])),
        plus_minus(max(means.values(), key=lambda one: one.mean)),
        plus_minus(interval([one.ttft_increase["p99"] for one in figures])),
        plus_minus(interval([one.share_of_alone for one in figures])),
        sum(hours) / max(1, len(hours)),
        max(hours, default=0),
    )
