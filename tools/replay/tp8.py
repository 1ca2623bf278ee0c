"""`valve replay tp8`: an eight-GPU service on a stock driver, which stops GPUs one by one, and on the patched one.

The driver's global lock serialises the stops of a node; the one-word patch lets them run at once. On one GPU the two
are the same, so the question is what the lock costs a service whose first token waits for all eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from valve_tools.replay import svg
from valve_tools.replay.pair_results import LATENCY_MARKS, PairTask, Results, increase_of, run_task, words_of
from valve_tools.replay.report import Cell, Chart, Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import SHIPPED
from valve_tools.sim.machine import MODELS
from valve_tools.sim.metrics import Claim, at_most
from valve_tools.sim.pairs import PAIRS, Bound, batch_lengths, bind
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Tuning
from valve_tools.sim.world import OfflineSide, OnlineSide

GPUS = 8
SHAPES = ("P1", "P5", "P7")
"""Whose shapes the service sees: Poisson-like chat, thousands of short gaps, memory bursts."""
SINGLE_P99_MS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    name: str
    serial_gate: bool
    tuning: Tuning = field(default_factory=Tuning)


DRIVERS = tuple(
    Driver(name=name, serial_gate=serial, tuning=Tuning(serial_gate=serial))
    for name, serial in (("stock driver", True), ("patched driver", False))
)


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    lengths = batch_lengths(folder)
    service = OnlineSide(model=MODELS["70B"], tp=GPUS)
    job = OfflineSide(model=MODELS["14B"], tp=GPUS, lengths=lengths)
    shaped = bind(folder, [pair for pair in PAIRS if pair.key in SHAPES])
    bounds = [replace(bound, service=service, job=job) for bound in shaped]
    tasks = [
        PairTask(bound=bound, seed=seed, names=(SHIPPED,), tuning=driver.tuning)
        for driver in DRIVERS
        for bound in bounds
        for seed in seeds
    ]
    outcomes = spread(run_task, tasks, progress, workers or Workers(), label="tp8")
    per_driver = len(outcomes) // len(DRIVERS)
    results = {
        driver.name: Results(outcomes[i * per_driver : (i + 1) * per_driver]) for i, driver in enumerate(DRIVERS)
    }
    return _report(bounds, results, seeds)


def _claims(bounds: Sequence[Bound], results: dict[str, Results]) -> list[Claim]:
    claims = []
    for bound in bounds:
        key = bound.pair.key
        for metric, quantile, mark in LATENCY_MARKS:
            high = results["patched driver"].over(key, SHIPPED, increase_of(metric, quantile)).high
            name = f"TP8 patched: {words_of(metric)} {quantile} increase %"
            claims.append(at_most(name, key, high, mark))
        for driver, limit in (("stock driver", GPUS * SINGLE_P99_MS), ("patched driver", 2 * SINGLE_P99_MS)):
            stop = results[driver].over(key, SHIPPED, lambda one: one.stop_ms["p99"]).high
            claims.append(at_most(f"TP8 {driver}: stop P99 ms", key, stop, limit))
        worst = max(outcome.summaries[SHIPPED].max_preemptions for outcome in results["stock driver"].of(key))
        claims.append(at_most("TP8: preemptions per request, all GPUs as one", key, worst, 1))
    return claims


def _report(bounds: Sequence[Bound], results: dict[str, Results], seeds: Sequence[int]) -> Report:
    rows: list[tuple[Cell, ...]] = []
    for bound in bounds:
        for driver, found in results.items():
            key = bound.pair.key
            solo = found.of(key)[0].own_ttft_ms
            rows.append(
                (
                    key,
                    bound.trace.label,
                    driver,
                    solo["mean"],
                    *(plus_minus(found.over(key, SHIPPED, increase_of(metric, q))) for metric, q, _ in LATENCY_MARKS),
                    plus_minus(found.over(key, SHIPPED, lambda one: one.stop_ms["p50"])),
                    plus_minus(found.over(key, SHIPPED, lambda one: one.stop_ms["p99"])),
                    plus_minus(found.over(key, SHIPPED, lambda one: one.share_of_alone)),
                )
            )
    keys = [bound.pair.key for bound in bounds]
    increases = {
        driver: [found.over(key, SHIPPED, increase_of("own_ttft_increase", "mean")).mean for key in keys]
        for driver, found in results.items()
    }
    return Report(
        name="tp8",
        title="Eight GPUs: the stock driver's lock against the one-word patch",
        summary=(
            "A 70B service over eight GPUs beside a 14B batch job over the same eight. The stock driver stops the GPUs "
            "one after another, the patched one all at once; online waits for the last. ± is half the 95 % interval.",
        ),
        claims=tuple(_claims(bounds, results)),
        tables=(
            ReportTable(
                title="Stock and patched",
                columns=("pair", "trace", "driver", "TTFT ms alone", "TTFT % mean", "TTFT % P99", "TPOT % mean",
                         "TPOT % P99", "stop P50 ms", "stop P99 ms", "GPUs saved per GPU"),
                rows=tuple(rows),
            ),
        ),
        charts=(
            Chart(
                title="Mean TTFT increase of the eight-GPU service",
                svg=svg.grouped_bars(keys, increases, unit="%", bound=2.5),
            ),
        ),
        data={"rows": [list(row) for row in rows]},
        seeds=tuple(seeds),
    )  # fmt: skip
