"""The controller's rounds: what it writes for which view of the cluster, and what it leaves alone."""

import asyncio
import re
from datetime import datetime, timezone
from typing import Any

import pytest
from controller_world import EVENT, EVICTION, STATUS, World, achieved, missed, refused_pod, running
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError
from valve_kube.objects import node_report
from valve_scheduler import metrics
from valve_scheduler.controller.rounds import ControllerSettings
from valve_scheduler.placement.rank import PlacementSettings

Json = dict[str, Any]


def test_a_pod_that_misses_is_evicted_with_its_uid_and_the_owner_remembers() -> None:
    world = missed()

    assert world.round() == [STATUS, EVICTION, EVENT]

    status, eviction, event = world.calls[0][2]["status"], world.calls[1][2], world.calls[2][2]
    assert event["note"] == "reached 0.10 of standalone on n1, promised 0.30; moved"
    assert (event["regarding"]["uid"], event["reason"]) == ("uid-p1", "SLAMissed")
    assert re.fullmatch(r"p1\.[0-9a-f]+", event["metadata"]["name"])  # a name that the API server takes
    assert eviction["deleteOptions"] == {"preconditions": {"uid": "uid-p1"}}
    assert [entry["node"] for entry in status["avoidNodes"]] == ["n1"]
    assert (status["evictions"], status["achieved"]) == (1, 0.1)


def test_a_disruption_budget_that_forbids_it_leaves_no_trace_on_the_owner() -> None:
    world = missed()
    world.refusals["eviction"] = ApiError(429, "TooManyRequests", "disruption budget")

    assert world.round() == [STATUS, EVICTION, STATUS]

    assert world.calls[2][2]["status"]["evictions"] == 0
    world.report(offline=achieved(90_000.0, 900.0))
    world.refusals.clear()
    assert world.round() == [STATUS, EVICTION, EVENT]  # nothing was counted, so no back-off holds it


def test_a_status_that_did_not_change_is_not_written_again() -> None:
    world = missed()
    world.round()
    assert world.round() == []


@pytest.mark.parametrize("tokens", [None, 900_000.0])
def test_a_pod_without_tokens_or_with_enough_is_left_alone(tokens: float | None) -> None:
    world = missed()
    world.report(offline=achieved(tokens, 900.0))

    assert EVICTION not in world.round()


@pytest.mark.parametrize(("source", "moves"), [("Manual", 0), ("Measured", 0), ("MeasuredByNode", 1)])
def test_only_what_valve_measured_of_a_job_ever_moves_a_pod_that_had_its_time(source: str, moves: int) -> None:
    world = World()
    world.profile(source)
    world.pods.sink.put(running())
    entry = {"podUID": "uid-p1", "demandSeconds": 0.0, "usefulTokens": 0.0, "runnableSeconds": 0.0}
    world.report(offline=[entry])
    world.round()
    world.now_s += 900.0
    world.report(offline=[entry | {"demandSeconds": 900.0, "usefulTokens": 90_000.0, "runnableSeconds": 600.0}])

    assert world.round().count(EVICTION) == moves


def test_best_effort_pods_are_not_watched() -> None:
    world = World()
    best_effort = running()
    del best_effort["metadata"]["annotations"][names.SLA]
    world.pods.sink.put(best_effort)
    world.report(offline=achieved(0.0, 0.0))

    assert world.round() == []


def test_a_node_that_became_good_enough_for_a_refused_pod_is_bumped_once() -> None:
    world = World()
    world.profile()
    world.report(idle=0.2)
    world.pods.sink.put(refused_pod())
    assert world.requeue() == []

    world.report(idle=0.9)

    assert world.requeue() == ["/api/v1/nodes/n1"]
    assert names.EPOCH in world.calls[0][2]["metadata"]["annotations"]
    assert world.requeue() == []


def test_a_pod_that_is_refused_though_a_node_would_take_it_gets_that_node_bumped_again() -> None:
    """Guards pods that waited five minutes: refused for GPUs that a bind had assumed and then given up."""
    world = World()
    world.profile()
    world.report(idle=0.9)
    world.pods.sink.put(refused_pod())
    assert world.requeue() == ["/api/v1/nodes/n1"]
    world.now_s += 29.0
    assert world.requeue() == []

    world.now_s += 1.0
    world.report(idle=0.9)

    assert world.requeue() == ["/api/v1/nodes/n1"]


def test_a_pod_the_scheduler_has_not_refused_bumps_nothing() -> None:
    world = World()
    world.profile()
    world.report(idle=0.9)
    world.pods.sink.put(pod(annotations={names.SLA: "0.4", names.PROFILE: "m"}))

    assert world.requeue() == []


def test_a_gpu_that_falls_free_is_such_a_change_too() -> None:
    world = World()
    world.report(cards=1)
    world.pods.sink.put(pod("other", node="n1", held=uuids("n1")[0]))
    waiting = pod("waiting")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    world.pods.sink.put(waiting)
    assert world.requeue() == []

    world.pods.sink.drop(pod("other"))

    assert world.requeue() == ["/api/v1/nodes/n1"]


def test_policies_are_written_into_the_nodes_they_are_for_once() -> None:
    world = World()
    world.report("n1")
    world.report("n2")
    world.labels.sink.put({"metadata": {"name": "n1", "labels": {"pool": "a"}}})
    world.policy("pool", nodeSelector={"pool": "a"}, mode="harvest", reclaimsPerHour=5)

    assert world.apply_policies() == [("n1", {"paused": False, "resolved": {"mode": "harvest", "reclaimsPerHour": 5}})]
    assert world.apply_policies() == []


def test_what_a_policy_says_no_more_is_taken_out_of_the_node() -> None:
    world = World()
    world.report("n1")
    world.policy("all", mode="harvest", reclaimsPerHour=5)
    world.apply_policies()
    world.policy("all", mode="off")

    assert world.apply_policies() == [("n1", {"paused": False, "resolved": {"mode": "off", "reclaimsPerHour": None}})]
    assert world.apply_policies() == []


def test_the_node_of_a_pod_whose_profile_is_missing_is_told_to_measure_it() -> None:
    world = World()
    world.report("n1")
    asking = pod(annotations={names.PROFILE: "m"}, node="n1", held=uuids("n1")[0])
    asking["metadata"]["creationTimestamp"] = datetime.fromtimestamp(NOW_S - 5, timezone.utc).isoformat()
    world.pods.sink.put(asking)

    assert world.apply_policies() == [("n1", {"paused": False, "resolved": {"profile": ["uid-p1"]}})]
    ((reason, note),) = world.events()
    assert (reason, note.partition(":")[0]) == ("Profiling", "is measured for OfflineProfile m")
    assert world.apply_policies() == []
    world.profile()
    assert world.apply_policies() == [("n1", {"paused": False, "resolved": {"profile": None}})]
    assert world.events() == []


def measured_pod() -> Json:
    found = pod(annotations={names.PROFILE: "m"}, node="n1", held=uuids("n1")[0], phase="Running")
    found["metadata"]["creationTimestamp"] = datetime.fromtimestamp(NOW_S - 5, timezone.utc).isoformat()

    return found


def test_a_pod_that_is_measured_hears_how_that_ended() -> None:
    world, levels = World(), [{"limitMiB": mib, "usefulTokens": mib, "runnableSeconds": 100.0} for mib in (1, 2, 3)]
    world.pods.sink.put(measured_pod())
    world.report(offline=[{"podUID": "uid-p1", "levels": levels}])

    asyncio.run(world.controller.measuring.store())

    assert world.events() == [("Profiled", "OfflineProfile m is Ready: 0.03 tokens/s alone, 3 levels of memory")]


def test_a_pod_that_shows_too_little_within_its_hour_hears_that_too() -> None:
    world = World()
    world.report("n1")
    world.pods.sink.put(measured_pod())
    world.apply_policies()

    world.now_s += 3_600.0
    world.apply_policies()

    ((reason, note),) = world.events()
    assert reason == "ProfilingEnded"
    assert "no three levels of memory within an hour" in note


def test_an_event_that_a_controller_before_us_told_is_not_told_again() -> None:
    """The API server knows it by its name; a refusal of another kind is tried again."""
    world = World()
    world.report("n1")
    world.pods.sink.put(measured_pod())
    world.refusals["events"] = ApiError(500, "InternalError", "etcd")
    world.apply_policies()
    first = world.calls[0][2]["metadata"]["name"]

    for answer in (ApiError(409, "AlreadyExists", "there"), None):
        world.controller.measuring._under_way.clear()
        world.refusals = {"events": answer} if answer else {}
        world.apply_policies()
        names_told = [body["metadata"]["name"] for _, path, body in world.calls if path.endswith("/events")]
        assert names_told == ([first] if answer else [])


def test_a_job_that_no_node_could_serve_is_told_once_and_its_condition_says_why() -> None:
    world = World()
    world.profile()
    world.report(idle=0.2)
    world.pods.sink.put(refused_pod())

    calls = world.round()

    assert [path.rpartition("/")[2] for _, path in calls] == ["offlineworkloads", "status", "events"]
    (condition,) = world.calls[1][2]["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("SLAUnreachable", "True", "FleetTooBusy")
    ((reason, note),) = world.events()
    assert (reason, note.startswith("FleetTooBusy: ")) == ("SLAUnreachable", True)
    assert EVENT not in world.round()

    world.report(idle=0.9)
    world.round()

    (status,) = [body["status"] for _, path, body in world.calls if path.endswith("/status")]
    assert status["conditions"] == []


def test_a_policy_that_another_overrules_is_told_and_not_again() -> None:
    world = World()
    world.report("n1")
    world.policy("a", mode="off")
    world.policy("b", mode="harvest")

    said = dict(world.judge_policies())

    assert [said[name]["conditions"][0]["reason"] for name in "ab"] == ["InForce", "OtherPolicy"]
    assert world.events() == [("PolicyShadowed", "HarvestPolicy a rules 1 of its 1 nodes (n1)")]
    (event,) = [body for _, path, body in world.calls if path.endswith("/default/events")]
    assert (event["regarding"]["kind"], event["regarding"]["name"]) == ("HarvestPolicy", "b")

    world.policy("a", said["a"], mode="off")
    world.policy("b", said["b"], mode="harvest")
    assert world.judge_policies() == []
    assert world.events() == []


def test_a_policy_whose_status_cannot_be_written_is_not_told_every_round() -> None:
    """After a rollback of the CRDs it has none."""
    world = World()
    world.policy("a", nodeSelector={"pool": "a"}, namespaces=[{"name": "x"}])
    world.refusals["status"] = ApiError(404, "NotFound", "no such subresource")

    world.judge_policies()

    assert world.events() == []


def test_a_node_whose_crd_drops_what_it_is_told_is_not_told_every_second() -> None:
    world = World()
    world.report("n1")
    world.policy("all", mode="harvest")
    world.apply_policies()
    world.nodes.sink.put(harvest_node("n1"))  # the API server kept none of it

    assert world.apply_policies() == []
    world.now_s += 30.0
    assert [name for name, _ in world.apply_policies()] == ["n1"]


def test_a_pause_reaches_every_node_and_its_end_too() -> None:
    world = World()
    world.report("n1")
    world.report("n2")
    world.policy("night", paused=True)
    assert [(name, spec["paused"]) for name, spec in world.apply_policies()] == [("n1", True), ("n2", True)]

    world.policies.sink.drop({"metadata": {"name": "night"}})

    assert [(name, spec["paused"]) for name, spec in world.apply_policies()] == [("n1", False), ("n2", False)]


def test_a_node_whose_driver_is_to_be_upgraded_is_cleared_of_offline_pods_that_run_or_are_about_to() -> None:
    world = World()
    for node in ("n1", "n2"):
        world.report(node)
    for name, node, phase in (
        ("p1", "n1", "Running"),
        ("p2", "n1", "Pending"),
        ("p3", "n1", "Failed"),
        ("p4", "n2", ""),
    ):
        world.pods.sink.put(pod(name, node=node, held=uuids(node)[0], phase=phase))
    assert world.clear() == []
    world.labels.sink.put({"metadata": {"name": "n1", "labels": {"nvidia.com/gpu.deploy.client": "paused-for-driver"}}})
    world.apply_policies()

    evictions = [path for _, path in world.clear() if path.endswith("/eviction")]

    assert evictions == [f"/api/v1/namespaces/default/pods/{name}/eviction" for name in ("p1", "p2")]
    note = "n1 is drained: nvidia.com/gpu.deploy.client=paused-for-driver"
    assert (world.calls[1][2]["reason"], world.calls[1][2]["note"]) == ("NodeDrained", note)


def test_a_gpu_with_an_online_pod_that_nobody_hears_is_cleared_and_its_neighbours_are_not() -> None:
    world = World()
    report = harvest_node("n1")
    report["status"]["gpus"][0]["onlineRisk"] = "web/own-0/serve runs without the shim"
    world.nodes.sink.put(report)
    first, second = uuids("n1")[:2]
    world.pods.sink.put(pod("p1", node="n1", held=first, phase="Running"))
    world.pods.sink.put(pod("p2", node="n1", held=second, phase="Running"))

    assert [path for _, path in world.clear()] == [EVICTION[1], EVENT[1]]
    note = f"web/own-0/serve runs without the shim and may need memory of {first} on n1"
    assert (world.calls[1][2]["reason"], world.calls[1][2]["note"]) == ("OnlineAtRisk", note)


def test_the_chart_s_alignment_threshold_stands_in_every_node_unless_a_policy_has_another() -> None:
    world = World(ControllerSettings(placement=PlacementSettings(theta=0.5)))
    world.report("n1")
    world.report("n2")
    world.labels.sink.put({"metadata": {"name": "n2", "labels": {"pool": "a"}}})
    world.policy("pool", nodeSelector={"pool": "a"}, alignmentThreshold=0.9)

    written = {name: spec["resolved"]["alignmentThreshold"] for name, spec in world.apply_policies()}

    assert written == {"n1": 0.5, "n2": 0.9}
    assert node_report(world.controller.caches.nodes.items["", "n1"]).theta == 0.5  # what `valve explain` goes by


def test_a_report_is_deleted_when_its_node_has_been_gone_for_a_while() -> None:
    world = World()
    for name, age_s in (("here", 9_000.0), ("gone", 301.0), ("just-gone", 299.0)):
        world.nodes.sink.put(harvest_node(name, age_s=age_s))
    world.nodes.sink.put({"metadata": {"name": "to-come"}, "spec": {"mode": "off"}})
    world.labels.sink.put({"metadata": {"name": "here"}})

    asyncio.run(world.controller.forget())

    preconditions = {"uid": "uid-gone", "resourceVersion": "1"}
    assert world.calls == [
        ("DELETE", "/apis/valve.gpu/v1alpha1/gpuharvestnodes/gone", {"preconditions": preconditions})
    ]


@pytest.mark.parametrize("odd", ["0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_a_report_with_a_time_that_cannot_be_never_keeps_the_reports_of_nodes_that_are_gone(odd: str) -> None:
    """The API server takes the year 0, which no clock of Python has: the round failed each time, for all nodes."""
    world = World()
    for name in ("odd", "gone"):
        world.nodes.sink.put(harvest_node(name, age_s=301.0))
    world.controller.caches.nodes.items["", "odd"]["status"]["observedAt"] = odd

    asyncio.run(world.controller.forget())

    assert [path.rpartition("/")[2] for _, path, _ in world.calls] == ["odd", "gone"]


def test_an_eviction_budget_of_a_policy_is_honoured() -> None:
    world = missed()
    world.policy("all", eviction={"maxPerOwner": 0})

    assert EVICTION not in world.round()


def test_accounts_are_charged_with_what_nodes_count() -> None:
    world = World()
    world.profile()
    world.pods.sink.put(running())
    world.report(offline=[{"podUID": "uid-p1", "harvestSeconds": 60.0, "usefulTokens": 30_000.0}])

    (made, written) = world.account()

    assert made[0] == "/namespaces/default/harvestaccounts"
    assert written[0] == "/namespaces/default/harvestaccounts/usage/status"
    assert written[1]["status"]["offline"] == {"harvestSeconds": 60.0, "usefulTokens": 30_000.0, "savedSeconds": 30.0}
    assert written[1]["status"]["owners"] == [{"name": "batch", **written[1]["status"]["offline"]}]
    assert written[1]["metadata"]["resourceVersion"] == "1"


def test_without_the_accounts_api_everything_else_goes_on() -> None:
    """After a rollback of the CRDs under a newer controller."""
    world = World()
    world.pods.sink.put(running())
    world.report(offline=[{"podUID": "uid-p1", "harvestSeconds": 60.0}])
    world.accounts._listed.clear()

    assert world.controller.caches.missing() == []
    assert world.account() == []


def test_an_account_that_did_not_grow_is_not_written_again() -> None:
    world = World()
    world.pods.sink.put(running())
    world.report(offline=[{"podUID": "uid-p1", "harvestSeconds": 60.0}])
    status = world.account()[1][1]["status"]
    metadata = {"namespace": "default", "name": "usage", "resourceVersion": "2"}
    world.accounts.sink.put({"metadata": metadata, "status": status})

    assert world.account() == []


def test_a_replica_that_lost_the_lease_never_tells_old_figures() -> None:
    """An alert on pods that miss their SLA fired for ever."""
    world = missed()
    world.report(offline=[*achieved(90_000.0, 900.0)])
    world.round()
    world.account()
    assert metrics.violations._value.get() == 1

    world.controller.stand_down()

    assert metrics.violations._value.get() == 0
    assert [one.samples for one in (*metrics.saved.collect(), *metrics.harvested.collect())] == [[], []]


def test_a_pod_without_a_controller_is_never_evicted_for_its_sla() -> None:
    """Nothing would make it anew: it was lost."""
    world = World()
    world.profile()
    bare = running()
    bare["metadata"]["ownerReferences"] = []
    world.pods.sink.put(bare)
    for number in range(3):
        world.now_s += 900.0
        world.report(offline=achieved(0.0, 900.0 * number))
        assert EVICTION not in world.round()

    ((_, workload),) = world.controller.caches.workloads.items.items()
    assert "no controller" in workload["status"]["conditions"][0]["message"]
