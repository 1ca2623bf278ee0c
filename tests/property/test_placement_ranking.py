"""Placement keeps its rules for any fleet: no unaligned, taken or unreported GPU is ever given."""

from dataclasses import replace

import numpy as np
from fleets import FULL_MIB
from hypothesis import given
from hypothesis import strategies as st
from valve_scheduler.model import MAX_GPUS, ThroughputCurve, WorkloadProfile, free_histogram, pair_alignment
from valve_scheduler.placement.rank import (
    Fleet,
    Job,
    PlacementSettings,
    Ranking,
    Reason,
    Standing,
    gpu_sets,
    rank,
)

SETTINGS = PlacementSettings()
PROFILE = WorkloadProfile(
    standalone_tokens_per_s=1.0,
    curve=ThroughputCurve(free_mib=(0.0, FULL_MIB), tokens_per_s=(0.1, 1.0)),
    fit_mib=10_000.0,
)
jobs = st.builds(
    Job,
    gpus=st.integers(1, MAX_GPUS),
    sla=st.sampled_from([0.0, 0.1, 0.5]),
    profile=st.sampled_from([None, PROFILE]),
    avoid=st.frozensets(st.sampled_from([f"n{row}" for row in range(12)]), max_size=3),
)


def random_fleet(seed: int, nodes: int = 12) -> Fleet:
    random = np.random.default_rng(seed)
    busy = random.random((nodes, 60, 1)) < random.random((nodes, 1, 1))
    own = random.random((nodes, 60, MAX_GPUS)) < 0.1 * random.random((nodes, 1, 1))
    busy = busy | own
    free = random.random((nodes, MAX_GPUS, 20)) * FULL_MIB

    return Fleet(
        names=[f"n{row}" for row in range(nodes)],
        standing=random.choice(list(Standing), nodes, p=[0.8, 0.1, 0.1]).astype(np.int8),
        gpu_model=np.array(["H100"] * nodes),
        full_mib=np.full(nodes, FULL_MIB),
        idle=1.0 - busy.mean(axis=1),
        histogram=np.array([[free_histogram(gpu, FULL_MIB) for gpu in node] for node in free]),
        online_peak=random.choice([0.0, 0.5, 0.7, 0.9], (nodes, MAX_GPUS)) * FULL_MIB,
        alignment=pair_alignment(busy),
        open_gpus=random.random((nodes, MAX_GPUS)) < 0.8,
    )


def ranking_of(fleet: Fleet, job: Job) -> Ranking:
    return rank(fleet, gpu_sets(fleet.idle, fleet.alignment, job.gpus, SETTINGS), job, SETTINGS)


@given(seed=st.integers(0, 2**32), job=jobs)
def test_a_given_set_is_open_aligned_and_meets_the_sla(seed: int, job: Job) -> None:
    fleet = random_fleet(seed)
    members = gpu_sets(fleet.idle, fleet.alignment, job.gpus, SETTINGS).members

    ranking = ranking_of(fleet, job)

    for row in np.flatnonzero(ranking.reason == Reason.NONE):
        gpus = members[ranking.set_index[row]]
        assert fleet.open_gpus[row, gpus].all()
        assert fleet.alignment[row][np.ix_(gpus, gpus)].min() >= SETTINGS.theta or job.gpus == 1
        held = job.profile.fit_mib if job.profile else FULL_MIB / 4
        assert fleet.online_peak[row, gpus].max() + held <= 0.9 * FULL_MIB or not fleet.online_peak[row, gpus].any()
        assert fleet.standing[row] == Standing.HARVESTING
        assert fleet.names[row] not in job.avoid
        assert ranking.share[row] >= job.sla


@given(seed=st.integers(0, 2**32), job=jobs)
def test_a_fleet_that_reports_no_peaks_is_never_judged_by_them(seed: int, job: Job) -> None:
    """Reports of a former release, and the fleets of the lab."""
    fleet = random_fleet(seed)
    silent = replace(fleet, online_peak=np.zeros_like(fleet.online_peak))

    ranking = ranking_of(silent, job)

    assert Reason.CROWDED not in ranking.reason
    assert (ranking.share >= ranking_of(fleet, job).share).all()


@given(seed=st.integers(0, 2**32), job=jobs)
def test_every_node_has_either_a_set_or_a_reason(seed: int, job: Job) -> None:
    ranking = ranking_of(random_fleet(seed), job)

    assert np.array_equal(ranking.set_index >= 0, ranking.reason == Reason.NONE)
    assert np.all(ranking.share[ranking.reason != Reason.NONE] == 0)


@given(seed=st.integers(0, 2**32), job=jobs, order_seed=st.integers(0, 100))
def test_the_order_of_nodes_does_not_matter(seed: int, job: Job, order_seed: int) -> None:
    fleet = random_fleet(seed)
    order = np.random.default_rng(order_seed).permutation(len(fleet.names))
    shuffled = Fleet(
        names=[fleet.names[row] for row in order],
        standing=fleet.standing[order],
        gpu_model=fleet.gpu_model[order],
        full_mib=fleet.full_mib[order],
        idle=fleet.idle[order],
        histogram=fleet.histogram[order],
        online_peak=fleet.online_peak[order],
        alignment=fleet.alignment[order],
        open_gpus=fleet.open_gpus[order],
    )

    straight, permuted = ranking_of(fleet, job), ranking_of(shuffled, job)

    assert np.array_equal(straight.reason[order], permuted.reason)
    assert np.array_equal(straight.set_index[order], permuted.set_index)


@given(seed=st.integers(0, 2**32), job=jobs)
def test_opening_a_gpu_never_lowers_a_share(seed: int, job: Job) -> None:
    fleet = random_fleet(seed)
    opened = Fleet(
        names=fleet.names,
        standing=fleet.standing,
        gpu_model=fleet.gpu_model,
        full_mib=fleet.full_mib,
        idle=fleet.idle,
        histogram=fleet.histogram,
        online_peak=fleet.online_peak,
        alignment=fleet.alignment,
        open_gpus=np.ones_like(fleet.open_gpus),
    )

    assert np.all(ranking_of(opened, job).share >= ranking_of(fleet, job).share)
