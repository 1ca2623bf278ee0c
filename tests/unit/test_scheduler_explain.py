"""`valve cluster explain`: the scheduler's own judgement, in words a user can act on."""

import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.objects import node_report, pod_place
from valve_kube.policies import read_policies
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.explain import explain
from valve_scheduler.placement.rank import REASON_TEXT, PlacementSettings, Reason
from valve_scheduler.placement.state import ClusterState


def state_of(*nodes: dict[str, object]) -> ClusterState:
    state = ClusterState(PlacementSettings())
    for node in nodes:
        state.put_report(node_report(node), NOW_S)
    curve = ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,))
    state.put_profile("default", "m", WorkloadProfile(standalone_tokens_per_s=1.0, curve=curve))

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
    state.put_pod(pod_place(pod("other", node="n1", held=uuids("n1")[0])))

    (refusal,) = explain(state, pod(), NOW_S).refusals

    assert refusal.text == REASON_TEXT[Reason.NO_FREE_GPUS]


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

    assert found.candidates[0][1] == pytest.approx(0.75, abs=0.01)
    assert [(one.node, one.recent, one.hour, one.day) for one in found.windows] == [("n1", 0.4, 0.9, 0.2)]
