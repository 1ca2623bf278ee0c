"""A best-effort pod was promised nothing, and yet it never stands for ever where online work took its GPUs for good."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from controller_world import World, missing
from crowded_world import HOUR, SETTINGS, WINDOW_S, Crowded, best_effort
from reports import harvest_node, uuids
from valve_kube import names
from valve_kube.shapes import PodShape
from valve_scheduler import metrics
from valve_scheduler.controller.better import AT_ONCE
from valve_scheduler.controller.given import memory_given
from valve_scheduler.controller.monitor import MonitorSettings, Owner, Sample, Track, Verdict
from valve_scheduler.controller.rounds import ControllerSettings
from valve_scheduler.controller.turns import choose, gone
from valve_scheduler.controller.workloads import owner_of

Json = dict[str, Any]


def test_a_best_effort_pod_never_stands_for_ever_on_a_gpu_that_became_busy_for_good() -> None:
    world = Crowded()
    violations = metrics.violations._value.get()

    moved = [world.window(0.01) for _ in range(HOUR)]
    went = world.look()  # its owner has an object now, in which the move is counted first

    assert (moved, went) == ([[]] * HOUR, ["GPUBusy"])
    (status,) = [body["status"] for method, path, body in world.calls if path.endswith("owner-job-1/status")][:1]
    assert ([entry["node"] for entry in status["avoidNodes"]], status["evictions"]) == (["n1"], 1)
    assert [one["type"] for one in status["conditions"]] == ["GPUBusy"]
    assert metrics.violations._value.get() == violations == 0  # no promise was broken
    assert world.look() == []  # back-off


@pytest.mark.parametrize(
    ("elsewhere", "owner", "shares"),
    [
        (0.05, "job-1", [0.0] * 9),  # nothing better is open
        (0.5, "", [0.0] * 9),  # nobody would make it anew
        (0.5, "job-1", [0.0] * (HOUR - 1) + [0.05] + [0.0] * (HOUR - 1)),  # it had time meanwhile
    ],
)
def test_a_best_effort_pod_is_never_moved_for_nothing(elsewhere: float, owner: str, shares: list[float]) -> None:
    world = Crowded(elsewhere, owner)

    assert [world.window(share) for share in shares] == [[]] * len(shares)
    assert world.look() == []


def test_a_pause_never_counts_as_a_busy_hour() -> None:
    world = Crowded()

    assert [world.window(0.0, phase="Paused") for _ in range(2 * HOUR)] == [[]] * 2 * HOUR


def test_best_effort_pods_stay_where_a_policy_says_so() -> None:
    world = Crowded()
    world.policy("stay", sla={"floorPercent": 0})

    assert [world.window(0.0) for _ in range(2 * HOUR)] == [[]] * 2 * HOUR


def test_no_more_best_effort_pods_are_moved_than_there_are_places() -> None:
    rules = MonitorSettings(warm_up_s=0.0, min_runtime_s=0.0, budget_share=1.0)
    world = World(ControllerSettings(monitor=rules))
    many = [best_effort() for _ in range(4)]
    for number, one in enumerate(many):
        one["metadata"] |= {"name": f"p{number}", "uid": f"uid-p{number}"}
        one["metadata"]["annotations"][names.GPUS] = uuids("n1")[number]
        world.pods.sink.put(one)
    moves = []
    for window in range(HOUR + 2):
        offline = [
            {"podUID": f"uid-p{number}", "demandSeconds": WINDOW_S * window, "runnableSeconds": 0.0}
            for number in range(4)
        ]
        world.now_s += WINDOW_S
        world.report("n1", offline=offline, idle=0.0)
        world.report("n2", idle=0.5)
        world.round()
        moves += world.events()

    assert len(moves) == 1


def test_a_round_never_judges_all_that_starve_and_each_comes_in_turn() -> None:
    """A ranking of the whole fleet for each of thousands would hold up the loop that renews the lease."""
    world = World(SETTINGS)
    world.report("n1", idle=0.0)
    world.report("n2", idle=0.5)
    sample = Sample(
        pod_uid="",
        owner_uid="job-1",
        node="n1",
        sla=0.0,
        standalone_tokens_per_s=0.0,
        runtime_s=1e4,
        demand_s=1e4,
        tokens=None,
    )
    uids = [f"uid-{number:03d}" for number in range(2 * AT_ONCE)]
    tracks = [Track(sample=replace(sample, pod_uid=uid), verdict=Verdict.PERSISTENTLY_MISSED) for uid in uids]
    pods = {uid: best_effort() for uid in uids}
    for uid, one in pods.items():
        one["metadata"]["uid"] = uid
    judged: list[str] = []
    better = world.controller.promises._better
    places = better._job

    def seen(pod: Json, *more: Any) -> Any:
        judged.append(pod["metadata"]["uid"])
        return places(pod, *more)

    better._job = seen  # type: ignore[method-assign]
    for _ in range(2):
        better.movable(list(tracks), pods, {}, world.now_s)

    assert sorted(judged) == uids


def test_what_a_node_gave_is_its_own_measure_and_nothing_where_it_measured_none() -> None:
    node = harvest_node("n1")
    first, second, third = uuids("n1")[:3]
    node["status"]["gpus"][1]["freeMemory"] = [1.0] + [0.0] * 31
    node["status"]["gpus"][2]["freeMemory"] = [0.0] * 32

    assert memory_given(node, (first,)) > 0.98
    assert memory_given(node, (first, second)) < 0.05
    assert memory_given(node, (third,)) == memory_given({}, (first,)) == 1.0


REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"kubernetes.io/hostname": "n1"}},
        {"affinity": {"nodeAffinity": REQUIRED}},
        {"affinity": {"podAffinity": REQUIRED}},
        {"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
        {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "local"}}]},
        {"volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": {}}}]},
    ],
)
@pytest.mark.parametrize("as_it_came", [True, False])
def test_a_best_effort_pod_is_never_moved_for_a_node_that_it_may_not_use(spec: Json, as_it_came: bool) -> None:
    one = best_effort()
    one["spec"] |= spec
    page = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [one]}).encode()
    read = one if as_it_came else PodShape().page(page).items[0]
    world = Crowded(**read["spec"])

    assert [world.window(0.01) for _ in range(HOUR)] == [[]] * HOUR
    assert world.look() == []


def test_what_binds_a_pod_to_no_node_never_keeps_it_where_it_starves() -> None:
    free = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}},
        "topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    world = Crowded(**free)
    for _ in range(HOUR):
        world.window(0.01)

    assert world.look() == ["GPUBusy"]


def test_a_best_effort_pod_is_never_kept_from_its_only_node_for_longer_than_a_window() -> None:
    world = Crowded()
    for _ in range(HOUR):
        world.window(0.01)
    assert world.look() == ["GPUBusy"]

    (workload,) = world.controller.caches.workloads.items.values()
    until_s = owner_of(workload).avoid_until_s["n1"]
    assert world.now_s < until_s <= world.now_s + WINDOW_S


def test_a_busy_hour_never_ends_the_time_for_which_a_missed_sla_keeps_an_owner_away() -> None:
    rules = MonitorSettings()
    both = [missing("job-1", sla) for sla in (0.5, 0.0)]

    owner = gone(gone(Owner(), both[0], 0.0, rules), both[1], 1.0, rules)

    assert owner.avoid_until_s == {"n1": rules.avoid_s}


@pytest.mark.parametrize("moved_s", [(), (1e6 - 3_600.0,)])
@pytest.mark.parametrize("share", [0.05, 0.15])
def test_best_effort_never_takes_the_turn_of_a_pod_that_misses_its_sla(
    moved_s: tuple[float, ...], share: float
) -> None:
    """Of whatever namespace, and though its own had a move before."""
    tracks = [missing(f"be{number}", 0.0, "a") for number in range(3)] + [missing("promised", 0.5, "b")]
    owners = {"owner-old": Owner(evicted_at_s=moved_s)}

    found = choose(tracks, owners, 20, 1e6, MonitorSettings(budget_share=share), {"owner-old": "b"})

    assert found[0].sample.pod_uid == "promised"
    assert len(found) == 20 * share
