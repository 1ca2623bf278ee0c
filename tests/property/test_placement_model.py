"""The throughput model keeps its promises for any fleet: bounds, monotony, order of reports."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from valve_scheduler.model import (
    HISTOGRAM_BINS,
    MAX_GPUS,
    ThroughputCurve,
    WorkloadProfile,
    admitted_sets,
    best_sets,
    free_histogram,
    memory_factor,
    memory_weights,
    pair_alignment,
    prior_profile,
    runnable_share,
    set_members,
    set_throughput,
)

FULL_MIB = 81_920.0
sizes = st.integers(1, MAX_GPUS)
shares = st.floats(0, 1, width=32)
busy_masks = hnp.arrays(np.bool_, st.tuples(st.integers(1, 40), st.just(MAX_GPUS)))
free_samples = hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(0, FULL_MIB))


@st.composite
def profiles(draw: st.DrawFn) -> WorkloadProfile:
    points = draw(st.integers(1, 6))
    free = sorted(draw(st.sets(st.integers(0, 81_920), min_size=points, max_size=points)))
    tokens = sorted(draw(st.lists(st.floats(1, 1e4), min_size=points, max_size=points)))

    return WorkloadProfile(
        standalone_tokens_per_s=tokens[-1],
        curve=ThroughputCurve(free_mib=tuple(map(float, free)), tokens_per_s=tuple(tokens)),
        need_mib=draw(st.floats(0, FULL_MIB)),
        deficit_cost=draw(st.floats(0, 2)),
    )


def measured(busy: NDArray[np.bool_], size: int) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """What the node would report of these samples, and the true runnable share of every set."""
    members = set_members(size)
    predicted = runnable_share(1.0 - busy.mean(axis=0), pair_alignment(busy), members)
    true = 1.0 - busy[:, members].any(axis=-1).mean(axis=0)

    return predicted, true


@given(busy=busy_masks, size=sizes)
def test_a_set_is_never_promised_more_time_than_it_really_has(busy: NDArray[np.bool_], size: int) -> None:
    predicted, true = measured(busy, size)

    assert np.all(predicted <= true + 1e-9)


@given(busy=busy_masks, size=st.integers(1, 2))
def test_one_and_two_gpus_are_predicted_exactly(busy: NDArray[np.bool_], size: int) -> None:
    predicted, true = measured(busy, size)

    assert predicted == pytest.approx(true, abs=1e-9)


@given(series=hnp.arrays(np.bool_, st.integers(1, 40)), size=sizes)
def test_gpus_that_move_together_are_predicted_exactly(series: NDArray[np.bool_], size: int) -> None:
    busy = np.repeat(series[:, None], MAX_GPUS, axis=1)

    predicted, true = measured(busy, size)

    assert predicted == pytest.approx(true, abs=1e-9)
    assert admitted_sets(pair_alignment(busy), set_members(size), 1.0).all()


@given(busy=busy_masks, extra=st.integers(1, 40), size=sizes)
def test_more_idle_time_never_lowers_the_runnable_share(busy: NDArray[np.bool_], extra: int, size: int) -> None:
    quieter = np.concatenate([busy, np.zeros((extra, MAX_GPUS), dtype=np.bool_)])

    before, _ = measured(busy, size)
    after, _ = measured(quieter, size)

    assert np.all(after >= before - 1e-9)


@given(busy=busy_masks, seed=st.integers(0, 2**31), size=sizes)
def test_the_order_of_samples_does_not_matter(busy: NDArray[np.bool_], seed: int, size: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(busy, axis=0)

    assert measured(shuffled, size)[0] == pytest.approx(measured(busy, size)[0], abs=1e-9)


@given(
    alignment=hnp.arrays(np.float64, (MAX_GPUS, MAX_GPUS), elements=st.floats(0, 1)),
    size=st.integers(2, MAX_GPUS),
    theta=st.floats(0, 1),
)
def test_no_admitted_set_has_a_pair_below_the_threshold(
    alignment: NDArray[np.floating], size: int, theta: float
) -> None:
    alignment = np.minimum(alignment, alignment.T)
    members = set_members(size)

    for gpus in members[admitted_sets(alignment, members, theta)]:
        assert min(alignment[i, j] for i in gpus for j in gpus if i < j) >= theta


@given(profile=profiles(), free=free_samples)
def test_the_memory_factor_stays_between_nothing_and_all(profile: WorkloadProfile, free: NDArray[np.floating]) -> None:
    factor = memory_factor(free_histogram(free, FULL_MIB), memory_weights(profile, FULL_MIB))

    assert 0.0 <= factor <= 1.0


@given(profile=profiles(), free=free_samples, more=st.floats(0, FULL_MIB))
def test_more_free_memory_never_lowers_the_memory_factor(
    profile: WorkloadProfile, free: NDArray[np.floating], more: float
) -> None:
    weights = memory_weights(profile, FULL_MIB)
    richer = np.minimum(free + more, FULL_MIB)

    before = memory_factor(free_histogram(free, FULL_MIB), weights)
    after = memory_factor(free_histogram(richer, FULL_MIB), weights)

    assert after >= before - 1e-9


@given(
    runnable=hnp.arrays(np.float64, (3, 70), elements=shares),
    memory=hnp.arrays(np.float64, (3, MAX_GPUS), elements=shares),
    allowed=hnp.arrays(np.bool_, (3, 70)),
)
def test_the_best_set_is_allowed_and_no_allowed_set_is_better(
    runnable: NDArray[np.floating], memory: NDArray[np.floating], allowed: NDArray[np.bool_]
) -> None:
    members = set_members(4)
    share = set_throughput(runnable, memory, members)

    choice = best_sets(share, allowed)

    for node in range(3):
        chosen = int(choice.set_index[node])
        if not allowed[node].any():
            assert (chosen, choice.share[node]) == (-1, 0.0)
            continue
        assert allowed[node, chosen]
        assert choice.share[node] == share[node][allowed[node]].max()
        assert choice.share[node] == runnable[node, chosen] * memory[node, members[chosen]].min()


def test_full_memory_costs_nothing_under_the_prior() -> None:
    histogram = np.zeros(HISTOGRAM_BINS)
    histogram[-1] = 1.0

    factor = memory_factor(histogram, memory_weights(prior_profile(FULL_MIB), FULL_MIB))

    assert factor == pytest.approx(1.0, abs=0.01)


@given(size=st.one_of(st.integers(max_value=0), st.integers(min_value=MAX_GPUS + 1)))
def test_a_set_larger_than_a_node_is_refused_by_name(size: int) -> None:
    with pytest.raises(ValueError, match=f"gpu_count is {size}"):
        set_members(size)


def test_the_order_of_reports_does_not_matter() -> None:
    """A node's figures depend on its own row only."""
    random = np.random.default_rng(7)
    idle = random.random((20, MAX_GPUS))
    busy = random.random((20, 50, MAX_GPUS)) < 0.4
    order = random.permutation(20)
    members = set_members(4)

    whole = runnable_share(idle, pair_alignment(busy), members)

    assert np.array_equal(whole[order], runnable_share(idle[order], pair_alignment(busy[order]), members))
