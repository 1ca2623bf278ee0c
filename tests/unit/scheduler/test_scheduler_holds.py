"""The SLA monitor and holds: what a pause, a drain, a mode or a guard keeps from running is nobody's miss."""

from collections.abc import Callable

import pytest
from controller_world import EVICTION, World, achieved, running
from reports import harvest_node


def mode_off(world: World) -> None:
    world.controller.caches.nodes.items["", "n1"]["spec"] = {"resolved": {"mode": "off"}}


def node_says_paused(world: World) -> None:
    world.controller.caches.nodes.items["", "n1"]["status"]["phase"] = "Paused"


def guard(world: World) -> None:
    world.controller.caches.nodes.items["", "n1"]["status"]["gpus"][0] |= {"harvestable": False, "reason": "a stranger"}


HOLDS: dict[str, Callable[[World], None]] = {
    "the brake": lambda world: world.policy("valve-pause", paused=True),
    "a pause": lambda world: world.policy("night", paused=True),
    "a drain": lambda world: world.controller.caches.nodes.items["", "n1"].__setitem__(
        "spec", {"resolved": {"drain": "x"}}
    ),
    "mode off": mode_off,
    "the node's own pause": node_says_paused,
    "a guarded GPU": guard,
}


def starving() -> World:
    """A pod that has made nothing since it was seen first."""
    world = World()
    world.profile()
    world.pods.sink.put(running())
    world.report(offline=achieved(0.0, 0.0))
    world.round()

    return world


def after(world: World, seconds: float, demand_s: float, tokens: float = 0.0) -> None:
    world.now_s += seconds
    spec = world.controller.caches.nodes.items["", "n1"].get("spec", {})
    report = harvest_node("n1", offline=achieved(tokens, demand_s))
    world.nodes.sink.put({**report, "spec": spec})


@pytest.mark.parametrize("hold", list(HOLDS))
def test_a_pod_is_never_evicted_for_time_in_which_harvesting_was_held(hold: str) -> None:
    """Guards 36 evictions in an hour's pause of 200 pods that all had their SLA."""
    world = starving()
    for number in range(1, 5):
        after(world, 900.0, 900.0 * number)
        HOLDS[hold](world)

        assert EVICTION not in world.round()

    assert "HarvestingHeld" in str(world.controller.promises._tracks["uid-p1"].verdict.value)


def test_windows_begin_anew_after_a_hold() -> None:
    world = starving()
    after(world, 900.0, 900.0)
    world.policy("valve-pause", paused=True)
    world.round()
    world.policies.sink.drop({"metadata": {"name": "valve-pause"}})

    after(world, 30.0, 930.0)
    assert EVICTION not in world.round()
    after(world, 870.0, 1_800.0)
    assert EVICTION not in world.round()
    after(world, 30.0, 1_830.0)
    assert EVICTION in world.round()  # 900 seconds after the first look


def test_a_pause_of_other_nodes_spares_nobody_here() -> None:
    world = starving()
    world.policy("elsewhere", paused=True, nodeSelector={"pool": "b"})
    after(world, 900.0, 900.0)

    assert EVICTION in world.round()
