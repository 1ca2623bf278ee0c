"""What of a long load is judged: its days and nights alike, and nothing that it does not hold."""

from __future__ import annotations

import numpy as np
import pytest
from valve_tools.sim.sample import SLICE_S, SLICES, sampled
from valve_tools.sim.shape import window_s
from valve_tools.sim.traces import NS, Trace

DAY_S = 86_400


def load(arrive_s: np.ndarray) -> Trace:
    count = len(arrive_s)
    return Trace(
        name="load",
        arrive_ns=(arrive_s * NS).astype(np.int64),
        in_tok=np.arange(count, dtype=np.int64),
        out_tok=np.ones(count, dtype=np.int64),
    )


def test_no_day_and_no_quarter_of_a_day_of_a_week_is_left_out():
    at_s = np.arange(0, 7 * DAY_S, 10.0)

    seen_s = at_s[sampled(load(at_s)).in_tok]

    quarters = np.bincount((seen_s // (DAY_S / 4)).astype(int), minlength=28) / (SLICE_S / 10)
    assert quarters.min() >= 8
    assert quarters.max() <= 9


@pytest.mark.parametrize("days", [1, 2, 7, 28, 30, 31])
def test_a_sample_never_falls_in_step_with_the_days(days):
    """A load that is awake for eight hours of 24: a third of the sample, whatever the load's length."""
    at_s = np.arange(0, days * DAY_S, 5.0)
    is_awake = at_s % DAY_S >= DAY_S * 2 / 3

    found = sampled(load(np.append(at_s[is_awake], days * DAY_S)))

    assert found.requests * 5 / window_s(found) == pytest.approx(1 / 3, abs=0.01)


def test_a_sample_holds_nothing_but_requests_of_the_load_in_their_order_and_at_their_distance():
    at_s = np.sort(np.random.default_rng(1).random(200_000)) * 3 * DAY_S

    found = sampled(load(at_s))

    in_slice_ns = found.arrive_ns % (SLICE_S * NS)
    together = np.diff(found.arrive_ns // (SLICE_S * NS)) == 0
    assert (np.diff(found.arrive_ns) >= 0).all()
    assert np.diff(in_slice_ns)[together] == pytest.approx(np.diff(at_s[found.in_tok])[together] * NS, abs=1000)
    assert found.duration_s < window_s(found) == SLICES * SLICE_S
    assert found.sample is not None
    assert (found.sample.of_requests, found.sample.of_s) == (200_000, pytest.approx(at_s[-1]))


def test_a_load_that_ends_within_what_is_simulated_is_never_sampled():
    short = load(np.arange(0, 21_599.0))

    assert sampled(short) is short
