"""The throughput model on cases small enough to work out by hand."""

import numpy as np
import pytest
from valve_scheduler.model import (
    ThroughputCurve,
    WorkloadProfile,
    fits_share,
    free_histogram,
    idle_share,
    memory_factor,
    memory_weights,
    pair_alignment,
    runnable_share,
    set_members,
)

FULL_MIB = 32_000.0  # bins of 1,000 MiB


def profile(*, need_mib: float = 0.0, deficit_cost: float = 0.0) -> WorkloadProfile:
    curve = ThroughputCurve(free_mib=(10_500.0, 31_500.0), tokens_per_s=(400.0, 1_000.0))
    return WorkloadProfile(standalone_tokens_per_s=1_000.0, curve=curve, need_mib=need_mib, deficit_cost=deficit_cost)


def test_the_memory_factor_is_the_time_mean_of_the_curve() -> None:
    histogram = free_histogram(np.array([31_600.0, 10_200.0]), FULL_MIB)  # centres 31,500 and 10,500

    assert memory_factor(histogram, memory_weights(profile(), FULL_MIB)) == pytest.approx(0.7)


def test_below_the_first_measured_point_nothing_is_promised() -> None:
    histogram = free_histogram(np.array([2_000.0]), FULL_MIB)

    assert memory_factor(histogram, memory_weights(profile(), FULL_MIB)) == 0.0


def test_a_missing_working_set_costs_its_share_times_kappa() -> None:
    histogram = free_histogram(np.array([10_200.0]), FULL_MIB)
    short = profile(need_mib=21_000.0, deficit_cost=0.2)

    assert memory_factor(histogram, memory_weights(short, FULL_MIB)) == pytest.approx(0.4 - 0.2 * 0.5)


def test_a_card_too_small_for_every_measured_point_yields_nothing() -> None:
    histogram = free_histogram(np.array([8_000.0]), 8_000.0)

    assert memory_factor(histogram, memory_weights(profile(), 8_000.0)) == 0.0


def test_samples_are_weighted_by_their_time() -> None:
    histogram = free_histogram(np.array([500.0, 31_500.0]), FULL_MIB, weights=np.array([3.0, 1.0]))

    assert (histogram[0], histogram[31]) == (0.75, 0.25)


def test_fitting_counts_only_bins_that_are_surely_large_enough() -> None:
    histogram = free_histogram(np.array([9_500.0, 10_500.0, 20_000.0, 31_000.0]), FULL_MIB)

    assert fits_share(histogram, 10_500.0, FULL_MIB) == pytest.approx(0.5)
    assert fits_share(histogram, 0.0, FULL_MIB) == pytest.approx(1.0)


def test_two_gpus_busy_half_the_time_in_turn_leave_no_time() -> None:
    busy = np.zeros((10, 8), dtype=np.bool_)
    busy[:5, 0] = True
    busy[5:, 1] = True
    alignment = pair_alignment(busy)

    assert alignment[0, 1] == 0.0
    assert alignment[2, 3] == 1.0  # both always idle
    assert runnable_share(1.0 - busy.mean(axis=0), alignment, set_members(2))[0] == pytest.approx(0.0)


def test_a_report_that_contradicts_itself_stays_within_bounds() -> None:
    idle = np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # fully aligned with a GPU that is never busy?

    share = runnable_share(idle, np.ones((8, 8)), set_members(8))

    assert share == pytest.approx([0.0])


def test_idle_share_of_an_empty_window_is_nothing() -> None:
    shares = idle_share(np.array([5.0, 5.0, 9.0]), np.array([10.0, 0.0, 8.0]))

    assert shares.tolist() == [0.5, 0.0, 1.0]


@pytest.mark.parametrize(
    ("free_mib", "tokens_per_s", "message"),
    [
        ((), (), "at least one"),
        ((1.0, 2.0), (1.0,), "2 memory and 1 throughput"),
        ((2.0, 1.0), (1.0, 2.0), "must rise"),
        ((1.0, 2.0), (2.0, 1.0), "must rise"),
        ((1.0,), (0.0,), "the last throughput > 0"),
        ((-1.0,), (1.0,), ">= 0"),
        ((float("nan"),), (1.0,), "finite"),
    ],
)
def test_a_curve_that_cannot_be_one_is_refused(
    free_mib: tuple[float, ...], tokens_per_s: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputCurve(free_mib=free_mib, tokens_per_s=tokens_per_s)


@pytest.mark.parametrize("field", ["need_mib", "deficit_cost"])
@pytest.mark.parametrize("value", [-1.0, float("inf")])
def test_a_profile_with_an_impossible_figure_names_it(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        profile(**{field: value})
