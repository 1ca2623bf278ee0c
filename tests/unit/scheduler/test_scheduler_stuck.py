"""Pods that can never run where they are placed do not hold their GPUs for ever, and no other is touched."""

from typing import Any

import pytest
from controller_world import World
from reports import harvest_node, pod, uuids
from valve_scheduler.controller.rounds import ControllerSettings
from valve_scheduler.main import parser

Json = dict[str, Any]
FIRST, SECOND = uuids("n1")[:2]
PATIENCE_S = ControllerSettings().patience_s


def later(world: World, seconds: float, **more: Any) -> None:
    world.now_s += seconds
    world.nodes.sink.put(harvest_node("n1", age_s=-(world.now_s - 1.0 - START_S), **more))


START_S = World().now_s


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_never_frees_a_gpu_sooner_or_later(ahead_s: float) -> None:
    world = World()
    world.report("n1", cards=1)
    world.pods.sink.put(pod("p1", node="n1", held=SECOND))
    assert world.freed() == []
    world.set_clock(ahead_s)
    later(world, 0.0, cards=1)
    assert world.freed() == []

    later(world, PATIENCE_S, cards=1)
    assert world.freed() == [("p1", "PlaceLost")]


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_a_pod_on_a_card_that_is_gone_is_never_left_there(phase: str) -> None:
    world = World()
    world.report("n1", cards=1)
    world.pods.sink.put(pod("p1", node="n1", held=SECOND, phase=phase))
    assert world.freed() == []
    later(world, PATIENCE_S - 1, cards=1)
    assert world.freed() == []

    later(world, 1.0, cards=1)
    assert world.freed() == [("p1", "PlaceLost")]


def test_a_pod_placed_on_the_gpu_of_one_that_runs_is_never_left_there() -> None:
    world = World()
    world.report("n1")
    world.pods.sink.put(pod("runs", node="n1", held=FIRST, phase="Running"))
    world.pods.sink.put(pod("waits", node="n1", held=FIRST))
    world.freed()
    later(world, PATIENCE_S)

    assert world.freed() == [("waits", "PlaceLost")]


def test_a_card_that_comes_back_in_time_costs_nobody_anything() -> None:
    world = World()
    world.report("n1", cards=1)
    world.pods.sink.put(pod("p1", node="n1", held=SECOND, phase="Running"))
    world.freed()
    later(world, PATIENCE_S - 1)
    assert world.freed() == []
    later(world, 1.0, cards=1)

    assert world.freed() == []  # gone again: a new five minutes


def test_nothing_is_concluded_from_a_node_that_does_not_report() -> None:
    world = World()
    world.report("n1", cards=1)
    world.pods.sink.put(pod("p1", node="n1", held=SECOND, phase="Pending"))
    world.pods.sink.put(pod("p2", node="unknown", held="GPU-x", phase="Pending"))
    world.freed()
    world.now_s += 2 * PATIENCE_S

    assert world.freed() == []


def test_a_pod_that_pulls_its_image_is_left_alone() -> None:
    world = World()
    world.report("n1")
    world.pods.sink.put(pod("pulls", node="n1", held=FIRST))
    world.pods.sink.put(pod("ends", node="n1", held=SECOND, phase="Succeeded"))
    world.freed()
    later(world, 10 * PATIENCE_S)

    assert world.freed() == []


@pytest.mark.parametrize("option", ["--stuck-after", "--sla-window", "--monitor-every", "--lease"])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_patience_that_is_none_is_refused_by_name(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["controller", f"{option}={text}"])

    assert f"argument {option}: {text} is no number of seconds above 0" in capsys.readouterr().err
