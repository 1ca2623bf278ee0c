"""`valve cluster explain`: the scheduler's own judgement, in words a user can act on."""

import pytest
from extender_world import World
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import Unreachable
from valve_kube.objects import node_report, pod_place
from valve_kube.policies import read_policies
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.explain import explain
from valve_scheduler.placement.rank import REASON_TEXT, PlacementSettings, Reason
from valve_scheduler.placement.state import ClusterState

from valved.kube.series import NodeSeries


def state_of(*nodes: dict[str, object]) -> ClusterState:
    state = ClusterState(PlacementSettings())
    for node in nodes:
        state.put_report(node_report(node), NOW_S)
    curve = ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,))
    state.asked.put_profile("default", "m", WorkloadProfile(standalone_tokens_per_s=1.0, curve=curve))

    return state


def test_a_placed_pod_is_told_its_node_gpus_and_promise() -> None:
    placed = pod(node="n1", held=",".join(uuids("n1")[:2]), annotations={names.PREDICTED: "0.41"})

    found = explain(state_of(), placed, NOW_S)

    assert (found.state, found.node, len(found.gpus), found.predicted) == ("placed", "n1", 2, "0.41")


def test_a_pod_that_could_go_is_shown_where_the_best_first() -> None:
    state = state_of(harvest_node("n1", idle=0.2), harvest_node("n2", idle=0.8))

    found = explain(state, pod(), NOW_S)

    assert found.state == "placeable"
    assert [name for name, _ in found.candidates] == ["n2", "n1"]


def test_a_pod_that_fits_nowhere_is_told_each_reason_with_examples_and_what_it_could_have() -> None:
    state = state_of(harvest_node("n1", idle=0.2), harvest_node("n2", idle=0.3), harvest_node("n3", phase="Paused"))
    asks = pod(annotations={names.SLA: "0.9", names.PROFILE: "m"})

    found = explain(state, asks, NOW_S)

    assert found.state == "unplaceable"
    assert [(refusal.text, refusal.nodes, refusal.examples) for refusal in found.refusals] == [
        (REASON_TEXT[Reason.SLA], 2, ("n1", "n2")),
        (REASON_TEXT[Reason.OFF], 1, ("n3",)),
    ]
    assert found.advice == "the best that can be promised now is 0.30 on n2; the job asks for 0.90"


@pytest.mark.parametrize(
    ("asks", "advice"),
    [
        (pod(annotations={names.SLA: "x"}), "must be a number in (0, 1]"),
        (pod(), "is the daemon running"),
    ],
)
def test_a_pod_nobody_can_help_is_told_why(asks: dict[str, object], advice: str) -> None:
    assert advice in explain(state_of(), asks, NOW_S).advice


def test_the_judgement_is_that_of_the_scheduler_with_gpus_taken_by_others() -> None:
    state = state_of(harvest_node("n1", cards=1))
    state.held.put_pod(pod_place(pod("other", node="n1", held=uuids("n1")[0])))

    (refusal,) = explain(state, pod(), NOW_S).refusals

    assert refusal.text == REASON_TEXT[Reason.NO_FREE_GPUS]


def seen_online(node: str, used_mib: int, is_held: bool = True, **status: object) -> dict[str, object]:
    """What a node reports after an hour in which online work held its only GPU with so much memory."""
    series = NodeSeries(1)
    for second in range(0, 3600, 10):
        series.memory(second, 0, 80_000 - used_mib, 80_000, is_held=is_held)
    told = harvest_node(node, cards=1, **status)
    if series.online_memory(0):
        told["status"]["gpus"][0]["onlineMemory"] = series.online_memory(0)
    return told


def with_weights(state: ClusterState, mib: float) -> dict[str, object]:
    curve = ThroughputCurve(free_mib=(mib, 80_000.0), tokens_per_s=(0.5, 1.0))
    state.asked.put_profile("default", "w", WorkloadProfile(standalone_tokens_per_s=1.0, curve=curve, fit_mib=mib))
    return pod(annotations={names.PROFILE: "w"})


def test_a_job_is_never_placed_where_online_needs_its_memory_at_peaks_and_its_owner_reads_the_figures() -> None:
    state = state_of(seen_online("full", 60_000), seen_online("half", 57_000))

    found = explain(state, with_weights(state, 20_000), NOW_S)

    assert [(refusal.text, refusal.nodes) for refusal in found.refusals] == [(REASON_TEXT[Reason.CROWDED], 2)]
    assert "on half online work uses up to 56.2 GiB while it holds a GPU, and the job would hold 19.5:" in found.advice
    assert "90% of 78.1" in found.advice


@pytest.mark.parametrize(
    "node",
    [
        seen_online("n1", 40_000),
        seen_online("n1", 60_000, is_held=False),
        {**seen_online("n1", 60_000), "spec": {"resolved": {"allowCrowded": True}}},
    ],
    ids=["online leaves room", "online never held the GPU, or a former release", "the policy allows it"],
)
def test_a_job_is_placed_where_nothing_speaks_against_it(node: dict[str, object]) -> None:
    state = state_of(node)

    assert explain(state, with_weights(state, 20_000), NOW_S).state == "placeable"


def test_a_job_that_nobody_measured_is_taken_to_hold_a_quarter_of_the_card() -> None:
    state = state_of(seen_online("n1", 55_000))

    found = explain(state, pod(), NOW_S)

    assert found.state == "unplaceable"
    assert "would hold 19.5 (not measured: a quarter of a card)" in found.advice


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"paused": True}, "pauses harvesting on every node"),
        ({"namespaces": [{"name": "default", "maxGPUs": 0}]}, "uses 0 of the 0 harvested GPUs"),
        ({"namespaces": [{"name": "default", "mode": "off"}]}, "sets mode off for namespace default"),
    ],
)
def test_a_pod_that_the_filter_refuses_is_never_called_placeable(spec: dict[str, object], why: str) -> None:
    state = state_of(harvest_node("n1"))
    state.policies = read_policies([{"metadata": {"name": "p"}, "spec": spec}])

    found = explain(state, pod(), NOW_S)

    assert found.state == "barred"
    assert why in found.advice


def test_all_windows_of_a_node_are_shown_beside_what_is_promised() -> None:
    node = harvest_node("n1")
    for gpu in node["status"]["gpus"]:
        gpu["idle"] = {"10m": 0.4, "1h": 0.9, "24h": 0.2}

    found = explain(state_of(node), pod(), NOW_S)

    assert found.candidates[0][1] == pytest.approx(0.45, abs=0.01)
    assert [(one.node, one.recent, one.hour, one.day) for one in found.windows] == [("n1", 0.4, 0.9, 0.2)]


def told_by_kube_scheduler(asks: dict[str, object], error: str) -> dict[str, object]:
    """As it writes the answer to a bind, or to a filter, into the pod."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": error}
    return {**asks, "status": {"phase": "Pending", "conditions": [condition]}}


def test_a_pod_whose_bind_nobody_knows_is_never_called_placeable() -> None:
    world = World(harvest_node("n1"), harvest_node("n2"))
    asks = world.submit()
    world.filter(nodes=("n1", "n2"))
    world.failures = [Unreachable("POST /binding: timed out")]

    lost = explain(world.state, told_by_kube_scheduler(asks, f"binding rejected: {world.bind()}"), NOW_S)
    elsewhere = world.filter(nodes=("n2",))["Error"]
    again = explain(world.state, told_by_kube_scheduler(asks, elsewhere), NOW_S)

    for found in (lost, again):
        assert (found.state, found.node, found.candidates) == ("undecided", "n1", ())
        assert "it is not known yet whether the pod is there" in found.advice
    assert world.bind() == ""
    placed = pod(node="n1", held=world.gpus())
    assert explain(world.state, told_by_kube_scheduler(placed, elsewhere), NOW_S).state == "placed"


def test_an_answer_that_says_nothing_of_a_bind_is_never_taken_for_an_undecided_one() -> None:
    world = World(harvest_node("n1"))
    asks = world.submit()
    world.failures = [Unreachable("GET pod: timed out")]  # the pod is not known yet, and is asked for

    refused = told_by_kube_scheduler(asks, world.bind())

    assert world.state.held.holdings() == []
    assert explain(world.state, refused, NOW_S).state == "placeable"
