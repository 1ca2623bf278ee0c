"""A pod whose GPU stays under guard is told why it stands, and moved by the rules where another GPU takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from controller_world import World
from crowded_world import HOUR, SETTINGS, WINDOW_S, best_effort
from reports import NOW_S, harvest_node, uuids
from valve_kube import names
from valve_kube.client import ApiError
from valve_scheduler.controller.guarded import TOLD_AFTER_S
from valve_scheduler.controller.monitor import Sample, Track, Verdict
from valve_scheduler.controller.workloads import owner_of
from valve_scheduler.placement.state import STALE_AFTER_S

Json = dict[str, Any]
WHY = "process 7 (train) uses the GPU without the shim"
PROMISED = {names.SLA: "0.3", names.PROFILE: "m"}


class Standing(World):
    """A pod on the first GPU of n1, which somebody uses unheard; the other GPUs are closed unless a test opens them."""

    def __init__(self, owner: str = "job-1", spec: Json | None = None, **asked: str) -> None:
        super().__init__(SETTINGS)
        self.profile()
        one = best_effort(owner)
        one["metadata"]["annotations"] |= asked
        one["spec"] |= spec or {}
        self.pods.sink.put(one)
        self.look()

    def look(self, *, guard: bool = True, room: bool = False, **status: Any) -> list[str]:
        """Reasons of the events of a round."""
        entry = {"podUID": "uid-p1", "demandSeconds": 0.0, "runnableSeconds": 0.0}
        node = harvest_node("n1", offline=[entry], age_s=NOW_S - self.now_s, **status)
        for index, gpu in enumerate(node["status"]["gpus"]):
            gpu["harvestable"] = room if index else not guard
        if guard:
            node["status"]["gpus"][0] |= {"guarded": True, "reason": WHY}
        self.nodes.sink.put(node)
        self.round()
        return [reason for reason, _ in self.events()]

    def after(self, seconds: float, **look: Any) -> list[str]:
        self.now_s += seconds
        return self.look(**look)


def evictions(world: World) -> int:
    return sum(path.endswith("/eviction") for _, path, _ in world.calls)


def conditions(world: World) -> dict[str, Json]:
    (workload,) = world.controller.caches.workloads.items.values()
    return {one["type"]: one for one in workload["status"]["conditions"]}


@pytest.mark.parametrize("asked", [{}, PROMISED])
@pytest.mark.parametrize("owner", ["job-1", ""])
def test_a_pod_under_guard_never_stands_without_a_word(asked: dict[str, str], owner: str) -> None:
    world = Standing(owner, **asked)
    assert world.after(TOLD_AFTER_S - 1.0) == []

    assert world.after(1.0) == ["GPUGuarded"]

    ((_, note),) = world.events()
    assert (uuids("n1")[0] in note, WHY in note, "moved" in note) == (True, True, bool(owner))
    assert conditions(world)["GPUGuarded"]["message"] == note
    assert world.after(30.0) == []  # once
    world.after(30.0, guard=False)
    assert "GPUGuarded" not in conditions(world)


VOLUME = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "local"}}]}


@pytest.mark.parametrize(("spec", "floor", "why"), [(VOLUME, 5, "its volumes"), ({}, 0, "floorPercent 0")])
def test_a_pod_that_is_never_moved_is_never_told_that_it_is(spec: Json, floor: int, why: str) -> None:
    world = Standing(spec=spec)
    world.policy("floor", sla={"floorPercent": floor})
    world.look()
    world.after(TOLD_AFTER_S)

    ((_, note),) = world.events()
    assert ("it is moved" in note, "it is never moved" in note, why in note) == (False, True, True)
    for _ in range(HOUR + 1):
        world.after(WINDOW_S, room=True)
        assert evictions(world) == 0


@pytest.mark.parametrize(("asked", "windows"), [({}, HOUR), (PROMISED, 2)])
def test_a_pod_under_guard_for_good_never_stays_where_another_gpu_takes_it(asked: dict[str, str], windows: int) -> None:
    world = Standing(**asked)
    for _ in range(windows):
        assert evictions(world) == 0
        world.after(WINDOW_S)
    assert evictions(world) == 0  # no other GPU is open

    assert world.look(room=True) == ["GPUGuarded"]

    assert evictions(world) == 1
    steps = [path.rpartition("/")[2] for _, path, _ in world.calls]
    assert steps.index("status") < steps.index("eviction")  # counted before it happens
    (workload,) = world.controller.caches.workloads.items.values()
    owner = owner_of(workload)
    assert (len(owner.evicted_at_s), dict(owner.avoid_until_s)) == (1, {})  # the node did no harm
    assert world.look(room=True) == []  # back-off


def test_a_move_for_a_guard_that_cannot_be_stored_never_happens() -> None:
    world = Standing()
    for _ in range(HOUR):
        world.after(WINDOW_S)
    world.refusals["status"] = ApiError(500, "", "no")

    world.look(room=True)

    assert evictions(world) == 0


@pytest.mark.parametrize(
    "between",
    [
        {"guard": False},
        {"phase": "Paused"},
        None,  # silent for longer than a report is believed: nothing is known of the node
    ],
)
def test_a_guard_that_did_not_last_never_moves_a_pod(between: Json | None) -> None:
    world = Standing()
    for _ in range(HOUR - 1):
        world.after(WINDOW_S, room=True)
    if between is None:
        world.now_s += STALE_AFTER_S + 1.0
        world.round()
    else:
        world.after(30.0, **between)

    world.after(WINDOW_S, room=True)

    assert evictions(world) == 0


def test_a_pod_that_nothing_makes_anew_is_never_moved_for_a_guard() -> None:
    world = Standing(owner="")
    for _ in range(HOUR + 1):
        world.after(WINDOW_S, room=True)
        assert evictions(world) == 0


def test_pods_under_guard_stay_where_a_policy_leaves_best_effort_alone() -> None:
    world = Standing()
    world.policy("stay", sla={"floorPercent": 0})
    for _ in range(HOUR + 1):
        world.after(WINDOW_S, room=True)
        assert evictions(world) == 0


def test_one_open_gpu_is_never_the_reason_to_move_several_pods() -> None:
    """Places were counted for each kind of job: one GPU moved six pods of six SLAs in one round."""
    world = World(SETTINGS)
    world.profile()
    world.report("n1", idle=0.0)
    world.report("n2", idle=0.9)
    sample = Sample(
        pod_uid="",
        owner_uid="job-1",
        node="n1",
        sla=0.5,
        standalone_tokens_per_s=0.0,
        runtime_s=1e4,
        demand_s=1e4,
        tokens=None,
    )
    tracks, pods = [], {}
    for number in range(6):
        uid = f"uid-p{number}"
        one = best_effort()
        one["metadata"] |= {"uid": uid}
        one["metadata"]["annotations"] |= {names.SLA: f"0.{number + 1}", names.PROFILE: "m"}
        pods[uid] = one
        tracks.append(Track(sample=replace(sample, pod_uid=uid), verdict=Verdict.PERSISTENTLY_MISSED))
    better = world.controller.promises._better

    rounds = [better.movable(list(tracks), pods, {}, world.now_s, guarded=pods) for _ in range(6)]

    moved = [track.sample.pod_uid for found in rounds for track in found]
    assert ([len(found) for found in rounds], sorted(moved)) == ([1] * 6, sorted(pods))  # and none waits for ever
