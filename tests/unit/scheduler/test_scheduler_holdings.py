"""GPUs that are in use are never offered, GPUs nobody uses are never lost, whatever becomes of labels and watches."""

import asyncio
from typing import Any

import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError, Unreachable
from valve_kube.errors import InvalidObject
from valve_kube.objects import followed, node_report, pod_place
from valve_kube.policies import read_policies
from valve_scheduler.extender.decide import Extender
from valve_scheduler.extender.doubts import Doubts
from valve_scheduler.placement.holdings import ASSUMED_FOR_S, RESERVED_FOR_S
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import pods_view

Json = dict[str, Any]


class World:
    """An extender beside an API server that keeps pods; the watch tells only what a test says."""

    def __init__(self, *nodes: Json) -> None:
        self.now_s = NOW_S
        raised = asyncio.Event()
        self.state = ClusterState(PlacementSettings(), doubted=raised.set)
        self.pods: dict[str, Json] = {}
        self.refusal: Exception | None = None
        for node in nodes or (harvest_node("n1", cards=1),):
            self.state.put_report(node_report(node), NOW_S)
        self.doubts = Doubts(self, self.state, lambda: self.now_s, raised)  # type: ignore[arg-type]
        self.extender = Extender(self.state, self, now_s=lambda: self.now_s, can_answer=lambda: True)
        self.watch = pods_view(self, self.state)  # type: ignore[arg-type]

    async def request(self, method: str, path: str, *, body: Any = None) -> Json:
        if self.refusal is not None:
            raise self.refusal
        name = path.removesuffix("/binding").rpartition("/")[2]
        if name not in self.pods:
            raise ApiError(404, "NotFound", name)
        found = self.pods[name]
        if method == "POST":
            found["spec"]["nodeName"] = body["target"]["name"]
            found["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return found

    def submit(self, name: str, **more: Any) -> None:
        self.pods[name] = pod(name, **more)

    def allow(self, most: int) -> None:
        spec = {"namespaces": [{"name": "default", "maxGPUs": most}]}
        self.state.policies = read_policies([{"metadata": {"name": "all"}, "spec": spec}])

    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, 20) if self.state.row(f"n{number}") is not None]

    def filter(self, name: str) -> list[str]:
        answer = self.extender.filter({"Pod": self.pods[name], "Nodes": None, "NodeNames": self.names()})
        found: list[str] = answer["NodeNames"]
        return found

    def prioritize(self, name: str) -> dict[str, int]:
        answer = self.extender.prioritize({"Pod": self.pods[name], "Nodes": None, "NodeNames": self.names()})
        return {one["Host"]: one["Score"] for one in answer}

    def bind(self, name: str, node: str = "n1") -> str:
        arguments = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": node}
        error: str = asyncio.run(self.extender.bind(arguments))["Error"]
        return error

    def place(self, name: str) -> None:
        self.submit(name)
        assert self.filter(name) == ["n1"]
        assert self.bind(name) == ""

    def settle(self) -> None:
        asyncio.run(self.doubts.settle())

    def is_open(self, name: str = "probe") -> bool:
        self.submit(name)
        return self.filter(name) == ["n1"]


def test_gpus_of_a_pod_the_watch_never_shows_are_not_lost_for_ever() -> None:
    """It was deleted before its Binding was heard of: 24 of 24 GPUs were taken so by a user who may only edit."""
    world = World()
    world.place("ghost")
    del world.pods["ghost"]

    world.now_s += ASSUMED_FOR_S - 1
    world.settle()
    assert not world.is_open("a")

    world.now_s += 1
    world.settle()
    world.state.held.lapse(world.now_s + RESERVED_FOR_S)
    assert world.is_open("b")
    world.state.check_integrity()


def test_gpus_of_a_pod_that_lost_its_label_are_never_given_to_another() -> None:
    world = World()
    world.place("runs")
    world.watch.sink.put(world.pods["runs"])

    world.watch.sink.drop(world.pods["runs"])
    assert not world.is_open("a")
    world.settle()
    assert not world.is_open("b")

    world.watch.sink.replace([])
    world.settle()
    assert not world.is_open("c")

    del world.pods["runs"]
    world.now_s += ASSUMED_FOR_S
    world.settle()
    assert world.is_open("d")


def test_a_pod_deleted_in_order_frees_its_gpus_without_a_question() -> None:
    world = World()
    world.place("runs")
    world.watch.sink.put(world.pods["runs"])
    gone = world.pods.pop("runs")
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.refusal = Unreachable("nobody may be asked")

    world.watch.sink.drop(gone)

    world.submit("next")
    assert world.filter("next") == ["n1"]


@pytest.mark.parametrize("refusal", [Unreachable("silence"), ApiError(500, "InternalError", "etcd")])
def test_without_an_answer_gpus_are_never_freed(refusal: Exception) -> None:
    world = World()
    world.place("runs")
    world.watch.sink.put(world.pods["runs"])
    world.watch.sink.drop(world.pods["runs"])
    world.refusal = refusal

    world.settle()
    assert not world.is_open()

    world.refusal = None
    del world.pods["runs"]
    world.settle()
    world.submit("next")
    assert world.filter("next") == ["n1"]


def test_a_finished_pod_frees_its_gpus() -> None:
    """The watch takes only pods that are not finished: one that ends leaves it as if it had lost its label."""
    world = World()
    world.place("done")
    world.watch.sink.put(world.pods["done"])
    world.pods["done"]["status"]["phase"] = "Succeeded"
    before = {**world.pods["done"], "status": {"phase": "Running"}}

    world.watch.sink.drop(before)
    world.settle()

    assert world.is_open()


def test_an_unlabelled_pod_is_neither_filtered_nor_bound() -> None:
    world = World()
    world.submit("sly")
    del world.pods["sly"]["metadata"]["labels"][names.ROLE]

    answer = world.extender.filter({"Pod": world.pods["sly"], "Nodes": None, "NodeNames": ["n1"]})

    assert "must be offline" in answer["Error"]
    assert "must be offline" in world.bind("sly")
    with pytest.raises(InvalidObject):
        followed(world.pods["sly"])


def test_two_pods_in_flight_are_never_led_to_the_same_gpus() -> None:
    """Both are filtered and scored before either is bound: a quarter of such binds was refused."""
    world = World(harvest_node("n1", cards=2), harvest_node("n2", cards=2))
    for number in range(4):
        world.submit(f"p{number}")
    chosen = []
    for number in range(4):
        world.filter(f"p{number}")
        points = world.prioritize(f"p{number}")
        best = [node for node, score in points.items() if score == max(points.values())]
        assert len(best) == 1
        chosen.append(best[0])

    assert [world.bind(f"p{number}", chosen[number]) for number in range(4)] == ["", "", "", ""]
    assert sorted(chosen) == ["n1", "n1", "n2", "n2"]
    world.state.check_integrity()


def test_a_reservation_never_outlives_its_moment() -> None:
    world = World()
    world.submit("slow")
    assert world.filter("slow") == ["n1"]  # the only node: reserved
    world.submit("other")
    assert world.filter("other") == []

    world.now_s += RESERVED_FOR_S

    assert world.filter("other") == ["n1"]
    world.state.check_integrity()


def test_a_reservation_does_not_stand_in_the_way_of_its_own_pod() -> None:
    world = World()
    world.submit("p")
    for _ in range(3):
        assert world.filter("p") == ["n1"]
    assert world.bind("p") == ""
    assert pod_place(world.pods["p"]).gpu_uuids == (uuids("n1")[0],)


@pytest.mark.parametrize("nodes", [1, 3])
def test_two_pods_filtered_at_once_never_both_pass_the_limit_of_their_namespace(nodes: int) -> None:
    """Of several nodes none is chosen before the scores; the limit counts the first pod from its filter on."""
    world = World(*(harvest_node(f"n{number}") for number in range(1, nodes + 1)))
    world.allow(2)
    for name, gpus in (("first", 2), ("second", 1)):
        world.submit(name, gpus=gpus)
    assert world.filter("first") == world.names()

    assert world.filter("second") == []
    world.prioritize("first")
    assert world.filter("second") == []
    assert "uses 2 of the 2 harvested GPUs" in world.bind("second")
    assert world.filter("first") == world.names()  # its own reservation does not stand in its way
    assert world.bind("first") == ""
    assert "uses 2 of the 2 harvested GPUs" in world.bind("second")
    world.state.check_integrity()


def test_a_limit_never_counts_a_pod_twice_or_longer_than_its_moment() -> None:
    world = World(harvest_node("n1"), harvest_node("n2"))
    world.allow(2)
    for name in ("slow", "bound", "late"):
        world.submit(name)
    world.filter("slow")
    world.filter("bound")
    assert world.bind("bound") == ""
    assert world.filter("late") == []  # one bound, one on its way

    world.now_s += RESERVED_FOR_S

    assert world.filter("late") == world.names()
    assert world.bind("late") == ""
    assert "uses 2 of the 2 harvested GPUs" in world.bind("slow")


def test_a_pod_that_no_node_takes_never_uses_up_the_limit_of_its_namespace() -> None:
    world = World(harvest_node("n1", cards=1))
    world.allow(2)
    world.submit("large", gpus=2)
    world.submit("small")

    assert world.filter("large") == []

    assert world.filter("small") == ["n1"]


def test_two_pods_beside_a_lowered_limit_are_never_both_refused_for_good() -> None:
    world = World(harvest_node("n1"))
    for name in ("a", "b"):
        world.submit(name)
        assert world.filter(name) == ["n1"]
    world.allow(1)

    assert "uses 1 of the 1" in world.bind("a")

    assert world.bind("b") == ""
