"""A node that a pod may not use (a cordon, a taint, labels) is no place for it, and it is not moved there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controller_world import EVICTION, World, missed, refused_pod
from crowded_world import HOUR, Crowded
from reports import NOW_S, harvest_node, pod
from valve_kube import shapes
from valve_kube.node_wish import TOO_LONG, NodeWish, ground_of, node_wish
from valve_kube.objects import node_report
from valve_kube.shapes import NodeShape, PodShape
from valve_scheduler.controller.workloads import workload_name
from valve_scheduler.placement.explain import explain
from valve_scheduler.placement.grounds import CLOSED_TEXT, Grounds
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState

Json = dict[str, Any]
TAINT = {"key": "pool", "value": "online", "effect": "NoSchedule"}
CORDON = {"unschedulable": True}


def terms(*expressions: Json, **term: Any) -> Json:
    found = {"nodeSelectorTerms": [{"matchExpressions": list(expressions), **term}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": found}}}


def asks(key: str, operator: str, *values: str) -> Json:
    return {"key": key, "operator": operator, "values": list(values)}


def tolerates(**toleration: str) -> Json:
    return {"tolerations": [toleration]}


CASES = [
    ({}, {}, True),
    ({}, CORDON, False),
    (tolerates(operator="Exists"), CORDON, True),
    (tolerates(key="node.kubernetes.io/unschedulable", operator="Exists"), CORDON, True),
    ({}, {"taints": [TAINT]}, False),
    ({}, {"taints": [{**TAINT, "effect": "NoExecute"}]}, False),
    ({}, {"taints": [{**TAINT, "effect": "PreferNoSchedule"}]}, True),
    (tolerates(key="pool", value="online", effect="NoSchedule"), {"taints": [TAINT]}, True),
    (tolerates(key="pool", operator="Equal", value="online"), {"taints": [TAINT]}, True),
    (tolerates(key="pool", value="batch"), {"taints": [TAINT]}, False),
    (tolerates(key="pool", operator="Exists", effect="NoExecute"), {"taints": [TAINT]}, False),
    (tolerates(key="other", operator="Exists"), {"taints": [TAINT]}, False),
    (tolerates(key="pool", operator="Gt", value="online"), {"taints": [TAINT]}, False),  # of a later release
    (tolerates(key="pool", operator="Exists"), {"taints": [TAINT, {**TAINT, "key": "b"}]}, False),
    ({"nodeSelector": {"zone": "a"}}, {}, True),
    ({"nodeSelector": {"zone": "a", "disk": "ssd"}}, {}, False),
    (terms(asks("zone", "In", "a", "b")), {}, True),
    (terms(asks("zone", "NotIn", "a")), {}, False),
    (terms(asks("disk", "NotIn", "ssd")), {}, True),
    (terms(asks("zone", "Exists"), asks("disk", "Exists")), {}, False),
    (terms(asks("disk", "DoesNotExist")), {}, True),
    (terms(asks("cards", "Gt", "3")), {}, True),
    (terms(asks("cards", "Lt", "4")), {}, False),
    (terms(asks("zone", "Gt", "3")), {}, False),
    (terms(asks("cards", "Lt", "+10")), {}, True),
    (terms(asks("cards", "Lt", "1_0")), {}, False),
    (terms(asks("cards", "Lt", " 10")), {}, False),
    (terms(asks("cards", "Lt", "\u0661\u0660")), {}, False),  # ten, in other digits
    (terms(asks("cards", "Lt", "9223372036854775808")), {}, False),
    (terms(asks("zone", "Near", "a")), {}, False),
    (terms(), {}, False),
    (terms(matchFields=[asks("metadata.name", "In", "n1")]), {}, True),
    (terms(matchFields=[asks("metadata.name", "In", "n2")]), {}, False),
    (terms(asks("metadata.name", "In", "n1")), {}, False),  # a label of that name
]


@pytest.mark.parametrize(("wish", "node", "may"), CASES)
def test_a_node_is_never_judged_otherwise_than_by_kube_scheduler(wish: Json, node: Json, may: bool) -> None:
    labels = {"zone": "a", "cards": "4"}
    ground = ground_of({"metadata": {"name": "n1", "labels": labels}, "spec": node})

    assert node_wish(wish).allows(ground) is node_wish(page_of(wish)).allows(ground) is may


def page_of(spec: Json) -> Json:
    """The spec of a pod, as the controller keeps it."""
    page = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {}, "spec": spec}]}).encode()
    kept: Json = PodShape().page(page).items[0]["spec"]
    return kept


@pytest.mark.parametrize(
    "wish",
    [
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [asks("zone", "In", f"z{i}")]} for i in range(3_000)]
                    }
                }
            }
        },
        terms(asks("zone", "In", *(f"z{i}" for i in range(3_000)))),
        {"tolerations": [{"key": f"k{i}", "operator": "Exists"} for i in range(3_000)]},
        {"nodeSelector": {f"k{i}": "" for i in range(3_000)}},
    ],
)
def test_a_wish_that_is_too_long_is_never_held_against_every_node(wish: Json) -> None:
    """3,000 terms over 1,000 nodes held up the controller for 3.6 s."""
    ground = ground_of({"metadata": {"name": "n1"}, "spec": {"taints": [TAINT]}})
    cached = shapes._wish.cache_info().currsize

    for found in (node_wish(wish), node_wish(page_of(wish))):
        assert (found, found.is_bound, found.allows(ground)) == (TOO_LONG, True, True)
    assert shapes._wish.cache_info().currsize == cached


def test_answers_of_wishes_are_never_kept_without_bound() -> None:
    grounds = Grounds()
    grounds.replace([])
    wishes = [NodeWish(selector=(("zone", str(i)),)) for i in range(1_000)]
    for wish in wishes:
        assert grounds.closed_to(wish, ["n1"], 1) == {"n1"}

    assert list(grounds._closed) == wishes[-256:]


@pytest.mark.parametrize("spec", [CORDON, {"taints": [TAINT]}])
def test_a_pod_is_never_moved_for_a_node_that_is_closed_to_it(spec: Json) -> None:
    world = Crowded()
    world.node("n2", **spec)
    assert [world.window(0.01) for _ in range(HOUR)] == [[]] * HOUR
    assert world.look() == []

    world.node("n2")

    assert world.look() == ["GPUBusy"]


@pytest.mark.parametrize(
    "wish",
    [{"nodeSelector": {"pool": "a"}}, terms(asks("pool", "In", "a")), tolerates(key="pool", operator="Exists")],
)
def test_a_best_effort_pod_that_names_its_nodes_never_stands_for_ever_where_another_of_them_has_room(
    wish: Json,
) -> None:
    world = Crowded(**wish)
    for name in ("n1", "n2"):
        world.node(name, {"pool": "a"}, taints=[TAINT] if "tolerations" in wish else [])
    for _ in range(HOUR):
        world.window(0.01)

    assert world.look() == ["GPUBusy"]


def unreachable(world: World) -> list[tuple[str, str]]:
    """Reasons and messages of SLAUnreachable after a round."""
    waiting = refused_pod()
    waiting["metadata"]["ownerReferences"] = []
    world.pods.sink.put(waiting)
    world.round()
    found = world.controller.caches.workloads.items.get(("default", workload_name("uid-p1")), {})
    conditions = (found.get("status") or {}).get("conditions") or []
    return [(one["reason"], one["message"]) for one in conditions if one["type"] == "SLAUnreachable"]


@pytest.mark.parametrize("others", [{}, {"n2": True}, {"n2": False}])
def test_an_sla_that_only_a_closed_node_could_keep_is_never_called_reachable(others: dict[str, bool]) -> None:
    world = World()
    world.profile()
    world.report("n1", idle=0.9)
    for name, is_open in others.items():
        world.report(name, idle=0.1, cards=0)
        world.node(name, **({} if is_open else CORDON))
    world.node("n1", **CORDON)

    ((reason, message),) = unreachable(world)

    assert (reason, "such as n1:" in message) == ("NodesClosed", True)


def test_a_busy_fleet_is_never_blamed_on_an_idle_node_that_is_closed() -> None:
    """It gets quieter by itself."""
    world = World()
    world.profile()
    world.report("n1", idle=0.9)
    world.report("n2", idle=0.1)
    world.node("n1", **CORDON)

    assert [reason for reason, _ in unreachable(world)] == ["FleetTooBusy"]


def test_a_busy_fleet_is_never_blamed_on_nodes_that_are_closed_and_as_busy() -> None:
    world = World()
    world.profile()
    for name in ("n1", "n2"):
        world.report(name, idle=0.1)
    world.node("n1", **CORDON)

    assert [reason for reason, _ in unreachable(world)] == ["FleetTooBusy"]


def test_a_node_that_an_owner_avoids_for_a_while_is_never_taken_for_a_closed_one() -> None:
    world = missed()
    assert EVICTION in world.round()
    world.pods.sink.drop(pod())
    waiting = refused_pod()
    waiting["metadata"] |= {"ownerReferences": [{"uid": "job-1", "controller": True}], "uid": "uid-p2", "name": "p2"}
    world.pods.sink.put(waiting)
    world.round()

    (workload,) = world.controller.caches.workloads.items.values()
    assert [entry["node"] for entry in workload["status"]["avoidNodes"]] == ["n1"]
    assert "SLAUnreachable" not in [one["type"] for one in workload["status"]["conditions"]]


def test_a_waiting_pod_is_never_tried_again_for_a_node_that_is_closed_to_it() -> None:
    world = World()
    world.profile()
    world.report(idle=0.9)
    world.node("n1", **CORDON)
    world.pods.sink.put(refused_pod())

    assert world.requeue() == []


def test_explain_never_calls_a_pod_placeable_where_only_a_closed_node_has_room() -> None:
    state = ClusterState(PlacementSettings())
    state.put_report(node_report(harvest_node("n1")), NOW_S)
    assert explain(state, pod(), NOW_S).state == "placeable"  # the extender: kube-scheduler has judged before

    state.asked.grounds.put({"metadata": {"name": "n1"}, "spec": CORDON})

    found = explain(state, pod(), NOW_S)
    assert (found.state, [one.text for one in found.refusals]) == ("unplaceable", [CLOSED_TEXT])


def test_a_node_that_comes_or_changes_is_never_judged_by_what_was_before() -> None:
    state = ClusterState(PlacementSettings())
    grounds, wish = state.asked.grounds, pod()
    grounds.replace([{"metadata": {"name": name}, "spec": CORDON} for name in ("n1", "n2")])

    def closed() -> set[str]:
        return {
            name for one in explain(state, wish, NOW_S).refusals for name in one.examples if one.text == CLOSED_TEXT
        }

    state.put_report(node_report(harvest_node("n1")), NOW_S)
    assert closed() == {"n1"}
    state.put_report(node_report(harvest_node("n2")), NOW_S)
    assert closed() == {"n1", "n2"}
    grounds.put({"metadata": {"name": "n1"}, "spec": {}})
    assert closed() == {"n2"}
    grounds.drop({"metadata": {"name": "n2"}})
    assert closed() == set()


def test_of_a_node_nothing_is_kept_but_who_may_use_it() -> None:
    metadata = {"name": "n1", "labels": {"zone": "a"}, "annotations": {"a": "x" * 9_000}, "resourceVersion": "7"}
    node = {
        "metadata": metadata,
        "spec": {"podCIDR": "10.0.0.0/24", "taints": [{**TAINT, "timeAdded": "2026-01-01T00:00:00Z"}], **CORDON},
        "status": {"images": [{"names": ["i" * 200]}] * 50},
    }
    page = json.dumps({"metadata": {"resourceVersion": "9"}, "items": [node]}).encode()

    (kept,) = NodeShape().page(page).items

    assert kept == {
        "metadata": {"name": "n1", "labels": {"zone": "a"}, "resourceVersion": "7"},
        "spec": {"taints": [TAINT], **CORDON},
    }
    told = NodeShape().event(json.dumps({"type": "MODIFIED", "object": node}).encode())
    assert told == {"type": "MODIFIED", "object": kept}
    gone = b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}'
    assert NodeShape().event(gone)["object"]["code"] == 410
