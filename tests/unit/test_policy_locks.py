"""One lock for all GPUs, or one each: told by how the stops of one edge end."""

from __future__ import annotations

import pytest

from valved.policy.locks import LockState, Stop, step_locks

US = 1_000
CALL = 300 * US


def stops(edges, lag_us, late_us=20, gpus=2, first=0):
    """Edges of a service on `gpus` GPUs: entered `late_us` and done `lag_us` after one another."""
    for epoch in range(edges):
        for gpu in range(gpus):
            ioctl_ns = epoch * 100 * CALL + gpu * late_us * US
            done_ns = epoch * 100 * CALL + CALL + gpu * lag_us * US
            yield Stop(service=1, epoch=first + 2 * epoch, ioctl_ns=ioctl_ns, done_ns=done_ns)


def told(stops):
    state = LockState()
    for stop in stops:
        state = step_locks(state, stop)
    return state.is_per_gpu


@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize(("lag_us", "is_per_gpu"), [(0, True), (40, True), (290, False), (330, False)])
def test_calls_that_end_together_have_a_lock_each(gpus, lag_us, is_per_gpu):
    assert told(stops(5, lag_us, gpus=gpus)) is is_per_gpu


@pytest.mark.parametrize("edges", [0, 1, 2])
def test_a_few_edges_say_nothing(edges):
    assert told(stops(edges, 0)) is None


def test_a_call_that_was_entered_late_says_nothing():
    assert told(stops(20, 290, late_us=200)) is None


def test_stops_of_one_gpu_each_say_nothing():
    assert told(stops(20, 0, gpus=1)) is None


def test_one_sample_out_of_line_changes_nothing():
    assert told([*stops(3, 0), *stops(1, 290, first=100), *stops(3, 0, first=200)]) is True


def test_a_driver_that_is_replaced_is_told_anew():
    assert told([*stops(9, 290), *stops(9, 0, first=100)]) is True
