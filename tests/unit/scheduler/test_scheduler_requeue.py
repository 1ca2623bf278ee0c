"""Retries: however many kinds of jobs wait, a round ends in its time, and none of them is forgotten."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube.objects import node_report, pod_place
from valve_scheduler.controller.retries import ROUND_S, Retries
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.rank import Job, PlacementSettings, Reason, rank
from valve_scheduler.placement.reach import ReachVerdicts
from valve_scheduler.placement.state import ClusterState

NODES = ("n1", "n2", "n3")
PROFILE = WorkloadProfile(standalone_tokens_per_s=1.0, curve=ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,)))


def kinds(count: int) -> list[Job]:
    return [Job(gpus=1, sla=(1 + number) / 1_000, profile=PROFILE) for number in range(count)]


class Clock:
    """Each look takes so long."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s, self.looks = 0.0, step_s, 0

    def __call__(self) -> float:
        self.now_s += self.step_s
        self.looks += 1
        return self.now_s


def busy(**idle: float) -> ClusterState:
    state = ClusterState(PlacementSettings())
    for name in NODES:
        state.put_report(node_report(harvest_node(name, idle=idle.get(name, 0.0))), NOW_S)
    return state


def test_a_round_never_takes_longer_than_its_time_and_the_rest_comes_next() -> None:
    state, clock = busy(n1=1.0), Clock(0.01)
    retries, waiting = Retries(state, clock), kinds(1_000)
    asyncio.run(retries.round({"a": waiting}, NOW_S))
    per_round = clock.looks

    assert per_round <= ROUND_S / clock.step_s + 2
    for _ in range(len(waiting) // (per_round - 2) + 1):
        asyncio.run(retries.round({"a": waiting}, NOW_S))
    assert retries._seen == set(waiting)


def test_verdicts_on_what_is_out_of_reach_never_hold_up_the_loop_either() -> None:
    state, clock = busy(n1=0.5), Clock(0.01)
    reach, waiting = (
        ReachVerdicts(state, clock),
        [Job(gpus=1, sla=0.6 + n / 10_000, profile=PROFILE) for n in range(300)],
    )
    first = dict(asyncio.run(reach.of({"a": waiting}, NOW_S)))

    assert 0 < len(first) < 20
    for _ in range(40):
        known = asyncio.run(reach.of({"a": waiting}, NOW_S))
    assert set(known) == set(waiting)
    assert all(verdict is not None for verdict in known.values())


def test_the_loop_goes_on_between_two_kinds() -> None:
    state, beats = busy(n1=1.0), []

    async def heart() -> None:
        while True:
            beats.append(1)
            await asyncio.sleep(0)

    async def run() -> None:
        beating = asyncio.ensure_future(heart())
        await Retries(state, Clock(0.0)).round({"a": kinds(50)}, NOW_S)
        beating.cancel()

    asyncio.run(run())
    assert len(beats) >= 50


def test_owners_that_avoid_different_nodes_are_one_kind_and_each_gets_its_node() -> None:
    state = busy(n1=0.9, n2=0.8, n3=0.7)
    retries = Retries(state)
    waiting = [Job(gpus=1, avoid=frozenset(avoid)) for avoid in ((), ("n1",), ("n1", "n2"), NODES)]

    assert asyncio.run(retries.round({"a": waiting}, NOW_S)) == {"n1", "n2", "n3"}
    assert len(retries._taking) == 1
    assert asyncio.run(retries.round({"a": waiting}, NOW_S)) == frozenset()


step = st.tuples(st.sampled_from(NODES), st.sampled_from(["report", "hold", "release"]), st.floats(0.0, 1.0))


@given(st.lists(step, max_size=20), st.lists(st.frozensets(st.sampled_from(NODES)), min_size=1, max_size=3))
def test_no_change_for_the_better_is_missed_and_nothing_else_is_bumped(
    steps: list[tuple[str, str, float]], avoided: list[frozenset[str]]
) -> None:
    """Against the rule itself, with a fresh ranking for each job at each step."""
    state = busy()
    retries = Retries(state)
    jobs = {Job(gpus=8, sla=0.5, profile=PROFILE, avoid=avoid) for avoid in avoided}
    before: dict[Job, frozenset[str]] = {}
    for name, what, value in [("n1", "report", 0.0), *steps]:
        if what == "report":
            state.put_report(node_report(harvest_node(name, idle=value)), NOW_S)
        elif what == "hold":
            state.held.put_pod(pod_place(pod(name, node=name, held=uuids(name)[0])))
        else:
            state.held.release(f"uid-{name}")
        expected = set()
        for job in jobs:
            ranking = rank(state.fleet(NOW_S), state.sets(job.gpus), job, state.settings)
            rows = {n: state.row(n) for n in NODES}
            taking = {n: float(ranking.share[row]) for n, row in rows.items() if ranking.reason[row] == Reason.NONE}
            fresh = taking.keys() - before.get(job, frozenset())
            expected |= set(sorted(fresh, key=lambda n: (-taking[n], n))[:1])
            before[job] = frozenset(taking)

        assert asyncio.run(retries.round({"a": jobs}, NOW_S)) == expected


@pytest.mark.parametrize("count", [1, 700])
def test_what_is_forgotten_is_told_again(count: int) -> None:
    state = busy(n2=1.0)
    retries, waiting = Retries(state, Clock(0.0)), kinds(count)
    assert asyncio.run(retries.round({"a": waiting}, NOW_S)) == {"n2"}
    retries.forget()

    assert asyncio.run(retries.round({"a": waiting}, NOW_S)) == {"n2"}


@pytest.mark.parametrize("what", ["retries", "verdicts"])
def test_a_tenant_with_many_kinds_of_jobs_never_keeps_those_of_another_from_being_looked_at(what: str) -> None:
    """Its pods say another SLA each second, so they are always new; what is new came first."""
    state, clock = busy(n1=0.5), Clock(0.01)
    retries, reach, honest = Retries(state, clock), ReachVerdicts(state, clock), Job(gpus=1, sla=0.9, profile=PROFILE)
    looked = set[Job]()
    for number in range(20):
        news = [Job(gpus=1, sla=0.5 + (number * 100 + n) / 10_000, profile=PROFILE) for n in range(100)]
        jobs = {"hostile": news, "honest": [honest]} if number else {"hostile": news}
        if what == "retries":
            asyncio.run(retries.round(jobs, NOW_S))
            looked |= retries._seen
        else:
            looked |= asyncio.run(reach.of(jobs, NOW_S)).keys()
        assert (honest in looked) == bool(number)
