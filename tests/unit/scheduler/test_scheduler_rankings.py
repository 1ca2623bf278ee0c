"""A kept ranking that is brought up to date equals one made anew, whatever happened between."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube.objects import node_report, pod_place
from valve_scheduler.placement.rank import Job, PlacementSettings, rank
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.state import STALE_AFTER_S, ClusterState

NODES = [f"n{number}" for number in range(4)]
JOBS = [Job(gpus=1), Job(gpus=2), Job(gpus=1, avoid=frozenset({"n1"}))]

node = st.sampled_from(NODES)
step = st.one_of(
    st.tuples(st.just("report"), node, st.floats(0.1, 0.9)),
    st.tuples(st.just("drop"), node),
    st.tuples(st.just("bind"), node, st.integers(0, 7)),
    st.tuples(st.just("release"), node, st.integers(0, 7)),
    st.tuples(st.just("wait"), st.floats(1.0, STALE_AFTER_S)),
    st.tuples(st.just("ask"), st.sampled_from(JOBS)),
)


@given(st.lists(step, max_size=40))
def test_a_kept_ranking_equals_a_fresh_one(steps: list[Any]) -> None:
    state, now_s = ClusterState(PlacementSettings(), capacity=2), NOW_S
    rankings = Rankings(state)
    for what, *more in [*steps, *(("ask", job) for job in JOBS)]:
        if what == "wait":
            now_s += more[0]
        elif what == "ask":
            check(state, rankings, more[0], now_s)
        else:
            change(state, what, *more)


def change(state: ClusterState, what: str, name: str, value: float = 0.0) -> None:
    if what == "report":
        state.put_report(node_report(harvest_node(name, idle=value)), NOW_S)
    elif what == "drop":
        state.drop_report(name)
    elif what == "bind":
        held = uuids(name)[int(value)]
        state.held.put_pod(pod_place(pod(f"{name}-{int(value)}", node=name, held=held)))
    else:
        state.held.release(f"uid-{name}-{int(value)}")


def check(state: ClusterState, rankings: Rankings, job: Job, now_s: float) -> None:
    kept = rankings.of(job, now_s)
    fresh = rank(state.fleet(now_s), state.sets(job.gpus), job, state.settings)
    for field in ("share", "set_index", "reason"):
        np.testing.assert_array_equal(getattr(kept, field), getattr(fresh, field), err_msg=field)


def test_a_change_of_one_node_is_judged_without_the_others() -> None:
    state = ClusterState(PlacementSettings())
    for name in NODES:
        state.put_report(node_report(harvest_node(name)), NOW_S)
    before = state.generation

    state.held.put_pod(pod_place(pod("p", node="n2", held=uuids("n2")[0])))

    assert np.flatnonzero(state.changed_since(before)).tolist() == state.rows(["n2"]).tolist()
