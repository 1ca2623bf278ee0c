"""The SLA monitor: what counts as a miss, who is moved, and what keeps it from moving too much."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_scheduler.controller.monitor import (
    MonitorSettings,
    Owner,
    Sample,
    Track,
    Verdict,
    backoff_until_s,
    choose_evictions,
    evicted,
    observe,
)
from valve_scheduler.controller.workloads import new_workload, owner_of, status_of

SETTINGS = MonitorSettings()
NOW_S = 1_000_000.0
FIRST = Sample(
    pod_uid="p1",
    owner_uid="job-1",
    node="n1",
    sla=0.3,
    standalone_tokens_per_s=1_000.0,
    runtime_s=400.0,
    demand_s=0.0,
    tokens=0.0,
)


def run(shares: list[float], *, step_s: float = 600.0, demand: float = 1.0, first: Sample = FIRST) -> Track:
    """Let a pod achieve one share of standalone after another, a window each."""
    track, sample = observe(None, first, SETTINGS), first
    for share in shares:
        busy_s = step_s * demand
        sample = replace(
            sample,
            runtime_s=sample.runtime_s + step_s,
            demand_s=sample.demand_s + busy_s,
            tokens=(sample.tokens or 0.0) + share * 1_000.0 * busy_s,
        )
        track = observe(track, sample, SETTINGS)

    return track


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([], Verdict.MEASURING),
        ([0.3], Verdict.MET),
        ([0.29], Verdict.MISSED),
        ([0.1, 0.1], Verdict.PERSISTENTLY_MISSED),
        ([0.1, 0.4, 0.1], Verdict.MISSED),
        ([0.1, 0.1, 0.4], Verdict.MET),
    ],
)
def test_two_windows_in_a_row_make_a_persistent_miss(shares: list[float], verdict: Verdict) -> None:
    assert run(shares).verdict is verdict


def test_time_without_demand_is_not_held_against_anyone() -> None:
    """A quarter of the time with demand: three windows of the clock hold not one of demand."""
    assert run([0.0, 0.0, 0.0], demand=0.25).verdict is Verdict.MEASURING


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"runtime_s": 299.0}, Verdict.WARMING_UP),
        ({"tokens": None}, Verdict.NO_TOKENS),
        ({"standalone_tokens_per_s": 0.0}, Verdict.NO_PROFILE),
    ],
)
def test_what_cannot_be_judged_says_why(change: dict[str, float | None], verdict: Verdict) -> None:
    assert observe(None, replace(FIRST, **change), SETTINGS).verdict is verdict


def test_the_warm_up_does_not_count_into_the_first_window() -> None:
    """No tokens while weights load; from then on exactly the SLA."""
    cold = replace(FIRST, runtime_s=10.0)
    warm = replace(cold, runtime_s=290.0, demand_s=280.0)
    track = observe(observe(None, cold, SETTINGS), warm, SETTINGS)

    done = replace(warm, runtime_s=900.0, demand_s=280.0 + 600.0, tokens=0.3 * 1_000.0 * 600.0)

    assert observe(track, done, SETTINGS).verdict is Verdict.MET


def test_counters_that_go_back_start_a_new_window_and_keep_the_misses() -> None:
    track = run([0.1])
    restarted = replace(track.sample, demand_s=5.0, tokens=1.0)

    after = observe(track, restarted, SETTINGS)

    assert (after.verdict, after.misses, after.begin_demand_s) == (Verdict.MEASURING, 1, 5.0)


def missing(uid: str, owner: str, achieved: float = 0.1) -> Track:
    sample = replace(FIRST, pod_uid=uid, owner_uid=owner)
    return Track(sample=sample, verdict=Verdict.PERSISTENTLY_MISSED, misses=3, achieved=achieved)


def chosen(tracks: list[Track], owners: dict[str, Owner] | None = None, running: int = 100) -> list[str]:
    found = choose_evictions(tracks, owners or {}, running, NOW_S, SETTINGS)
    return [track.sample.pod_uid for track in found]


def test_the_worst_goes_first_and_an_owner_loses_a_few_at_once() -> None:
    tracks = [missing("a", "j1", 0.2), missing("b", "j2", 0.05), missing("c", "j2", 0.01)]

    assert chosen(tracks) == ["c", "b", "a"]
    assert chosen([missing(f"p{number:02}", "j") for number in range(20)], running=1000) == [
        f"p{number:02}" for number in range(8)
    ]


def test_a_pod_that_meets_its_sla_is_never_evicted() -> None:
    assert (
        chosen([replace(missing("a", "j1"), verdict=verdict) for verdict in Verdict if "PERS" not in verdict.name])
        == []
    )


@pytest.mark.parametrize(("running", "allowed"), [(1, 1), (19, 1), (40, 2), (100, 5)])
def test_at_most_the_budget_goes_at_once_and_at_least_one_may(running: int, allowed: int) -> None:
    tracks = [missing(f"p{number}", f"j{number}") for number in range(10)]

    assert len(chosen(tracks, running=running)) == allowed


def test_recent_evictions_of_anyone_use_up_the_budget() -> None:
    owners = {"other": Owner(evicted_at_s=(NOW_S - 599.0,))}

    assert chosen([missing("a", "j1")], owners, running=10) == []
    assert chosen([missing("a", "j1")], {"other": Owner(evicted_at_s=(NOW_S - 600.0,))}, running=10) == ["a"]


def test_a_tenant_never_takes_the_budget_of_others_by_a_profile_that_says_too_much() -> None:
    """Five Jobs with a hundredfold speed took 864 moves a day; pods that really missed waited behind them."""

    def of(namespace: str, number: int, achieved: float) -> Track:
        track = missing(f"{namespace}-{number}", f"{namespace}-{number % 5}", achieved)
        return replace(track, sample=replace(track.sample, namespace=namespace))

    waiting = [of("liar", n, 0.001) for n in range(40)] + [of("honest", n, 0.2) for n in range(4)]

    assert sorted(uid.split("-")[0] for uid in chosen(waiting, running=120)) == ["honest"] * 3 + ["liar"] * 3
    moved = {"liar-0": Owner(evicted_at_s=(NOW_S - 60.0,) * 5)}
    assert chosen(waiting, moved, running=120) == ["honest-0"]
    moved = {"honest-0": Owner(evicted_at_s=(NOW_S - 60.0,) * 5)}
    assert chosen(waiting, moved, running=120) == ["liar-0"]


def test_a_namespace_never_takes_every_move_by_its_name() -> None:
    """Where one move is left in each ten minutes all had none in them. A Job of one pod has no track while it waits."""
    homes = {f"{namespace}-{number}": namespace for namespace in ("aaa", "zzz") for number in range(8)}
    waiting = {
        uid: replace(track := missing(uid, uid), sample=replace(track.sample, namespace=namespace))
        for uid, namespace in homes.items()
    }
    owners: dict[str, Owner] = {}
    moves: Counter[str] = Counter()
    for turn in range(20):
        now_s = NOW_S + 600.0 * turn
        there = [track for uid, track in waiting.items() if now_s - 601 not in owners.get(uid, Owner()).evicted_at_s]
        for track in choose_evictions(there, owners, 10, now_s, SETTINGS, homes):
            uid = track.sample.owner_uid
            owners[uid] = evicted(owners.get(uid, Owner()), "n1", now_s, SETTINGS)
            moves[track.sample.namespace] += 1

    assert moves["aaa"] == moves["zzz"] >= 5


@given(
    missed=st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 0.29)), max_size=30),
    moved=st.dictionaries(st.integers(0, 5), st.floats(1.0, 1_300.0), max_size=4),
    running=st.integers(1, 300),
)
def test_one_namespace_alone_never_waits_for_its_turn(
    missed: list[tuple[int, float]], moved: dict[int, float], running: int
) -> None:
    """The lab has one: what it measured with the worst first, whoever they are, stands."""
    tracks = [missing(f"p{number:02}", f"j{owner}", achieved) for number, (owner, achieved) in enumerate(missed)]
    owners = {f"j{owner}": Owner(evicted_at_s=(NOW_S - ago_s,)) for owner, ago_s in moved.items()}
    left = max(1, int(SETTINGS.budget_share * running)) - sum(ago_s < SETTINGS.budget_s for ago_s in moved.values())
    expected: list[str] = []
    of_owner: Counter[str] = Counter()
    for track in sorted(tracks, key=lambda one: ((one.achieved or 0.0) / one.sample.sla, one.sample.pod_uid)):
        uid = track.sample.owner_uid
        may_go = backoff_until_s(owners.get(uid, Owner()), NOW_S, SETTINGS) <= NOW_S
        if len(expected) < left and may_go and of_owner[uid] < SETTINGS.at_once:
            of_owner[uid] += 1
            expected.append(track.sample.pod_uid)

    assert chosen(tracks, owners, running) == expected


def test_an_owner_is_left_alone_for_a_while_after_each_round() -> None:
    owner = evicted(evicted(Owner(), "n1", NOW_S, SETTINGS), "n2", NOW_S, SETTINGS)

    assert backoff_until_s(owner, NOW_S, SETTINGS) == NOW_S + 1_200.0
    assert owner.rounds(NOW_S, SETTINGS) == [NOW_S]  # two pods, one round


def test_where_a_policy_says_so_the_back_off_doubles_to_its_limit() -> None:
    settings = replace(SETTINGS, backoff_s=300.0, max_backoff_s=3600.0)
    owner, waits = Owner(), []
    for number in range(6):
        owner = evicted(owner, "n1", NOW_S + number, settings)
        waits.append(backoff_until_s(owner, NOW_S + number, settings) - NOW_S - number)

    assert waits == [300.0, 600.0, 1_200.0, 2_400.0, 3_600.0, 3_600.0]


def test_an_owner_in_back_off_or_past_its_last_chance_is_left_alone_until_a_day_has_gone() -> None:
    worn = Owner(evicted_at_s=tuple(NOW_S - 80_000.0 + number for number in range(24)))

    assert chosen([missing("a", "j1")], {"j1": Owner(evicted_at_s=(NOW_S - 1_199.0,))}) == []
    assert chosen([missing("a", "j1")], {"j1": Owner(evicted_at_s=(NOW_S - 1_200.0,))}) == ["a"]
    assert chosen([missing("a", "j1")], {"j1": worn}) == []
    old = replace(worn, evicted_at_s=(NOW_S - 86_400.0, *worn.evicted_at_s[1:]))
    assert chosen([missing("a", "j1")], {"j1": old}) == ["a"]


def test_an_evicted_owner_avoids_the_node_and_forgets_those_whose_time_is_over() -> None:
    owner = Owner(avoid_until_s={"old": NOW_S - 1.0, "n2": NOW_S + 5.0})

    after = evicted(owner, "n1", NOW_S, SETTINGS)

    assert after.avoid_until_s == {"n2": NOW_S + 5.0, "n1": NOW_S + SETTINGS.avoid_s}


@given(
    achieved=st.lists(st.floats(0, 0.29), min_size=1, max_size=40),
    owners=st.lists(st.integers(0, 10), min_size=40, max_size=40),
    running=st.integers(1, 500),
)
def test_never_more_than_the_budget_and_never_a_whole_owner_at_once(
    achieved: list[float], owners: list[int], running: int
) -> None:
    tracks = [missing(f"p{n}", f"j{owners[n]}", share) for n, share in enumerate(achieved)]

    found = choose_evictions(tracks, {}, running, NOW_S, SETTINGS)

    assert 1 <= len(found) <= max(1, int(0.05 * running))
    assert max(Counter(track.sample.owner_uid for track in found).values()) <= SETTINGS.at_once


def test_what_a_restart_must_not_forget_survives_the_status_of_the_workload() -> None:
    owner = evicted(evicted(Owner(), "n1", NOW_S, SETTINGS), "n2", NOW_S + 400.0, SETTINGS)

    status = status_of(owner, [missing("a", "j1")], {}, NOW_S + 400.0, SETTINGS)

    assert owner_of({"status": status}) == owner
    assert (status["evictions"], status["achieved"]) == (2, 0.1)


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    first = status_of(Owner(), [run([0.1])], {}, NOW_S, SETTINGS)
    second = status_of(Owner(), [run([0.1, 0.1])], first, NOW_S + 900.0, SETTINGS)
    third = status_of(Owner(), [run([0.4])], second, NOW_S + 1_800.0, SETTINGS)

    times = [status["conditions"][0]["lastTransitionTime"] for status in (first, second, third)]

    assert times[0] == times[1] != times[2]
    assert [status["conditions"][0]["status"] for status in (first, second, third)] == ["False", "False", "True"]


def test_the_worst_pod_of_an_owner_speaks_for_it() -> None:
    good = run([0.9])
    bad = replace(run([0.1]), sample=replace(FIRST, pod_uid="p2", node="n2"))

    status = status_of(Owner(), [good, bad], {}, NOW_S, SETTINGS)

    assert status["conditions"][0]["message"].startswith("n2: ")


def test_a_workload_goes_with_the_job_that_owns_its_pod() -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "name": "batch", "uid": "job-1", "controller": True}
    pod = {"metadata": {"name": "batch-x", "namespace": "lab", "uid": "p1", "ownerReferences": [job]}}

    workload = new_workload(pod, 0.3)

    assert workload["metadata"]["name"] == "owner-job-1"
    assert workload["metadata"]["ownerReferences"][0]["kind"] == "Job"
    assert workload["spec"] == {"ownerUID": "job-1", "ownerName": "batch", "kind": "batch", "sla": 0.3}


def slow(speed: float, open_share: float, **more: Any) -> Track:
    """Two windows of a job that is `speed` times as fast as its profile says while the gate is open."""
    sample = replace(FIRST, runnable_s=0.0, **more)
    track = observe(None, sample, SETTINGS)
    for _ in range(2):
        sample = replace(
            sample,
            runtime_s=sample.runtime_s + 600.0,
            demand_s=sample.demand_s + 600.0,
            runnable_s=(sample.runnable_s or 0.0) + 600.0 * open_share,
            tokens=(sample.tokens or 0.0) + 600.0 * open_share * speed * sample.standalone_tokens_per_s,
        )
        track = observe(track, sample, SETTINGS)

    return track


def test_a_tenant_s_word_never_moves_a_pod_that_was_given_what_was_promised() -> None:
    """The profile says a hundred times the speed that the job has."""
    track = slow(0.01, 0.5)

    assert track.verdict is Verdict.NODE_GAVE_ENOUGH
    assert chosen([track]) == []


@pytest.mark.parametrize(
    "track", [slow(1.0, 0.2), slow(0.01, 0.2), slow(0.5, 0.5, memory=0.4), slow(0.1, 0.9, is_measured=True)]
)
def test_a_miss_that_the_node_shows_or_valve_has_measured_moves_the_pod(track: Track) -> None:
    assert chosen([track]) == ["p1"]


def test_who_was_promised_something_goes_before_who_was_not() -> None:
    free = replace(missing("a", "j1", 0.0), sample=replace(FIRST, pod_uid="a", owner_uid="j1", sla=0.0))

    assert chosen([free, missing("b", "j2", 0.2)]) == ["b", "a"]


def without_hook(open_shares: list[float]) -> Track:
    """A pod whose engine counts no tokens, with the gate open for such shares of its windows."""
    sample = replace(FIRST, tokens=None, runnable_s=0.0)
    track = observe(None, sample, SETTINGS)
    for share in open_shares:
        sample = replace(
            sample,
            runtime_s=sample.runtime_s + 600.0,
            demand_s=sample.demand_s + 600.0,
            runnable_s=(sample.runnable_s or 0.0) + 600.0 * share,
        )
        track = observe(track, sample, SETTINGS)

    return track


@pytest.mark.parametrize(
    ("open_shares", "verdict"),
    [
        ([0.29], Verdict.MISSED),
        ([0.1, 0.1], Verdict.PERSISTENTLY_MISSED),
        ([0.31, 0.9], Verdict.NO_TOKENS),
        ([0.1, 0.9, 0.1], Verdict.MISSED),
    ],
)
def test_a_pod_that_cannot_have_had_its_sla_is_never_left_for_lack_of_tokens(
    open_shares: list[float], verdict: Verdict
) -> None:
    """At full speed whenever the gate was open it would still have missed; with more time nobody knows, so nobody says
    that it was met."""
    assert without_hook(open_shares).verdict is verdict
