"""`valve replay crowding`: which pairs placement refuses because online needs their memory at its peaks.

The service runs on a GPU of its own; what it used each second goes through the functions of the product, from the
node's series over its report to the ranking. Beside the verdict stands what sharing the card costs the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np
from valve_kube.objects import node_report
from valve_scheduler.model import HISTOGRAM_BINS, ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.rank import Job, PlacementSettings, Reason, rank
from valve_scheduler.placement.state import ClusterState
from valve_tools.replay.pair_results import LATENCY_MARKS
from valve_tools.replay.report import Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import BY_NAME, PRODUCT, SHIPPED, run_combination, run_own, run_solo
from valve_tools.sim.generator import generate
from valve_tools.sim.machine import GIB
from valve_tools.sim.metrics import Claim, at_most, interval, summarise
from valve_tools.sim.pairs import Bound, bind
from valve_tools.sim.shape import window_s
from valve_tools.sim.traces import Folder, Half, half_of
from valve_tools.sim.tuning import Context
from valve_tools.sim.world import Result

from valved.kube.series import NodeSeries

MEASURED_SHARE = 0.25
"""Of the job's cache in a fit that its node measured: the lowest level of a profiling run."""
DRAWN = (2, 3, 4)
"""Seeds of generated folders that were not looked at when the rule's figures were set."""
Increases = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdingTask:
    half: str
    bound: Bound
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdedPair:
    """One pair under one seed. Memory in GiB of one GPU."""

    half: str
    pair: str
    trace: str
    seed: int
    card: float
    peak: float
    """As the report says it: the upper edge of a bin."""
    held: float
    refused: bool
    refused_beside_a_job: bool
    """The same, told by a service that has the job's weights beside it already."""
    refused_unmeasured: bool
    refused_measured: bool
    memory: Increases
    """What the weights beside it cost the service, no job running: percent over a GPU of its own."""
    valve: Increases
    """The same with Valve and the job."""


def run_task(task: CrowdingTask) -> CrowdedPair:
    bound, settings = task.bound, PRODUCT.settings
    job = bound.job
    own, solo = run_own(bound, task.seed), run_solo(bound, task.seed)
    context = Context(bound=bound, seed=task.seed, solo=solo, tuning=PRODUCT)
    valve = summarise(run_combination(BY_NAME[SHIPPED], context), solo, 1.0, own)
    alone = summarise(solo, solo, 1.0, own)
    held = job.model.weights_gib / job.tp + settings.activation_gib + job.train_memory_gib
    card = settings.gpu.memory_gib
    peak = state_of(bound, own).fleet(0.0).online_peak[0, 0] / 1024
    pool = solo.handles * settings.handle_mib / 1024
    return CrowdedPair(
        half=task.half,
        pair=bound.pair.key,
        trace=bound.trace.label,
        seed=task.seed,
        card=card,
        peak=float(peak),
        held=held,
        refused=is_refused(bound, own, held),
        refused_beside_a_job=is_refused(bound, solo, held),
        refused_unmeasured=is_refused(bound, own, 0.0),
        refused_measured=is_refused(bound, own, held + MEASURED_SHARE * pool),
        memory=_marked(alone),
        valve=_marked(valve),
    )


def is_refused(bound: Bound, run: Result, held_gib: float) -> bool:
    """By the ranking of the product; `held_gib` 0: the job was not measured."""
    state = state_of(bound, run)
    curve = ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,))
    measured = WorkloadProfile(standalone_tokens_per_s=1.0, curve=curve, fit_mib=held_gib * 1024)
    job = Job(gpus=1, profile=measured if held_gib else None)
    found = Reason(rank(state.fleet(0.0), state.sets(1), job, state.settings).reason[0])
    if found not in (Reason.NONE, Reason.CROWDED):
        raise AssertionError(f"{bound.pair.key} is refused for another reason: {found.name}")
    return found is Reason.CROWDED


def state_of(bound: Bound, run: Result) -> ClusterState:
    """What the cluster knows of a GPU on which the service ran so; all of it is free while the service is away."""
    state = ClusterState(PlacementSettings(), capacity=1)
    state.put_report(node_report(report_of(bound, run)), 0.0)
    return state


def report_of(bound: Bound, run: Result) -> dict[str, Any]:
    settings = PRODUCT.settings
    total = round(settings.gpu.memory_gib * GIB)
    base = bound.service.model.weights_gib / bound.service.tp + settings.activation_gib
    series = NodeSeries(1)
    for second, handles in run.usage.tolist():
        used = base * GIB + handles * settings.handle_mib * (1 << 20)
        series.memory(float(second), 0, round(total - used), total, is_held=True)
    gpu = {
        "uuid": "GPU-0",
        "harvestable": True,
        "idle": {"1h": 1.0},
        "freeMemory": [*[0.0] * (HISTOGRAM_BINS - 1), 1.0],
        "onlineMemory": series.online_memory(0),
    }
    status = {
        "phase": "Harvesting",
        "memoryMiB": total >> 20,
        "observedAt": "1970-01-01T00:00:00Z",
        "gpus": [gpu],
        "alignment": [],
    }
    return {"metadata": {"name": "node"}, "status": status}


def _marked(one: Any) -> Increases:
    return {f"{metric} {quantile}": getattr(one, metric)[quantile] for metric, quantile, _ in LATENCY_MARKS}


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    """Each half for itself, as traces are chosen by shape and the nearest is another there; and drawn loads."""
    halves = {
        half: [one for one in folder.traces if half_of(one.digest) is half] for half in (Half.CLAIMS, Half.TUNING)
    }
    loads = {half.value: replace(folder, traces=tuple(some)) for half, some in halves.items() if some}
    longest_s = max(window_s(one) for one in folder.traces)
    for number in DRAWN:
        drawn = generate(number)
        loads[f"drawn {number}"] = replace(drawn, traces=tuple(one.first(longest_s) for one in drawn.traces))
    tasks = [
        CrowdingTask(half=name, bound=bound, seed=seed)
        for name, one in loads.items()
        for bound in bind(one)
        for seed in seeds
    ]
    return report(spread(run_task, tasks, progress, workers or Workers(), label="crowding"), seeds)


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    """The same page from the figures of a `crowding.json`."""
    return report([msgspec.convert(one, CrowdedPair) for one in data["judged"]], seeds)


def costs(found: Sequence[CrowdedPair]) -> bool:
    """Sharing the card's memory alone costs the service more than one of the marks, the mean over the seeds."""
    return any(
        interval([one.memory[f"{metric} {quantile}"] for one in found]).mean > mark
        for metric, quantile, mark in LATENCY_MARKS
    )


def report(found: Sequence[CrowdedPair], seeds: Sequence[int]) -> Report:
    grouped: dict[tuple[str, str], list[CrowdedPair]] = {}
    for one in found:
        grouped.setdefault((one.half, one.pair), []).append(one)
    return Report(
        name="crowding",
        title="Crowding: which pairs placement refuses for online's peaks of memory",
        summary=(
            "The service runs on a GPU of its own; what it used in each second goes through the node's series, its "
            "report and the ranking of the product. A pair is refused where the 99 % quantile of that (the upper edge "
            "of a bin of a 32nd of the card) and what the job holds take more than 90 % of the card together. Both "
            "figures were set after a look at one seed of both halves; the drawn loads were run afterwards, once.",
            "*Memory alone* is the service beside the job's weights while nothing of the job runs: what no stop and "
            "no reclaim can mend. *With Valve* is the pair as shipped. Both over the service on a GPU of its own, "
            "means over the seeds. *Right* is a refusal of a pair whose memory alone misses one of the four latency "
            "marks (mean and P99 of TTFT and TPOT), and letting in any other.",
        ),
        claims=tuple(_claims(grouped)),
        tables=(_table(grouped),),
        data={"judged": [asdict(one) for one in found]},
        seeds=tuple(seeds),
    )


def _claims(grouped: dict[tuple[str, str], list[CrowdedPair]]) -> list[Claim]:
    let_in = [key for key, some in grouped.items() if costs(some) and not all(one.refused for one in some)]
    beside = [key for key, some in grouped.items() if costs(some) and not all(one.refused_beside_a_job for one in some)]
    wrong = [key for key, some in grouped.items() if not costs(some) and any(one.refused for one in some)]

    def words(keys: Sequence[tuple[str, str]]) -> str:
        return ", ".join(f"{pair} ({half})" for half, pair in keys)

    def judged(claim: str, keys: Sequence[tuple[str, str]]) -> Claim:
        return at_most(claim, "all", [len(keys)] if grouped else [], 0, words(keys))

    return [
        judged("pairs let in whose memory alone costs a mark", let_in),
        judged("the same, told by a service beside a job", beside),
        judged("pairs refused that cost nothing", wrong),
    ]


def _table(grouped: dict[tuple[str, str], list[CrowdedPair]]) -> ReportTable:
    rows = []
    for (half, pair), some in grouped.items():
        first = some[0]

        def mean(which: str, name: str, some: list[CrowdedPair] = some) -> Any:
            return plus_minus(interval([getattr(one, which)[name] for one in some]))

        refused = all(one.refused for one in some)
        peak = float(np.max([one.peak for one in some]))
        rows.append(
            (
                pair, half, first.trace, peak, first.held, 100 * (peak + first.held) / first.card,
                "refused" if refused else "let in", "yes" if refused == costs(some) else "NO",
                *(mean("memory", f"own_ttft_increase {quantile}") for quantile in ("mean", "p99")),
                *(mean("valve", f"own_ttft_increase {quantile}") for quantile in ("mean", "p99")),
                "refused" if any(one.refused_unmeasured for one in some) else "let in",
                "refused" if any(one.refused_measured for one in some) else "let in",
            )
        )  # fmt: skip
    return ReportTable(
        title="Verdicts",
        columns=("pair", "half", "trace", "online's peak, GiB", "job holds, GiB", "together, % of the card", "verdict",
                 "right", "memory alone: TTFT % mean", "P99", "with Valve: TTFT % mean", "P99",
                 "a job nobody measured", "fit measured by a node"),
        rows=tuple(rows),
        note="A job that nobody measured is taken to hold a quarter of the card. A fit that a node measured holds a "
        "quarter of the job's cache beside its weights.",
    )  # fmt: skip
