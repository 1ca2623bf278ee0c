"""The arrays of the cluster follow reports and pods, and their books balance."""

from datetime import datetime, timezone

import numpy as np
import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube.objects import NodeReport, node_report, offline_pod, pod_place
from valve_scheduler.model import WorkloadProfile
from valve_scheduler.placement.holdings import ASSUMED_FOR_S
from valve_scheduler.placement.rank import Job, PlacementSettings, Reason, Standing, gpu_sets, rank
from valve_scheduler.placement.state import STALE_AFTER_S, ClusterState

SETTINGS = PlacementSettings()


def state_of(*nodes: str, capacity: int = 64) -> ClusterState:
    state = ClusterState(SETTINGS, capacity=capacity)
    for node in nodes:
        state.put_report(node_report(harvest_node(node)), NOW_S)

    return state


def open_count(state: ClusterState, node: str) -> int:
    row = state.row(node)
    assert row is not None

    return int(state.fleet(NOW_S).open_gpus[row].sum())


def standing(state: ClusterState, node: str, now_s: float) -> int:
    row = state.row(node)
    assert row is not None

    return int(state.fleet(now_s).standing[row])


def test_a_bound_pod_takes_its_gpus_until_it_finishes() -> None:
    state = state_of("n1")
    held = ",".join(uuids("n1")[2:4])

    state.held.put_pod(pod_place(pod(gpus=2, node="n1", held=held)))
    assert open_count(state, "n1") == 6

    state.held.put_pod(pod_place(pod(gpus=2, node="n1", held=held, phase="Succeeded")))
    assert open_count(state, "n1") == 8
    state.check_integrity()


def test_a_pod_seen_before_its_node_reports_still_holds_its_gpus() -> None:
    state = state_of()

    state.held.put_pod(pod_place(pod(node="n1", held=uuids("n1")[0])))
    state.put_report(node_report(harvest_node("n1")), NOW_S)

    assert open_count(state, "n1") == 7


def test_an_assumed_gpu_is_taken_and_comes_back_when_nothing_came_of_it() -> None:
    state = state_of("n1")

    state.held.assume("uid-p1", "n1", (uuids("n1")[0],), NOW_S)
    assert open_count(state, "n1") == 7
    assert state.held.expire(NOW_S + ASSUMED_FOR_S - 1) == 0
    assert state.held.expire(NOW_S + ASSUMED_FOR_S) == 1

    assert open_count(state, "n1") == 8


def test_a_confirmed_bind_never_expires() -> None:
    state = state_of("n1")

    state.held.assume("uid-p1", "n1", (uuids("n1")[0],), NOW_S)
    state.held.confirm("uid-p1")

    assert state.held.expire(NOW_S + 10 * ASSUMED_FOR_S) == 0
    assert open_count(state, "n1") == 7


def test_the_api_server_overrules_what_was_assumed() -> None:
    """Another scheduler bound the pod elsewhere: our GPUs are free again, its own are not."""
    state = state_of("n1", "n2")

    state.held.assume("uid-p1", "n1", (uuids("n1")[0],), NOW_S)
    state.held.put_pod(pod_place(pod(node="n2", held=uuids("n2")[5])))

    assert (open_count(state, "n1"), open_count(state, "n2")) == (8, 7)
    state.check_integrity()


def test_an_unbound_pod_in_the_watch_leaves_its_bind_under_way_alone() -> None:
    state = state_of("n1")

    state.held.assume("uid-p1", "n1", (uuids("n1")[0],), NOW_S)
    state.held.put_pod(pod_place(pod()))

    assert open_count(state, "n1") == 7


def test_a_whole_list_frees_the_gpus_of_pods_that_are_gone_but_not_of_binds_under_way() -> None:
    state = state_of("n1")
    state.held.put_pod(pod_place(pod("gone", node="n1", held=uuids("n1")[0])))
    state.held.assume("uid-new", "n1", (uuids("n1")[1],), NOW_S)

    state.held.replace_pods([pod_place(pod("here", node="n1", held=uuids("n1")[2]))])

    assert {holding.pod_uid for holding in state.held.holdings()} == {"uid-new", "uid-here"}
    assert open_count(state, "n1") == 6
    state.check_integrity()


def test_two_pods_on_one_gpu_are_found_by_the_books() -> None:
    state = state_of("n1")
    for name in ("a", "b"):
        state.held.put_pod(pod_place(pod(name, node="n1", held=uuids("n1")[0])))

    with pytest.raises(AssertionError, match="held by"):
        state.check_integrity()


def test_a_node_is_stale_when_its_report_is_old_and_off_when_it_says_so() -> None:
    state = state_of("n1")
    state.put_report(node_report(harvest_node("off", phase="Paused")), NOW_S)

    assert standing(state, "n1", NOW_S + STALE_AFTER_S) == Standing.HARVESTING
    assert standing(state, "n1", NOW_S + STALE_AFTER_S + 1) == Standing.STALE
    assert standing(state, "off", NOW_S) == Standing.OFF


def test_a_node_whose_clock_runs_ahead_does_not_stay_fresh_for_ever() -> None:
    state = ClusterState(SETTINGS)

    state.put_report(node_report(harvest_node("n1", age_s=-3600.0)), NOW_S)

    assert standing(state, "n1", NOW_S + STALE_AFTER_S + 1) == Standing.STALE


def test_rows_grow_and_are_used_again_with_nothing_left_of_the_node_before() -> None:
    state = state_of(*(f"n{number}" for number in range(9)), capacity=2)
    state.sets(2)
    state.held.put_pod(pod_place(pod(node="n3", held=uuids("n3")[0])))

    state.drop_report("n3")
    state.put_report(node_report(harvest_node("fresh")), NOW_S)

    assert state.row("n3") is None
    assert open_count(state, "fresh") == 8
    assert len(state.node_names()) == 9
    state.check_integrity()


def test_cached_set_figures_equal_those_computed_from_scratch() -> None:
    """Reports arrive one by one; every row's cache must follow its report."""
    random = np.random.default_rng(3)
    state = state_of("n0", capacity=1)
    for gpu_count in (1, 2, 4, 8):
        state.sets(gpu_count)
    for number in range(20):
        alignment = random.uniform(0.5, 1.0, 28).tolist()
        node = harvest_node(f"n{number % 7}", idle=float(random.random()), alignment=alignment)
        state.put_report(node_report(node), NOW_S)

    fleet = state.fleet(NOW_S)
    live = [row for row in map(state.row, state.node_names()) if row is not None]

    for gpu_count in (1, 2, 4, 8):
        fresh = gpu_sets(fleet.idle, fleet.alignment, gpu_count, SETTINGS)
        assert state.sets(gpu_count).runnable[live] == pytest.approx(fresh.runnable[live], abs=1e-5)
        assert np.array_equal(state.sets(gpu_count).aligned[live], fresh.aligned[live])


def test_an_owner_keeps_away_from_a_node_until_its_time() -> None:
    state = state_of("n1")
    state.asked.put_avoid("default/job-1", {"n1": NOW_S + 60})
    wish = offline_pod(pod(owner="job-1"))

    def reason(now_s: float) -> int:
        fleet = state.fleet(NOW_S)
        row = state.row("n1")
        assert row is not None
        return int(rank(fleet, state.sets(1), state.asked.job(wish, now_s), SETTINGS).reason[row])

    assert reason(NOW_S) == Reason.AVOIDED
    assert reason(NOW_S + 60) == Reason.NONE


def test_a_job_finds_the_profile_of_its_own_namespace_only() -> None:
    state = state_of()
    profile = WorkloadProfile(standalone_tokens_per_s=1.0, curve=_flat())
    state.asked.put_profile("other", "llama", profile)
    wish = offline_pod(pod(annotations={"valve.gpu/profile": "llama"}))

    assert state.asked.job(wish, NOW_S) == Job(gpus=1)

    state.asked.put_profile("default", "llama", profile)
    assert state.asked.job(wish, NOW_S).profile is profile


def _flat():  # type: ignore[no-untyped-def]
    from valve_scheduler.model import ThroughputCurve

    return ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,))


def reported(epoch: int, clock_s: float, written_at_s: float | None = None) -> NodeReport:
    """A report by a node whose clock says `clock_s`."""
    node = harvest_node("n1", age_s=NOW_S - clock_s, epoch=epoch)
    if written_at_s is not None:
        time = datetime.fromtimestamp(written_at_s, timezone.utc).isoformat()
        node["metadata"]["managedFields"] = [{"subresource": "status", "time": time}, {"time": "2030-01-01T00:00:00Z"}]
    return node_report(node)


@pytest.mark.parametrize("skew_s", [-3600.0, -90.0, 0.0, 3600.0])
def test_a_node_is_never_stale_for_its_clock_while_it_reports_nor_fresh_when_it_does_not(skew_s: float) -> None:
    state = ClusterState(SETTINGS)
    for number in range(4):
        now_s = NOW_S + 30.0 * number
        state.put_report(reported(number, now_s + skew_s), now_s)
    last_s = NOW_S + 90.0

    assert standing(state, "n1", last_s + STALE_AFTER_S) == Standing.HARVESTING
    state.put_report(reported(3, last_s + skew_s), last_s + 60.0)  # the same again: its spec changed
    assert standing(state, "n1", last_s + STALE_AFTER_S + 1) == Standing.STALE
    assert state.worst_skew_s() == abs(skew_s)


def test_a_report_found_in_a_list_is_as_old_as_the_api_server_says() -> None:
    for age_s, expected in ((30.0, Standing.HARVESTING), (600.0, Standing.STALE)):
        state = ClusterState(SETTINGS)
        state.put_report(reported(7, NOW_S - 5_000.0, NOW_S - age_s), NOW_S, is_live=False)

        assert standing(state, "n1", NOW_S) == expected


def test_a_node_that_is_off_is_never_counted_as_one_that_should_report() -> None:
    """The daemon leaves its node by design while the driver is upgraded."""
    state = state_of("n1")
    drained = {**harvest_node("off", age_s=5_000.0), "spec": {"resolved": {"drain": "driver"}}}
    state.put_report(node_report(drained), NOW_S)

    assert state.report_ages_s(NOW_S).tolist() == [0.0]


def test_the_kept_standing_of_the_nodes_is_never_another_than_one_judged_anew() -> None:
    """It is judged again only when a report or the clock can have changed it; the clock may jump back, too."""
    random = np.random.default_rng(1)
    state, nodes, now_s = state_of(capacity=2), [f"n{number}" for number in range(7)], NOW_S
    seen: set[int] = set()
    for _ in range(600):
        now_s += float(random.choice([0.0, 5.0, 40.0, STALE_AFTER_S, -20.0]))
        node, age_s = str(random.choice(nodes)), float(random.choice([0.0, 30.0, 2 * STALE_AFTER_S]))
        if random.random() < 0.1:
            state.drop_report(node)
        elif random.random() < 0.8:
            phase = str(random.choice(["Harvesting", "Paused"]))
            report = node_report(harvest_node(node, phase=phase, age_s=NOW_S - now_s + age_s, epoch=int(now_s)))
            state.put_report(report, now_s, is_live=bool(random.random() < 0.7))
        kept = state.fleet(now_s).standing
        state._standing = None

        assert kept.tolist() == state.fleet(now_s).standing.tolist()
        seen.update(kept.tolist())
    assert seen == {Standing.HARVESTING, Standing.OFF, Standing.STALE}
