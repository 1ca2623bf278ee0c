"""How far a forecast is believed that rests on a short history: what nodes report through the filter and `explain`."""

from pathlib import Path
from typing import Any

import pytest
from controller_world import World as ControllerWorld
from controller_world import refused_pod
from reports import NOW_S, harvest_node, pod
from valve_kube import names
from valve_kube.objects import node_report
from valve_scheduler.extender.decide import Extender
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.explain import explain
from valve_scheduler.placement.rank import REASON_TEXT, Job, PlacementSettings, Reason
from valve_scheduler.placement.reach import beyond
from valve_scheduler.placement.state import ClusterState

from valved.kube import seriesfile
from valved.kube.series import NodeSeries

Json = dict[str, Any]
TOO_YOUNG = "valve: the node has not been observed for long enough to promise an SLA"
PROFILE = WorkloadProfile(
    standalone_tokens_per_s=1.0, curve=ThroughputCurve(free_mib=(0.0,), tokens_per_s=(1.0,)), fit_mib=1_000.0
)


def seen(*spans_s: tuple[int, int], idle: float = 1.0, into: NodeSeries | None = None) -> NodeSeries:
    """A GPU that was observed from one second to another, and left that share of the time by online work."""
    series = into or NodeSeries(1)
    for begin, end in spans_s:
        for second in range(begin, end, 10):
            series.book(second, [10.0], [10.0 * idle])
    return series


def reported(series: NodeSeries) -> Json:
    """As the node's own status says it."""
    told = harvest_node("n1", cards=1)
    told["status"]["gpus"][0] |= {
        "idle": dict(series.windows(0)),
        "observedSeconds": round(series.seen_s(0, 86_400)),
        "observedHourSeconds": round(series.seen_s(0, 3_600)),
    }
    return told


class World:
    def __init__(self, *nodes: Json) -> None:
        self.state = ClusterState(PlacementSettings())
        self.state.asked.put_profile("default", "m", PROFILE)
        self.names = [node["metadata"]["name"] for node in nodes]
        for node in nodes:
            self.state.put_report(node_report(node), NOW_S)
        self.extender = Extender(self.state, None, now_s=lambda: NOW_S, can_answer=lambda: True)  # type: ignore[arg-type]

    def filter(self, asks: Json) -> Json:
        answer = self.extender.filter({"Pod": asks, "Nodes": None, "NodeNames": self.names})
        self.state.held.unreserve(asks["metadata"]["uid"])
        return answer

    def takes(self, asks: Json) -> bool:
        """What the filter says, and `explain` says the same."""
        passed, told = bool(self.filter(asks)["NodeNames"]), explain(self.state, asks, NOW_S)

        assert told.state == ("placeable" if passed else "unplaceable")
        return passed


def asking(sla: str) -> Json:
    return pod(annotations={names.SLA: sla, names.PROFILE: "m"} if sla else {})


@pytest.mark.parametrize("age_s", [10, 60, 300, 590])
def test_an_sla_is_never_promised_by_a_node_s_first_minutes(age_s: int) -> None:
    world = World(reported(seen((0, age_s))))

    refused = world.filter(asking("0.1"))

    assert refused["NodeNames"] == []
    assert refused["FailedAndUnresolvableNodes"] == {"n1": TOO_YOUNG}
    told = explain(world.state, asking("0.1"), NOW_S)
    assert [(one.text, one.nodes) for one in told.refusals] == [(TOO_YOUNG, 1)]
    assert [one.history for one in told.windows] == [f"observed for {age_s / 60:.0f} min, too short for an SLA"]
    assert told.advice == ""


def test_a_pod_without_an_sla_never_waits_for_history() -> None:
    assert World(reported(seen((0, 10)))).takes(asking(""))


@pytest.mark.parametrize("age_s", [600, 900, 1500, 2400, 3300])
@pytest.mark.parametrize("idle", [0.5, 1.0])
def test_a_promise_is_never_more_than_what_was_seen_of_an_hour(age_s: int, idle: float) -> None:
    rests_s = age_s if age_s > 1800 else 600  # before half an hour the forecast is that of the last ten minutes
    world, most = World(reported(seen((0, age_s), idle=idle))), idle * rests_s / 3600

    assert not world.takes(asking(f"{most + 0.01:.3f}"))
    assert world.takes(asking(f"{most - 0.03:.3f}"))
    told = explain(world.state, asking(f"{most + 0.01:.3f}"), NOW_S)
    assert told.advice.startswith(f"the best that can be promised now is {most:.2f} on n1")
    assert [one.history for one in told.windows] == [
        f"observed for {rests_s / 60:.0f} min, an SLA counts on {rests_s / 3600:.0%} of that"
    ]


def test_an_hour_of_history_is_believed_as_it_is() -> None:
    world = World(reported(seen((0, 3600), idle=0.6)))

    assert world.takes(asking("0.58"))
    assert [one.history for one in explain(world.state, asking("0.58"), NOW_S).windows] == [""]


def test_history_that_a_restart_kept_is_never_asked_for_again(tmp_path: Path) -> None:
    before, after = seen((0, 3000)), NodeSeries(1)
    seriesfile.write(tmp_path / "s", before.saved(), "boot", ["a"])
    assert seriesfile.read(tmp_path / "s", after, "boot", ["a"], 3_020.0) == ""

    assert World(reported(seen((3_020, 3_080), into=after))).takes(asking("0.8"))


def test_a_node_that_lost_its_history_is_new() -> None:
    assert not World(reported(seen((3_020, 3_080)))).takes(asking("0.1"))


def test_history_of_hours_ago_never_vouches_for_the_first_minute_after_a_silence() -> None:
    """Three hours in the morning, nothing till the evening: no window but the last minute is reported."""
    series = seen((0, 10_800), (30_000, 30_060))

    assert World(reported(series)).filter(asking("0.1"))["FailedAndUnresolvableNodes"] == {"n1": TOO_YOUNG}


@pytest.mark.parametrize("back_s", [310, 900, 1_860, 3_000])
def test_history_of_hours_ago_never_vouches_for_what_is_seen_after_a_silence(back_s: int) -> None:
    """Two hours in the morning, all idle; then six hours of silence."""
    world = World(reported(seen((0, 7_200), (30_000, 30_000 + back_s))))

    assert not world.takes(asking(f"{back_s / 3600 + 0.01:.3f}"))


def test_the_first_ten_minutes_never_pass_for_as_idle_as_the_next_ten() -> None:
    """Busy, then idle: half of what was seen of the hour was idle."""
    series = seen((600, 1_200), into=seen((0, 600), idle=0.0))

    assert not World(reported(series)).takes(asking("0.18"))


@pytest.mark.parametrize(
    ("windows", "most"), [(["1m"], 0.0), (["10m"], 1 / 6), (["10m", "1h"], 0.5), (["1h", "24h"], 1.0)]
)
def test_a_report_without_its_history_never_counts_for_more_than_its_windows_need(
    windows: list[str], most: float
) -> None:
    """A daemon of a former release, which may have reported seconds as an hour."""
    node = harvest_node("n1", cards=1)
    (gpu,) = node["status"]["gpus"]
    del gpu["observedSeconds"], gpu["observedHourSeconds"]
    gpu["idle"] = dict.fromkeys(windows, 1.0)

    assert World(node).takes(asking(f"{most + 0.01:.2f}" if most < 1 else "1.0")) == (most == 1)
    gpu["observedSeconds"] = 86_400  # of the release between, which does not tell of the hour
    assert World(node).takes(asking(f"{most + 0.01:.2f}" if most < 1 else "1.0")) == (most == 1)


def test_a_pause_of_an_hour_never_makes_a_node_of_a_day_young() -> None:
    series = seen((0, 50_000), (53_600, 53_660), idle=0.7)

    assert World(reported(series)).takes(asking("0.6"))


def test_the_youngest_gpu_of_a_set_decides() -> None:
    node = harvest_node("n1", cards=2)
    for gpu, observed_s in zip(node["status"]["gpus"], (86_400, 1_800), strict=True):
        told = {"observedSeconds": observed_s, "observedHourSeconds": min(observed_s, 3_600)}
        gpu |= {"idle": {"10m": 1.0, "1h": 1.0}, **told}
    world = World(node)
    pair = pod(gpus=2, annotations={names.SLA: "0.6", names.PROFILE: "m"})

    assert world.takes(asking("0.9"))
    assert not world.takes(pair)


def two_gpus(*told: tuple[dict[str, float], float, bool]) -> World:
    """Idle shares, time observed and whether it is harvestable, of each."""
    node = harvest_node("n1", cards=2)
    for gpu, (idle, observed_s, is_open) in zip(node["status"]["gpus"], told, strict=True):
        gpu |= {"idle": idle, "observedSeconds": observed_s, "harvestable": is_open}
    return World(node)


OLD, YOUNG = ({"10m": 1.0, "1h": 0.5, "24h": 0.5}, 80_000.0), ({"1m": 1.0}, 120.0)


def test_explain_never_tells_of_the_history_of_a_gpu_that_the_pod_would_not_get() -> None:
    for young in ((*YOUNG, False), (*YOUNG, True)):
        world = two_gpus((*OLD, True), young)
        assert world.takes(asking("0.3"))
        for sla in ("0.3", "0.9"):
            assert [one.history for one in explain(world.state, asking(sla), NOW_S).windows] == [""]


def test_a_closed_gpu_never_vouches_for_one_that_is_open() -> None:
    world = two_gpus((*YOUNG, True), (*OLD, False))

    assert world.filter(asking("0.1"))["FailedAndUnresolvableNodes"] == {"n1": TOO_YOUNG}
    told = explain(world.state, asking("0.1"), NOW_S)
    assert [(one.text, one.nodes) for one in told.refusals] == [(TOO_YOUNG, 1)]


def test_no_node_is_called_young_for_a_set_that_could_be_another() -> None:
    """One GPU of the pair is young, so the pair is; a pod with one GPU gets the other."""
    world = two_gpus((*YOUNG, True), (*OLD, True))
    pair = pod(gpus=2, annotations={names.SLA: "0.1", names.PROFILE: "m"})

    assert world.filter(pair)["FailedAndUnresolvableNodes"] == {"n1": TOO_YOUNG}
    assert world.filter(asking("0.9"))["FailedAndUnresolvableNodes"] == {"n1": REASON_TEXT[Reason.SLA]}


def test_a_refused_pod_is_tried_again_as_soon_as_its_node_has_history() -> None:
    world = ControllerWorld()
    world.profile()
    world.nodes.sink.put(reported(seen((0, 60))))
    world.pods.sink.put(refused_pod())
    assert world.requeue() == []

    world.nodes.sink.put(reported(seen((0, 1_860))))

    assert world.requeue() == ["/api/v1/nodes/n1"]


def test_a_young_fleet_is_never_called_out_of_reach() -> None:
    state = World(reported(seen((0, 60)))).state
    job = Job(gpus=1, sla=0.9, profile=PROFILE)

    assert beyond(state.open_fleet(NOW_S), state.sets(1), job, state.settings) is None
