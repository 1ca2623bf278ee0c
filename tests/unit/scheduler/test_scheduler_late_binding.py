"""A Binding that the API server stores only after the next leader has listed the pods: no two pods ever run on one GPU.

The node starts the second container on a GPU of another pod never (tests/service/test_kube_node.py). Here is the rest:
what the leaders and the controller make of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import World as ControllerWorld
from extender_world import World
from reports import harvest_node, uuids
from valve_kube.client import ApiError, Unreachable
from valve_kube.objects import pod_place
from valve_scheduler.controller.rounds import ControllerSettings

Json = dict[str, Any]
PATIENCE_S = ControllerSettings().patience_s
(CARD,) = uuids("n1")[:1]


class FormerLeader(World):
    """Its Binding is under way when its lease passes."""

    def __init__(self, *nodes: Json) -> None:
        super().__init__(*nodes)
        self.under_way: list[tuple[Json, Json]] = []

    async def request(self, method: str, path: str, *, body: Any = None) -> Json:
        self.under_way.append((self.pods[path.removesuffix("/binding").rpartition("/")[2]], body))
        raise Unreachable("no answer yet")

    def lands(self) -> None:
        for found, binding in self.under_way:
            self._commit(found, binding)


@pytest.fixture
def leaders() -> tuple[FormerLeader, World]:
    """One card, and the first pod is on its way to it."""
    former, next_ = FormerLeader(harvest_node("n1", cards=1)), World(harvest_node("n1", cards=1))
    next_.pods["late"] = former.submit("late")
    former.filter("late")
    former.bind("late")
    assert len(former.under_way) == 1
    next_.state.held.replace_pods([pod_place(former.pods["late"])])  # the list with which it begins to lead
    return former, next_


def test_a_binding_that_lands_late_never_takes_the_gpu_from_the_pod_that_runs(
    leaders: tuple[FormerLeader, World],
) -> None:
    former, next_ = leaders
    next_.submit("first")
    next_.filter("first")
    assert next_.bind("first") == ""
    next_.pods["first"]["status"]["phase"] = "Running"
    former.lands()
    controller = ControllerWorld()
    controller.report("n1", cards=1)
    for one in next_.pods.values():
        next_.state.held.put_pod(pod_place(one))
        controller.pods.sink.put(one)
    assert controller.freed() == []
    controller.now_s += PATIENCE_S
    controller.report("n1", cards=1)

    assert {one["spec"]["nodeName"] for one in next_.pods.values()} == {"n1"}
    assert controller.freed() == [("late", "PlaceLost")]
    next_.submit("third")
    assert next_.filter("third")["NodeNames"] == [], "nobody is put on that card besides"


def test_a_binding_that_lands_late_never_binds_a_pod_a_second_time_or_another_of_its_name(
    leaders: tuple[FormerLeader, World],
) -> None:
    former, next_ = leaders
    next_.filter("late")
    assert next_.bind("late") == ""
    with pytest.raises(ApiError, match="already assigned"):
        former.lands()

    anew = former.submit("late")
    anew["metadata"]["uid"] = "uid-of-another"
    former.under_way[0] = (anew, former.under_way[0][1])
    with pytest.raises(ApiError, match="precondition"):
        former.lands()
    assert anew["spec"]["nodeName"] == ""
