"""The extender keeps kube-scheduler's wire protocol and never gives one GPU to two pods."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from extender_world import World
from reports import harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError, Unreachable
from valve_kube.errors import NotReady
from valve_kube.objects import pod_place
from valve_kube.policies import read_policies
from valve_scheduler.placement.rank import REASON_TEXT, Reason

Json = dict[str, Any]


def test_filter_names_the_places_and_spares_the_reasons_nobody_will_read() -> None:
    world = World(harvest_node("n1"), harvest_node("off", phase="Off"))
    world.submit()

    answer = world.filter(nodes=("n1", "off", "unknown"))

    assert answer == {"NodeNames": ["n1"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""}


def test_filter_answers_every_node_with_a_reason_when_there_is_no_place() -> None:
    world = World(harvest_node("off", phase="Off"))
    world.submit()

    answer = world.filter(nodes=("off", "unknown"))

    assert answer == {
        "NodeNames": [],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {"off": REASON_TEXT[Reason.OFF], "unknown": REASON_TEXT[Reason.STALE]},
        "Error": "",
    }


def test_of_many_nodes_that_would_do_only_the_best_are_scored() -> None:
    world = World(*(harvest_node(f"n{number}", idle=number / 200) for number in range(1, 101)))
    world.submit()

    answer = world.filter(nodes=tuple(f"n{number}" for number in range(1, 101)))

    assert answer["NodeNames"] == [f"n{number}" for number in range(37, 101)]
    assert answer["FailedAndUnresolvableNodes"] == {}


def test_a_pod_that_cannot_be_read_fails_with_its_field_and_value() -> None:
    world = World()
    world.submit(annotations={names.SLA: "2"})

    assert "sla-throughput is '2'" in world.filter()["Error"]


def test_whole_nodes_instead_of_names_are_a_configuration_error() -> None:
    world = World()
    world.submit()

    answer = world.extender.filter({"Pod": world.pods["p1"], "Nodes": {"items": []}, "NodeNames": None})

    assert "nodeCacheCapable" in answer["Error"]


def test_prioritize_gives_the_best_node_ten() -> None:
    world = World(harvest_node("n1", idle=0.2), harvest_node("n2", idle=0.8))
    arguments = {"Pod": world.submit(), "NodeNames": ["n1", "n2", "unknown"]}

    scores = world.extender.prioritize(arguments)

    assert scores == [
        {"Host": "n1", "Score": 2},
        {"Host": "n2", "Score": 10},
        {"Host": "unknown", "Score": 0},
    ]


def test_bind_writes_node_and_gpus_in_one_binding() -> None:
    world = World()
    world.submit(gpus=2)
    world.filter()

    assert world.bind() == ""
    assert world.gpus() == ",".join(uuids("n1")[:2])
    assert world.pods["p1"]["spec"]["nodeName"] == "n1"
    assert float(world.pods["p1"]["metadata"]["annotations"][names.PREDICTED]) == pytest.approx(0.5, abs=0.01)


def test_bind_without_an_earlier_filter_reads_the_pod() -> None:
    world = World()
    world.submit()

    assert world.bind() == ""


def test_pods_bound_one_after_another_never_share_a_gpu() -> None:
    world = World()
    for number in range(9):
        world.submit(f"p{number}")

    errors = [world.bind(f"p{number}") for number in range(9)]

    assert errors[:8] == [""] * 8
    assert REASON_TEXT[Reason.NO_FREE_GPUS] in errors[8]
    assert len({world.gpus(f"p{number}") for number in range(8)}) == 8
    world.state.check_integrity()


def test_binds_that_race_never_share_a_gpu() -> None:
    world = World()
    calls = []
    for number in range(9):
        world.submit(f"p{number}")
        calls.append({"PodName": f"p{number}", "PodNamespace": "default", "PodUID": f"uid-p{number}", "Node": "n1"})

    async def together() -> list[Json]:
        return await asyncio.gather(*map(world.extender.bind, calls))

    failed = [answer for answer in asyncio.run(together()) if answer["Error"]]

    assert len(failed) == 1
    world.state.check_integrity()


def test_a_refused_binding_frees_its_gpus_at_once() -> None:
    world = World()
    world.submit()
    world.filter()
    world.failures = [ApiError(404, "NotFound", "pod p1 not found")]

    assert "NotFound" in world.bind()
    assert world.state.held.holdings() == []


def test_a_pod_that_was_deleted_while_it_was_bound_never_keeps_its_gpus() -> None:
    """The conflict says that it goes, and when the extender looks it is gone: nobody else would release them."""
    world = World()
    world.submit()
    world.filter()
    world.failures = [
        ApiError(409, "Conflict", "pod p1 is being deleted"),
        ApiError(404, "NotFound", "pod p1 not found"),
    ]

    assert "being deleted" in world.bind()
    assert world.state.held.holding("uid-p1") is None


@pytest.mark.parametrize("failure", [Unreachable("timed out"), ApiError(500, "InternalError", "etcd")])
@pytest.mark.parametrize("commits", [True, False])
def test_an_undecided_binding_keeps_its_gpus_and_is_repeated_with_the_same(failure: Exception, commits: bool) -> None:
    """Whether the lost answer was yes or no, the second try ends with the same set, held once."""
    world = World()
    world.submit()
    world.filter()
    world.failures, world.commits_before_failing = [failure], commits

    assert world.bind() != ""
    assert [holding.assumed_until_s > 0 for holding in world.state.held.holdings()] == [True]

    assert world.bind() == ""
    assert world.gpus() == uuids("n1")[0]
    assert float(world.pods["p1"]["metadata"]["annotations"][names.PREDICTED]) > 0  # and the same promise
    assert [holding.assumed_until_s for holding in world.state.held.holdings()] == [0.0]
    world.state.check_integrity()


def test_while_a_bind_is_undecided_only_its_node_passes_the_filter() -> None:
    world = World(harvest_node("n1"), harvest_node("n2"))
    world.submit()
    world.failures = [Unreachable("timed out")]
    world.filter(nodes=("n1", "n2"))
    world.bind()

    assert world.filter(nodes=("n1", "n2"))["NodeNames"] == ["n1"]
    assert "undecided" in world.bind(node="n2")


def test_a_bind_that_the_api_server_confirmed_is_never_called_undecided() -> None:
    world = World(harvest_node("n1"), harvest_node("n2"))
    world.submit()
    assert world.bind(node="n1") == ""

    assert world.bind(node="n2") == "valve: the pod is bound to n1 already"


def test_a_pod_bound_by_another_scheduler_is_refused_and_its_truth_kept() -> None:
    world = World(harvest_node("n1"), harvest_node("n2"))
    world.submit()
    world.filter(nodes=("n1", "n2"))
    world.pods["p1"]["spec"]["nodeName"] = "n2"
    world.pods["p1"]["metadata"]["annotations"][names.GPUS] = uuids("n2")[3]

    assert "already assigned" in world.bind()
    assert [(h.node, h.gpu_uuids) for h in world.state.held.holdings()] == [("n2", (uuids("n2")[3],))]


def test_a_node_that_filled_up_since_the_filter_is_refused_in_bind() -> None:
    world = World(harvest_node("n1", cards=1))
    world.submit()
    world.filter()
    world.state.held.put_pod(pod_place(pod("other", node="n1", held=uuids("n1")[0])))

    assert REASON_TEXT[Reason.NO_FREE_GPUS] in world.bind()
    assert len(world.state.held.holdings()) == 1


def allow(world: World, **rule: Any) -> None:
    spec = {"namespaces": [{"name": "default", **rule}]}
    world.state.policies = read_policies([{"metadata": {"name": "all"}, "spec": spec}])


def test_a_namespace_gets_no_more_gpus_than_its_policy_allows() -> None:
    world = World()
    allow(world, maxGPUs=3)
    for number in range(3):
        world.submit(f"p{number}", gpus=2 if number == 0 else 1)
    for number in range(2):
        world.filter(f"p{number}")

    assert [world.bind(f"p{number}") for number in range(2)] == ["", ""]
    assert "uses 3 of the 3 harvested GPUs" in world.bind("p2")
    assert "uses 3 of the 3 harvested GPUs" in world.filter("p2")["Error"]

    world.state.held.release("uid-p1")

    assert world.filter("p2")["NodeNames"] == ["n1"]
    assert world.bind("p2") == ""
    world.state.check_integrity()


def test_a_pod_whose_bind_is_undecided_is_not_counted_against_itself() -> None:
    world = World()
    allow(world, maxGPUs=1)
    world.submit()
    world.filter()
    world.failures = [Unreachable("timed out")]
    world.bind()

    assert world.filter()["NodeNames"] == ["n1"]
    assert world.bind() == ""


def test_a_namespace_that_is_off_is_told_so() -> None:
    world = World()
    allow(world, mode="off")
    world.submit()

    assert "sets mode off for namespace default" in world.filter()["Error"]


def test_a_pause_of_the_fleet_holds_before_any_node_was_told() -> None:
    world = World()
    world.submit()
    world.filter()
    world.state.policies = read_policies([{"metadata": {"name": "valve-pause"}, "spec": {"paused": True}}])

    assert "pauses harvesting on every node" in world.bind("p1")
    assert "pauses harvesting on every node" in world.filter()["Error"]
    selected = {"paused": True, "nodeSelector": {"pool": "a"}}
    world.state.policies = read_policies([{"metadata": {"name": "pool"}, "spec": selected}])
    assert world.bind("p1") == ""


def _filter(world: World) -> None:
    world.filter()


def _prioritize(world: World) -> None:
    world.extender.prioritize({"Pod": world.pods["p1"], "NodeNames": ["n1"]})


@pytest.mark.parametrize("call", [_filter, _prioritize])
def test_nothing_is_answered_before_the_view_is_complete(call: Callable[[World], None]) -> None:
    world = World()
    world.submit()
    world.ready = False

    with pytest.raises(NotReady):
        call(world)
    assert "does not lead" in world.bind()
    assert world.gpus() == ""
