"""No one object of a tenant ever ends a round of the controller for everybody else."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from controller_world import CREATE, EVICTION, World, achieved, refused_pod, running
from reports import pod, uuids
from valve_kube import names
from valve_scheduler.controller import apart

Json = dict[str, Any]


def beside(world: World, bad: Json) -> None:
    """Another tenant's pod and a sound one of the same Job, read first in every round and reported by the same node."""
    for card, (one, name) in enumerate([(bad, "bad"), (running(), "sound")], 1):
        one["metadata"] |= {"name": name, "uid": f"uid-{name}", "namespace": "a-tenant"}
        one["metadata"]["ownerReferences"][0]["uid"] = "job-bad"
        one["metadata"]["annotations"][names.GPUS] = uuids("n1")[card]
        world.pods.sink.put(one)
    world.pods.sink.put(running())


def rounds(world: World) -> list[tuple[str, str]]:
    """Three looks, between which the good pod misses its SLA."""
    done = []
    for seconds in (0.0, 900.0, 1_800.0):
        theirs = [{"podUID": uid, "demandSeconds": seconds} for uid in ("uid-bad", "uid-sound")]
        world.report(offline=[*theirs, *achieved(seconds / 10, seconds)])
        done += world.round()
        world.now_s += 900.0
    return done


@pytest.mark.parametrize("text", ["x", "nan", "-1", "7"])
def test_a_pod_with_an_unreadable_sla_never_stops_the_monitor_of_the_cluster(text: str) -> None:
    world = World()
    world.profile()
    beside(world, running(text))

    done = rounds(world)

    assert CREATE in done
    assert EVICTION in done


def test_a_lost_pod_whose_share_cannot_be_read_never_keeps_its_object_from_being_made() -> None:
    """A job that waits for what no node gives; its pod that runs says something unreadable."""
    world = World()
    world.profile()
    waiting = pod("waits", annotations={names.SLA: "0.9", names.PROFILE: "m"}, owner="job-1")
    waiting["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job", "name": "batch"}
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    world.pods.sink.put(running("x"))
    world.pods.sink.put(waiting)
    world.report(idle=0.1)

    world.round()

    (made,) = [body for method, path, body in world.calls if path.endswith("/offlineworkloads")]
    assert (made["spec"]["ownerUID"], made["spec"]["sla"]) == ("job-1", 0.0)


def test_no_object_that_cannot_be_handled_ever_ends_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that was not thought of."""
    world = World()
    world.profile()
    beside(world, running())
    controller = world.controller
    steps: dict[str, Any] = {
        "_sample": controller.promises,
        "_create": controller.promises._book,
        "_worth": controller.book,
    }
    for step, room in steps.items():
        known = getattr(room, step)

        def refuse(one: Json, known: Any = known, **more: Any) -> Any:
            if one["metadata"]["uid"] == "uid-bad":
                raise RuntimeError("not thought of")
            return known(one, **more)

        monkeypatch.setattr(room, step, refuse)

    done = rounds(world)
    world.requeue()

    assert EVICTION in done
    assert {path.split("/")[2] for path, _ in world.account()} >= {"default"}


def test_a_status_with_a_time_that_cannot_be_read_never_stops_the_monitor() -> None:
    world = World()
    world.profile()
    spec = {"ownerUID": "job-bad"}
    world.workloads.sink.put(
        {"metadata": {"name": "owner-bad", "namespace": "a-tenant"}, "spec": spec, "status": {"evictionTimes": ["x"]}}
    )
    world.pods.sink.put(running())

    assert EVICTION in rounds(world)


def test_a_measurement_that_cannot_be_stored_never_keeps_others_from_theirs() -> None:
    world, levels = World(), [{"limitMiB": mib, "usefulTokens": mib, "runnableSeconds": 100.0} for mib in (1, 2, 3)]
    for name in ("a", "b"):
        world.pods.sink.put(
            pod(name, annotations={names.PROFILE: f"m-{name}"}, node="n1", held=uuids("n1")[0], phase="Running")
        )
    broken = [dict(level, limitMiB="x") for level in levels]
    world.report(offline=[{"podUID": "uid-a", "levels": broken}, {"podUID": "uid-b", "levels": levels}])

    asyncio.run(world.controller.measuring.store())

    assert [reason for reason, _ in world.events()] == ["Profiled"]


def test_a_pod_of_another_tenant_never_counts_for_the_job_whose_uid_it_names() -> None:
    """A tenant writes its pods' owner: with the UID of another one's Job, and a kind that no collector knows, its pod
    spoke for that Job: the Job was told that no node would do, and its evictions were spent."""
    world = World()
    world.profile()
    victim = {"metadata": {"name": "owner-job-1", "namespace": "default"}, "spec": {"ownerUID": "job-1"}, "status": {}}
    spent = {
        "evictionTimes": ["2025-12-31T23:59:00Z"] * 24,
        "avoidNodes": [{"node": "n1", "until": "2026-01-02T00:00:00Z"}],
    }
    for item in (victim, {**victim, "metadata": {**victim["metadata"], "namespace": "a-tenant"}, "status": spent}):
        world.workloads.sink.put(item)
    thief = pod("thief", annotations={names.SLA: "0.99", names.PROFILE: "m"}, owner="job-1")
    thief["metadata"]["namespace"] = "a-tenant"
    thief["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    world.profile(namespace="a-tenant")
    world.pods.sink.put(thief)
    world.pods.sink.put(running())

    assert EVICTION in rounds(world)  # of its own pod, which misses: its rounds are its own
    held = world.controller.promises._caches.workloads.items
    told = {who: [one["type"] for one in item["status"]["conditions"]] for (who, _), item in held.items()}
    assert "SLAUnreachable" in told["a-tenant"]
    assert "SLAUnreachable" not in told["default"]


def test_a_waiting_pod_that_cannot_be_judged_never_keeps_another_from_being_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.profile()
    world.report(idle=1.0)
    for name in ("bad", "good"):
        one = refused_pod()
        one["metadata"] |= {"name": name, "uid": name}
        world.pods.sink.put(one)
    known = world.controller.waiting._of

    def refuse(one: Any, now_s: float) -> Any:
        if one.uid == "bad":
            raise RuntimeError("not thought of")
        return known(one, now_s)

    monkeypatch.setattr(world.controller.waiting, "_of", refuse)

    assert world.requeue() == ["/api/v1/nodes/n1"]


def test_many_pods_never_hold_up_the_loop_that_renews_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 wishes held it for 4.5 s of each second, 10,000 owners out of reach for 14 s."""
    world, beats = World(), []
    ticks = itertools.count(0.0, apart.SLICE_S)
    monkeypatch.setattr(apart.unhurried, "__defaults__", (lambda: next(ticks),))
    world.profile()
    world.report()
    for number in range(300):
        one = refused_pod()
        one["metadata"] |= {"name": f"p{number}", "uid": f"u{number}"}
        world.pods.sink.put(one)

    async def run(step: Any) -> int:
        beats.clear()

        async def heart() -> None:
            while True:
                beats.append(1)
                await asyncio.sleep(0)

        beating = asyncio.ensure_future(heart())
        await step()
        beating.cancel()
        return len(beats)

    controller = world.controller
    for step in (controller.waiting.requeue, controller.promises.round, controller.account):
        assert asyncio.run(run(step)) >= 300
