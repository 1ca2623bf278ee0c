"""Pods to which their node cannot give their GPUs move on like those that miss their SLA, and no other pod does."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from controller_world import World, achieved, missing, running
from reports import harvest_node, pod, uuids
from valve_kube import failures, names
from valve_kube.client import ApiError
from valve_kube.policies import BRAKE
from valve_scheduler.controller.monitor import MonitorSettings, Owner
from valve_scheduler.controller.rounds import ControllerSettings
from valve_scheduler.controller.turns import BACK_OFF_S, Late, choose
from valve_scheduler.placement.explain import explain

Json = dict[str, Any]
PATIENCE_S = ControllerSettings().patience_s

DENIED = {
    "valved refuses it": (
        "CreateContainerConfigError",
        "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition desc = valve: "
        "NVIDIA's toolkit keeps no CDI description on this node; use the backend envvar",
    ),
    "the runtime finds no such device": (
        "CreateContainerError",
        "failed to create containerd container: CDI device injection failed: unresolvable CDI devices valve.gpu/slot=1",
    ),
    "nor does NVIDIA's": (
        "RunContainerError",
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: could not apply "
        "required modification to OCI specification: error modifying OCI spec: failed to inject CDI devices: "
        "unresolvable CDI devices runtime.nvidia.com/gpu=all",
    ),
    "its hook fails": (
        "RunContainerError",
        "OCI runtime create failed: runc create failed: error during container init: error running hook #0: stdout: , "
        "stderr: Auto-detected mode as 'legacy' nvidia-container-cli: device error: GPU-1: unknown device: unknown",
    ),
    "its host has no linker": (
        "RunContainerError",
        "stderr: nvidia-container-cli: ldcache error: open failed: /sbin/ldconfig.real: no such file or directory",
    ),
}
# What would be as it is on any other node, and what may take its time.
OF_ITS_OWN = {
    "a Secret": ("CreateContainerConfigError", 'secret "key" not found'),
    "a command": ("RunContainerError", 'runc create failed: exec: "nvidia-smi": executable file not found in $PATH'),
    "a disk": ("CreateContainerError", "failed to create containerd container: no space left on device"),
    "an image": ("ImagePullBackOff", "Back-off pulling image registry/CDI"),
    "a pull": ("ContainerCreating", ""),
    "a driver that its image wants": (
        "RunContainerError",
        "OCI runtime create failed: runc create failed: error running prestart hook #0: exit status 1, stderr: "
        "Auto-detected mode as 'legacy'\nnvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, "
        "please update your driver to a newer version, or use an earlier cuda container: unknown",
    ),
    "a driver that its image wants, by CDI": (
        "RunContainerError",
        "error modifying OCI spec: nvidia-container-runtime: requirements not met: unsatisfied condition: cuda>=12.8",
    ),
    "libraries in its image": (
        "RunContainerError",
        "OCI runtime create failed: stderr: nvidia-container-cli: mount error: file creation failed: "
        "/run/containerd/rootfs/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1: file exists: unknown",
    ),
}


def denied(name: str, why: tuple[str, str], *, node: str = "n1", sla: str = "", owner: str = "job-1") -> Json:
    """A pod of a Job as its kubelet tells of it. One that is started anew and again looks as if it ran."""
    asked = {names.SLA: sla, names.PROFILE: "m"} if sla else {}
    found = pod(name, annotations=asked, node=node, held=uuids(node)[0], owner=owner)
    reason, message = why
    state: Json = {"state": {"waiting": {"reason": reason, "message": message}}}
    if reason == "RunContainerError":
        found["status"]["phase"] = "Running"
        back_off = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
        ended = {"terminated": {"reason": "StartError", "message": message, "exitCode": 128}}
        state = {"state": {"waiting": back_off}, "lastState": ended}
    found["status"]["containerStatuses"] = [{"name": "work", **state}]
    if owner:
        found["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job", "name": owner}

    return found


def reporting() -> World:
    """Two nodes that harvest."""
    world = World()
    for node in ("n1", "n2"):
        world.report(node)
    return world


def moved(world: World) -> list[tuple[str, str]]:
    """By name, and why; of a controller that looks at all pods."""
    world.round()
    return [(body["regarding"]["name"], body["reason"]) for _, path, body in world.calls if path.endswith("/events")]


@pytest.mark.parametrize("sla", ["", "0.3"])
@pytest.mark.parametrize("why", DENIED)
def test_a_pod_whose_node_cannot_give_it_its_gpus_is_never_left_there(why: str, sla: str) -> None:
    world = reporting()
    world.pods.sink.put(denied("p1", DENIED[why], sla=sla))
    assert moved(world) == []
    world.now_s += PATIENCE_S - 1
    assert moved(world) == []

    world.now_s += 1
    assert moved(world) == [("p1", "PlaceLost")]
    (said,) = [body["note"] for _, path, body in world.calls if path.endswith("/events")]
    assert said.startswith("n1 cannot give it its GPUs: ")
    (stored,) = [item["status"] for item in world.controller.caches.workloads.items.values()]
    assert ([one["node"] for one in stored["avoidNodes"]], stored["evictions"]) == (["n1"], 1)


def test_a_node_that_could_not_give_a_pod_its_gpus_is_never_said_to_have_missed_an_sla_alone() -> None:
    world = World()
    world.report("n1")
    world.pods.sink.put(denied("p1", DENIED["its hook fails"]))
    moved(world)
    world.now_s += PATIENCE_S
    moved(world)
    for workload in list(world.controller.caches.workloads.items.values()):
        world.workloads.sink.put(workload)
    world.report("n1")

    (refusal,) = explain(world.controller.caches.state, pod("p2", owner="job-1"), world.now_s).refusals
    assert "never got its GPUs there" in refusal.text


@pytest.mark.parametrize("why", OF_ITS_OWN)
def test_a_pod_that_would_start_nowhere_else_either_is_left_where_it_is(why: str) -> None:
    world = reporting()
    world.pods.sink.put(denied("p1", OF_ITS_OWN[why]))
    moved(world)
    world.now_s += 10 * PATIENCE_S

    assert moved(world) == []


def test_a_bare_pod_is_never_lost_for_want_of_its_gpus() -> None:
    world = reporting()
    for number, why in enumerate(DENIED.values()):
        world.pods.sink.put(denied(f"p{number}", why, owner=""))
    moved(world)
    world.now_s += 10 * PATIENCE_S

    assert moved(world) == []


def test_a_pod_that_starts_in_time_or_goes_by_itself_is_left_alone() -> None:
    world, why = reporting(), DENIED["valved refuses it"]
    for name in ("starts", "ends", "leaves"):
        world.pods.sink.put(denied(name, why, owner=name))
    moved(world)
    world.now_s += PATIENCE_S
    started, ended, leaving = (denied(name, why, owner=name) for name in ("starts", "ends", "leaves"))
    started["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2026-01-01T00:05:00Z"}}
    ended["status"]["phase"] = "Failed"
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
    for one in (started, ended, leaving):
        world.pods.sink.put(one)
    assert moved(world) == []

    world.pods.sink.put(denied("starts", why, owner="starts"))
    assert moved(world) == []  # a new five minutes


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_never_moves_a_pod_sooner_or_later(ahead_s: float) -> None:
    world = reporting()
    world.pods.sink.put(denied("p1", DENIED["its hook fails"]))
    assert moved(world) == []
    world.set_clock(ahead_s)
    assert moved(world) == []

    world.now_s += PATIENCE_S
    assert moved(world) == [("p1", "PlaceLost")]


def test_a_broken_node_never_moves_more_pods_than_the_budget_of_the_fleet() -> None:
    """Nor those of one owner faster than its back-off: they would come back, and be moved again."""
    world, why = reporting(), DENIED["the runtime finds no such device"]
    for number in range(4):
        world.pods.sink.put(denied(f"p{number}", why, owner="job-1" if number < 2 else f"job-{number}"))
    moved(world)
    gone = []
    for _ in range(12):  # a quarter of an hour each
        world.now_s += 900.0
        for name, reason in moved(world):
            assert reason == "PlaceLost"
            gone.append(name)
            world.pods.sink.drop(denied(name, why))

    assert sorted(gone) == [f"p{number}" for number in range(4)]
    rounds = [item["status"]["evictions"] for item in world.controller.caches.workloads.items.values()]
    assert sorted(rounds) == [1, 1, 2]


@pytest.mark.parametrize("before_s", [0.0, 30.0, 300.0])
def test_a_pod_that_misses_its_sla_never_waits_for_one_that_is_denied_its_gpus(before_s: float) -> None:
    """A tenant can name its command so that the runtime's words are of devices, and use up the budget of others."""
    world = reporting()
    world.profile()
    world.pods.sink.put(running())
    for number in range(4):
        crafted = denied(f"d{number}", DENIED["its hook fails"], node="n2", sla="0.9", owner=f"crafted-{number}")
        world.pods.sink.put(crafted)
    world.report(offline=achieved(0.0, 0.0))
    moved(world)
    if before_s:
        world.now_s += 900.0 - before_s
        world.report(offline=achieved(80_000.0, 900.0 - before_s))
        assert moved(world) == [("d0", "PlaceLost")]
    world.now_s += before_s or 900.0
    world.report(offline=achieved(90_000.0, 900.0))

    assert ("p1", "SLAMissed") in moved(world)


def test_denied_pods_never_have_more_than_a_quarter_of_the_budget() -> None:
    """Whoever else moves: theirs is a budget of their own."""
    rules = MonitorSettings(budget_share=0.5)
    tracks, crafted = ([missing(f"{kind}{n}", 0.5, kind) for n in range(9)] for kind in "ab")

    found = choose(tracks, {}, 16, 1e6, rules, {}, crafted)
    assert Counter(track.sample.namespace for track in found) == {"a": 8, "b": 2}
    owners = {f"owner-b{n}": Owner(evicted_at_s=(1e6 - 9.0,)) for n in range(2)}
    found = choose(tracks, owners, 16, 1e6, rules, {}, crafted, Counter(owners.keys()))
    assert Counter(track.sample.namespace for track in found) == {"a": 8}
    found = choose([], owners, 16, 1e6 + rules.budget_s, rules, {}, crafted[2:], Counter(owners.keys()))
    assert Counter(track.sample.namespace for track in found) == {"b": 2}


def hold_by_the_brake(world: World, is_held: bool) -> None:
    world.policy(BRAKE, paused=is_held)


def hold_by_the_node(world: World, is_held: bool) -> None:
    world.report("n1", phase="Paused" if is_held else "Harvesting")


def hold_by_a_guard(world: World, is_held: bool) -> None:
    node = harvest_node("n1")
    node["status"]["gpus"][0] |= {"harvestable": not is_held, "guarded": is_held}
    world.nodes.sink.put(node)


def test_a_pod_without_its_devices_is_never_left_because_its_gpu_is_not_offered() -> None:
    """MIG is on, or no online pod holds the GPU any more: nothing holds the pod back there but its node."""
    world = reporting()
    node = harvest_node("n1")
    node["status"]["gpus"][0] |= {"harvestable": False, "guarded": False}
    world.nodes.sink.put(node)
    world.pods.sink.put(denied("p1", DENIED["its hook fails"], sla="0.3"))
    assert moved(world) == []

    world.now_s += 10 * PATIENCE_S

    assert moved(world) == [("p1", "PlaceLost")]


@pytest.mark.parametrize("hold", [hold_by_the_brake, hold_by_the_node, hold_by_a_guard])
def test_a_pause_never_evicts(hold: Callable[[World, bool], None]) -> None:
    """Nor does the time before it count afterwards."""
    world = reporting()
    world.pods.sink.put(denied("p1", DENIED["its hook fails"], sla="0.3"))
    assert moved(world) == []
    hold(world, True)
    world.now_s += PATIENCE_S
    assert moved(world) == []

    hold(world, False)
    world.now_s += 10 * PATIENCE_S
    assert moved(world) == []
    world.now_s += PATIENCE_S
    assert moved(world) == [("p1", "PlaceLost")]


def test_a_pod_that_valve_never_placed_is_never_moved() -> None:
    world = reporting()
    unplaced = "valve: default/p1 has no placement (valve.gpu/gpus); was it bound by valve-scheduler?"
    one = denied("p1", ("CreateContainerConfigError", f"device plugin PreStartContainer rpc failed: {unplaced}"))
    del one["metadata"]["annotations"][names.GPUS]
    world.pods.sink.put(one)
    moved(world)
    world.now_s += 10 * PATIENCE_S

    assert moved(world) == []


@pytest.mark.parametrize(
    "annotations", [{names.GPUS_REQUIRED: "none"}, {names.SLA: "all of it"}, {names.PROFILE: "a b"}]
)
def test_a_denied_pod_that_cannot_be_read_is_never_counted_in_each_round(annotations: dict[str, str]) -> None:
    world = reporting()
    one = denied("p1", DENIED["its hook fails"])
    one["metadata"]["annotations"] |= annotations
    world.pods.sink.put(one)
    before = failures.objects["Pod"]
    moved(world)
    world.now_s += PATIENCE_S

    assert moved(world) == []
    assert failures.objects["Pod"] == before


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("why", DENIED)
def test_a_pod_is_never_moved_for_a_container_that_asks_for_no_gpu(why: str, kind: str) -> None:
    """Its own container runs, and goes on to be judged by its SLA."""
    world = reporting()
    world.profile()
    one, side = running(), denied("side", DENIED[why])["status"]["containerStatuses"][0] | {"name": "side"}
    of_work = {"name": "work", "state": {"running": {"startedAt": "2025-12-31T00:00:00Z"}}}
    one["spec"]["containers"].append({"name": "side"})
    one["status"]["containerStatuses"] = [of_work]
    one["status"][kind] = [*one["status"].get(kind, []), side]
    world.pods.sink.put(one)
    world.report(offline=achieved(0.0, 0.0))
    moved(world)
    world.now_s += 900.0
    world.report(offline=achieved(90_000.0, 900.0))

    assert moved(world) == [("p1", "SLAMissed")]


def test_an_init_container_that_is_denied_its_gpu_counts() -> None:
    world = reporting()
    one = denied("p1", DENIED["its hook fails"])
    one["spec"]["initContainers"] = [one["spec"]["containers"][0] | {"name": "first"}]
    one["status"]["initContainerStatuses"] = [one["status"].pop("containerStatuses")[0] | {"name": "first"}]
    world.pods.sink.put(one)
    moved(world)
    world.now_s += PATIENCE_S

    assert moved(world) == [("p1", "PlaceLost")]


@pytest.mark.parametrize("pods", [1, 30])
@pytest.mark.parametrize("refused", ["eviction", "status"])
def test_pods_that_may_not_go_never_keep_others_from_going(refused: str, pods: int) -> None:
    """A disruption budget refuses them, or nothing can be stored in their namespace."""
    world, why = reporting(), DENIED["its hook fails"]
    first = [denied(f"a{number}", why, owner=f"owner-{number}") for number in range(pods)]
    for one in first:
        one["metadata"]["namespace"] = "a"
    other = denied("z", why, node="n2", owner="z")
    for one in (*first, other):
        world.pods.sink.put(one)
    world.refused_in = {("a", refused)}
    gone = []
    for _ in range(4):
        world.now_s += PATIENCE_S
        gone += moved(world)
    assert gone == [("z", "PlaceLost")]
    world.pods.sink.drop(other)

    world.refused_in.clear()
    world.now_s += 3600.0
    assert [name[0] for name, _ in moved(world)] == ["a"]


def test_an_sla_pod_under_a_disruption_budget_never_keeps_others_from_going() -> None:
    late, tracks = Late(), [missing(uid, 0.5, namespace) for uid, namespace in (("1", "a"), ("2", "a"), ("3", "b"))]
    rules, order = MonitorSettings(budget_share=0.0), []
    for _ in range(4):
        (track,) = choose(tracks, {}, 16, 1e6, rules, {}, late=late.of(1e6))
        order.append(track.sample.pod_uid)
        late.refused(track, 1e6)

    assert order == ["1", "3", "2", "1"]
    assert late.of(1e6 + BACK_OFF_S)(tracks[0]) == 0


def test_a_container_that_got_its_gpu_in_the_end_never_counts_as_denied() -> None:
    """An init container that succeeded at its second try, and a container that crashes by itself after one."""
    world = reporting()
    started, crashed = denied("p1", DENIED["its hook fails"]), denied("p2", DENIED["its hook fails"])
    started["spec"]["initContainers"] = [started["spec"]["containers"][0] | {"name": "first"}]
    (told,) = started["status"]["containerStatuses"]
    done = {"name": "first", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    started["status"]["initContainerStatuses"] = [{**told, **done}]
    started["status"]["containerStatuses"] = [{"name": "work", "state": {"waiting": {"reason": "PodInitializing"}}}]
    crashed["status"]["containerStatuses"] = [{**told, "state": {"terminated": {"reason": "Error", "message": "x"}}}]
    for one in (started, crashed):
        world.pods.sink.put(one)
    moved(world)
    world.now_s += 10 * PATIENCE_S

    assert moved(world) == []


def test_an_owner_never_has_an_object_for_a_denied_pod_that_is_not_its_turn() -> None:
    world = reporting()
    for number in range(4):
        world.pods.sink.put(denied(f"p{number}", DENIED["its hook fails"], owner=f"job-{number}"))
    moved(world)
    world.now_s += PATIENCE_S

    assert len(moved(world)) == 1
    assert len(world.controller.caches.workloads.items) == 1


def test_nothing_is_moved_that_cannot_be_stored() -> None:
    world = reporting()
    world.pods.sink.put(denied("p1", DENIED["its hook fails"]))
    moved(world)
    world.now_s += PATIENCE_S
    world.refusals["status"] = ApiError(422, "Invalid", "status")

    assert moved(world) == []
