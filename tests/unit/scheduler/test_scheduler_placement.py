"""Placement: each refusal has its reason, and the best place comes first."""

import numpy as np
import pytest
from fleets import FULL_MIB, NodeSpec, fleet_of
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.rank import (
    REASON_TEXT,
    Job,
    PlacementSettings,
    Reason,
    Standing,
    gpu_sets,
    rank,
    ranked_nodes,
    scores,
)

SETTINGS = PlacementSettings()
PROFILE = WorkloadProfile(
    standalone_tokens_per_s=1_000.0,
    curve=ThroughputCurve(free_mib=(0.0, 40_000.0), tokens_per_s=(0.0, 1_000.0)),
    fit_mib=20_000.0,
    gpu_model="H100",
)


def reason_for(node: NodeSpec, job: Job) -> Reason:
    fleet = fleet_of(n1=node)
    sets = gpu_sets(fleet.idle, fleet.alignment, job.gpus, SETTINGS)

    return Reason(rank(fleet, sets, job, SETTINGS).reason[0])


@pytest.mark.parametrize(
    ("node", "job", "expected"),
    [
        (NodeSpec(), Job(gpus=1), Reason.NONE),
        (NodeSpec(), Job(gpus=8, sla=0.49, profile=PROFILE), Reason.NONE),
        (NodeSpec(standing=Standing.OFF), Job(gpus=1), Reason.OFF),
        (NodeSpec(standing=Standing.STALE), Job(gpus=1), Reason.STALE),
        (NodeSpec(), Job(gpus=1, sla=0.1), Reason.PROFILE),
        (NodeSpec(gpu_model="L40S"), Job(gpus=1, profile=PROFILE), Reason.PROFILE),
        (NodeSpec(), Job(gpus=1, avoid=frozenset({"n1"})), Reason.AVOIDED),
        (NodeSpec(taken=set(range(7))), Job(gpus=2), Reason.NO_FREE_GPUS),
        (NodeSpec(gpus=2), Job(gpus=4), Reason.NO_FREE_GPUS),
        (NodeSpec(free_mib=19_000.0), Job(gpus=1, profile=PROFILE), Reason.MEMORY),
        (NodeSpec(online_peak_mib=52_500.0), Job(gpus=1, profile=PROFILE), Reason.CROWDED),
        (NodeSpec(online_peak_mib=52_000.0), Job(gpus=1, profile=PROFILE), Reason.NONE),
        (NodeSpec(online_peak_mib=52_500.0), Job(gpus=1), Reason.CROWDED),
        (NodeSpec(online_peak_mib=70_000.0, free_mib=19_000.0), Job(gpus=1, profile=PROFILE), Reason.MEMORY),
        (NodeSpec(alignment=0.79), Job(gpus=2), Reason.NOT_ALIGNED),
        (NodeSpec(idle=0.3), Job(gpus=1, sla=0.31, profile=PROFILE), Reason.SLA),
    ],
)
def test_a_node_is_refused_for_the_first_reason_that_holds(node: NodeSpec, job: Job, expected: Reason) -> None:
    assert reason_for(node, job) == expected


def test_every_reason_has_one_short_text_without_numbers() -> None:
    assert set(REASON_TEXT) == set(Reason) - {Reason.NONE}
    assert len(set(REASON_TEXT.values())) == len(REASON_TEXT) <= 9
    for text in REASON_TEXT.values():
        assert not any(character.isdigit() for character in text)


def test_a_best_effort_job_needs_no_profile() -> None:
    assert reason_for(NodeSpec(free_mib=5_000.0), Job(gpus=1)) == Reason.NONE


def test_the_idler_node_with_more_memory_comes_first_and_equals_by_name() -> None:
    fleet = fleet_of(
        busy=NodeSpec(idle=0.2),
        poor=NodeSpec(idle=0.9, free_mib=20_000.0),
        zebra=NodeSpec(idle=0.9),
        apple=NodeSpec(idle=0.9),
        off=NodeSpec(standing=Standing.OFF),
    )
    job = Job(gpus=2)

    ranking = rank(fleet, gpu_sets(fleet.idle, fleet.alignment, 2, SETTINGS), job, SETTINGS)

    assert [name for name, _ in ranked_nodes(fleet, ranking)] == ["apple", "zebra", "poor", "busy"]
    assert ranked_nodes(fleet, ranking)[0][1] == pytest.approx(0.9, abs=0.01)


def test_one_gpu_with_an_offline_job_is_passed_over_for_its_neighbour() -> None:
    fleet = fleet_of(n1=NodeSpec(taken={0}))
    sets = gpu_sets(fleet.idle, fleet.alignment, 1, SETTINGS)

    ranking = rank(fleet, sets, Job(gpus=1), SETTINGS)

    assert sets.members[ranking.set_index[0]].tolist() == [1]


def test_scores_spread_over_the_whole_range() -> None:
    assert scores(np.array([0.4, 0.2, 0.0])).tolist() == [10, 5, 0]
    assert scores(np.array([0.0])).tolist() == [0]
    assert scores(np.array([])).tolist() == []


def test_cards_of_several_sizes_are_judged_each_by_its_own() -> None:
    fleet = fleet_of(
        small=NodeSpec(full_mib=40_000.0, free_mib=40_000.0),
        large=NodeSpec(full_mib=FULL_MIB, free_mib=40_000.0),
    )
    job = Job(gpus=1)

    ranking = rank(fleet, gpu_sets(fleet.idle, fleet.alignment, 1, SETTINGS), job, SETTINGS)

    assert ranking.share[0] > ranking.share[1]  # the prior is relative: half of a card is not all of it
