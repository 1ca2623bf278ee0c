"""An SLA that no node could ever keep is told from one that the fleet is too busy for, and from one that only waits."""

from typing import Any

import pytest
from reports import NOW_S, harvest_node, uuids
from valve_kube.objects import PodPlace, node_report
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.rank import Job, PlacementSettings
from valve_scheduler.placement.reach import NEVER, PEAKS, TOO_BUSY, Beyond, beyond
from valve_scheduler.placement.state import ClusterState

Json = dict[str, Any]


def profile(fit_mib: float = 0.0, gpu_model: str = "H100", short: bool = False) -> WorkloadProfile:
    """`short`: its speed was measured with more memory than a card of 80,000 MiB has."""
    points = ((0.0, 0.0), (160_000.0, 100.0)) if short else ((0.0, 100.0),)
    free, speed = zip(*points, strict=True)
    return WorkloadProfile(
        standalone_tokens_per_s=100.0,
        curve=ThroughputCurve(free_mib=free, tokens_per_s=speed),
        fit_mib=fit_mib,
        gpu_model=gpu_model,
    )


def asked(job: Job, *nodes: Json, held: bool = False) -> Beyond | None:
    state = ClusterState(PlacementSettings())
    for node in nodes:
        state.put_report(node_report(node), NOW_S)
    if held:
        name = nodes[0]["metadata"]["name"]
        state.held.put_pod(PodPlace(uid="other", node=name, gpu_uuids=tuple(uuids(name)), finished=False))

    return beyond(state.open_fleet(NOW_S), state.sets(job.gpus), job, state.settings)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(gpus=1, sla=0.3, profile=profile(gpu_model="B200")), "no node reports the GPU model of its profile, B200"),
        (Job(gpus=4, sla=0.3, profile=profile()), "no node of its GPU model has 4 GPUs"),
        (Job(gpus=1, sla=0.3, profile=profile(fit_mib=90_000)), "no 1 GPUs of a node hold the job"),
    ],
)
def test_what_no_card_is_up_to_is_never(job: Job, text: str) -> None:
    found = asked(job, harvest_node(cards=2))

    assert found is not None
    assert (found.reason, text in found.message) == (NEVER, True)


def test_a_share_that_no_idle_card_gives_is_never() -> None:
    """The bins of memory have centres: with nothing else on the card a little less than all of it counts."""
    found = asked(Job(gpus=1, sla=1.0, profile=profile(short=True)), harvest_node(idle=0.9))

    assert found == Beyond(
        reason=NEVER, message="even idle and empty the best node gives 0.98 (n1); the job asks for 1.00"
    )


def test_a_fleet_that_is_too_busy_says_what_it_could_give() -> None:
    found = asked(Job(gpus=1, sla=0.8, profile=profile()), harvest_node("n1", idle=0.5), harvest_node("n2", idle=0.6))

    assert found is not None
    assert found.reason == TOO_BUSY
    assert "the best is 0.60 on n2" in found.message


@pytest.mark.parametrize(
    "how",
    [
        {"phase": "Observing"},
        {"age_s": 9_000.0},
    ],
)
def test_a_node_that_is_off_or_silent_now_could_still(how: Json) -> None:
    assert asked(Job(gpus=1, sla=0.4, profile=profile()), harvest_node(**how)) is None


def test_gpus_that_other_jobs_have_come_free_again() -> None:
    assert asked(Job(gpus=1, sla=0.4, profile=profile()), harvest_node(), held=True) is None


@pytest.mark.parametrize("job", [Job(gpus=8), Job(gpus=1, sla=0.9)])
def test_best_effort_and_a_missing_profile_are_nothing_of_it(job: Job) -> None:
    assert asked(job, harvest_node(idle=0.1, cards=1)) is None


def test_an_empty_fleet_says_nothing() -> None:
    assert asked(Job(gpus=1, sla=0.9, profile=profile())) is None


def peaking(name: str = "n1", idle: float = 0.95) -> Json:
    """Its online work uses a card nearly whole now and then."""
    node = harvest_node(name, idle=idle)
    for gpu in node["status"]["gpus"]:
        gpu["onlineMemory"] = {"24h": [0.0] * 29 + [1.0, 0.0, 0.0]}
    return node


def test_a_job_that_online_peaks_leave_no_memory_is_never_told_to_ask_for_less_throughput() -> None:
    found = asked(Job(gpus=1, sla=0.4, profile=profile(fit_mib=10_000)), peaking())

    assert found is not None
    assert (found.reason, "FleetTooBusy" in found.message, "nothing" in found.message) == (PEAKS, False, False)
    assert "on n1 online work uses up to" in found.message
    assert "allowCrowded" in found.message


def test_a_fleet_that_is_too_busy_even_without_its_peaks_never_blames_memory() -> None:
    found = asked(Job(gpus=1, sla=0.8, profile=profile(fit_mib=10_000)), peaking(idle=0.5))

    assert found is not None
    assert found.reason == TOO_BUSY


def test_the_node_that_is_named_for_its_peaks_is_never_one_that_is_too_busy_anyway() -> None:
    found = asked(Job(gpus=1, sla=0.8, profile=profile(fit_mib=10_000)), peaking("n1", idle=0.1), peaking("n2"))

    assert found is not None
    assert found.message.startswith("on n2 ")
