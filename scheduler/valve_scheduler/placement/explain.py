"""Why a pod is where it is, or nowhere: the extender's own judgement, told for people. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import Object, followed, offline_pod, pod_place

from valve_scheduler.model import SPARE_SHARE, belief, held_mib
from valve_scheduler.placement.grounds import CLOSED_TEXT
from valve_scheduler.placement.namespace_rule import barred
from valve_scheduler.placement.promise import ANY_SLA, promised, refusal, young
from valve_scheduler.placement.rank import Fleet, GpuSets, Job, Ranking, Reason, rank, ranked_nodes
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.undecided import undecided_node, undecided_told

_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One reason, how many nodes it holds for, and a few of them."""

    text: str
    nodes: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdle:
    """Mean idle share of a node's GPUs in the windows that the forecast is made of. None: not seen yet."""

    node: str
    recent: float | None
    hour: float | None
    day: float | None
    history: str  # how far an SLA may count on them; empty: as far as they go


@dataclass(frozen=True, slots=True, kw_only=True)
class PodExplanation:
    """`state` in a word, `candidates` best first with predicted shares, `advice` what would change the answer."""

    pod: str
    state: str  # placed | finished | undecided | placeable | unplaceable | barred | invalid
    node: str = ""
    gpus: tuple[str, ...] = ()
    predicted: str = ""
    candidates: tuple[tuple[str, float], ...] = ()
    windows: tuple[NodeIdle, ...] = ()  # of the candidates, else of the best nodes there are
    refusals: tuple[Refusal, ...] = ()
    advice: str = ""


def explain(state: ClusterState, pod: Object, now_s: float, most: int = 5) -> PodExplanation:
    title = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    place = pod_place(pod)
    if place.node:
        predicted = (pod["metadata"].get("annotations") or {}).get(names.PREDICTED, "")
        word = "finished" if place.finished else "placed"
        return PodExplanation(pod=title, state=word, node=place.node, gpus=place.gpu_uuids, predicted=predicted)
    try:
        wish = offline_pod(followed(pod))
    except InvalidObject as error:
        return PodExplanation(pod=title, state="invalid", advice=str(error))
    if node := undecided_node(pod):
        return PodExplanation(pod=title, state="undecided", node=node, advice=undecided_told(node))
    if why := barred(state, wish):
        return PodExplanation(pod=title, state="barred", advice=why)
    job, fleet, sets = state.asked.job(wish, now_s), state.fleet(now_s), state.sets(wish.gpus)
    ranking = rank(fleet, promised(sets, state.belief, job), job, state.settings)
    found = ranked_nodes(fleet, ranking)
    advice = ""
    best, shown = found, [ranking]
    if not found:
        asking = replace(job, sla=ANY_SLA)
        shown = [
            rank(fleet, promised(sets, state.belief, asking), asking, state.settings),
            rank(fleet, sets, replace(job, sla=0.0), state.settings),
        ]
        could, best = (ranked_nodes(fleet, one) for one in shown)
        advice = _advice(job.sla, could, len(state.node_names())) or crowded(fleet, ranking, job)

    return PodExplanation(
        pod=title,
        state="placeable" if found else "unplaceable",
        candidates=tuple(found[:most]),
        windows=tuple(_idle(state, node, _gpus(state, node, sets, shown)) for node, _ in best[:most]),
        refusals=_refusals(fleet, ranking, state.asked.closed_to(wish), young(fleet, sets, state.belief)),
        advice=advice,
    )


def _gpus(state: ClusterState, node: str, sets: GpuSets, shown: Sequence[Ranking]) -> list[int]:
    """The set of the node that the first ranking chose which takes it."""
    row = state.row(node)
    chosen = next(one.set_index[row] for one in shown if one.set_index[row] >= 0)
    return [int(gpu) for gpu in sets.members[chosen]]


def _idle(state: ClusterState, node: str, gpus: Sequence[int]) -> NodeIdle:
    recent, hour, day = state.idle_windows(node)
    return NodeIdle(node=node, recent=recent, hour=hour, day=day, history=_history(state.history_s(node, gpus)))


def _history(seconds: float) -> str:
    part = float(belief(np.array(seconds)))
    seen = f"observed for {seconds / 60:.0f} min, "
    return "" if part == 1.0 else seen + (f"an SLA counts on {part:.0%} of that" if part else "too short for an SLA")


def _refusals(
    fleet: Fleet, ranking: Ranking, closed: frozenset[str], is_young: NDArray[np.bool_]
) -> tuple[Refusal, ...]:
    """The most frequent reason first; unused rows of the arrays belong to no node."""
    reasons = {name: (Reason(ranking.reason[row]), bool(is_young[row])) for row, name in enumerate(fleet.names) if name}
    texts = {
        name: CLOSED_TEXT if reason is Reason.AVOIDED and name in closed else refusal(reason, seen)
        for name, (reason, seen) in reasons.items()
        if reason is not Reason.NONE
    }
    return tuple(
        Refusal(
            text=text,
            nodes=count,
            examples=tuple(sorted(name for name, why in texts.items() if why == text))[:_EXAMPLES],
        )
        for text, count in Counter(texts.values()).most_common()
    )


def crowded(fleet: Fleet, ranking: Ranking, job: Job) -> str:
    """The figures of the refused node whose online work needs least at its peaks."""
    rows = np.flatnonzero(ranking.reason == Reason.CROWDED)
    if not len(rows):
        return ""
    known = np.where(fleet.open_gpus[rows] & (fleet.online_peak[rows] > 0), fleet.online_peak[rows], np.inf)
    least = known.min(axis=-1)
    row = rows[least.argmin()]
    full = float(fleet.full_mib[row])
    held = held_mib(job.profile.fit_mib if job.profile else 0.0, full)
    whose = "" if job.profile and job.profile.fit_mib else " (not measured: a quarter of a card)"
    return (
        f"on {fleet.names[row]} online work uses up to {least.min() / 1024:.1f} GiB while it holds a GPU, and the job "
        f"would hold {held / 1024:.1f}{whose}: together at most {1 - SPARE_SHARE:.0%} of {full / 1024:.1f}. A smaller "
        "model or more GPUs per job; or allowCrowded in a HarvestPolicy, and the service pays"
    )


def _advice(sla: float, could: list[tuple[str, float]], nodes: int) -> str:
    if not nodes:
        return "no node reports: is the daemon running on the GPU nodes?"
    if sla and could:
        name, share = could[0]
        return f"the best that can be promised now is {share:.2f} on {name}; the job asks for {sla:.2f}"
    return ""
