"""`valve replay cooldown`: what a service without hints leaves to offline work, by what its cooldown learns from.

Every trace of the folder, on engines whose host leaves gaps of three kinds. `largest gap` is the product's default,
`arrivals` the same with `cooldown.arrivals`: shortened by how gaps are spread (valved/policy/apart.py). Both are
compared with a hint, which needs no cooldown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from valve_tools.replay.report import Report, ReportTable
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import BY_NAME, OURS, run_combination, run_solo
from valve_tools.sim.metrics import Summary, summarise
from valve_tools.sim.pairs import Bound, bind
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Context, Tuning
from valve_tools.sim.world import HostGap

SECONDS = 2 * 3600.0
WITHOUT_HINT = "Channel without hint+OurMem"
ENGINES = {
    "async": HostGap(),
    "older": HostGap(median_ns=3e6, sigma=0.99, max_ns=100e6),  # P99 30 ms
    "stalling": HostGap(median_ns=0.5e6, sigma=2.0, max_ns=400e6),  # invented: longer than any cooldown covers
}
RULES = {
    "hint": (OURS, Tuning()),
    "largest gap": (WITHOUT_HINT, Tuning()),
    "arrivals": (WITHOUT_HINT, Tuning(by_arrivals=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownTask:
    bound: Bound
    engine: str
    seed: int


def run_task(task: CooldownTask) -> dict[str, Summary]:
    service = replace(task.bound.service, gap=ENGINES[task.engine])
    bound = replace(task.bound, service=service, trace=task.bound.trace.first(SECONDS))
    solo = run_solo(bound, task.seed)
    found = {}
    for rule, (combination, tuning) in RULES.items():
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=tuning)
        found[rule] = summarise(run_combination(BY_NAME[combination], context), solo, 1.0)
    return found


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    bounds = bind(folder)
    bound_names = {bound.trace.name for bound in bounds}
    bounds += [replace(bounds[0], trace=trace) for trace in folder.traces if trace.name not in bound_names]
    keys = [(engine, bound) for engine in ENGINES for bound in bounds]
    tasks = [CooldownTask(bound=bound, engine=engine, seed=seed) for engine, bound in keys for seed in seeds]
    runs = spread(run_task, tasks, progress, workers or Workers(), label="cooldown")
    rows: list[tuple[Any, ...]] = []
    data: list[dict[str, Any]] = []
    for i, (engine, bound) in enumerate(keys):
        of_seeds = runs[i * len(seeds) : (i + 1) * len(seeds)]
        rows.append((engine, bound.trace.name, *_cells(of_seeds)))
        data += [
            {"engine": engine, "trace": bound.trace.name, "seed": seed, "rule": rule, **asdict(one)}
            for seed, found in zip(seeds, of_seeds, strict=True)
            for rule, one in found.items()
        ]
    return Report(
        name="cooldown",
        title="What the cooldown of a service without hints learns from",
        summary=(
            f"Up to {SECONDS / 3600:g} hours of each trace, Valve's own policies. Kept is offline work's tokens a "
            "second over those beside the same service with a hint. Hit twice is the share of requests that were "
            "preempted more than once.",
            "The host's gaps between two steps: async has a median of 0.5 ms and at most 20, older a median of 3, a "
            "P99 of 30 and at most 100 ms. Stalling (0.5 and at most 400 ms) is invented: no cooldown covers its gaps.",
        ),
        tables=(ReportTable(title="Services", columns=COLUMNS, rows=tuple(rows)),),
        data={"rows": data},
        seeds=tuple(seeds),
    )


COLUMNS = (
    *("engine", "trace", "kept, largest gap", "kept, arrivals"),
    *("hit twice %, largest gap", "hit twice %, arrivals"),
)


def _cells(of_seeds: Sequence[dict[str, Summary]]) -> tuple[Any, ...]:
    rules = ("largest gap", "arrivals")
    hint = sum(found["hint"].offline_tokens_per_s for found in of_seeds)
    kept = [sum(found[rule].offline_tokens_per_s for found in of_seeds) / max(hint, 1e-9) for rule in rules]
    hit = [sum(twice(found[rule]) for found in of_seeds) / len(of_seeds) for rule in rules]
    return (*(round(one, 3) for one in kept), *(round(100 * one, 2) for one in hit))


def twice(found: Summary) -> float:
    return sum(found.preemptions[2:]) / max(1, sum(found.preemptions))
