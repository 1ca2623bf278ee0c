"""Golden traces: every event of small worlds, compared as text. A refactor leaves them as they are.

After a wanted change: `VALVE_GOLDEN=write pytest tests/unit/lab/test_sim_golden.py`, and read the difference.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sim_worlds import world_of
from valve_tools.sim.machine import Settings
from valve_tools.sim.memory_policies import Prism, Uvm
from valve_tools.sim.ours import OurMemory, ProductWake
from valve_tools.sim.world import Compute, World, run

from valved.model.memory import ReservationRule
from valved.policy.reservation import ReservationSettings

EVENTS = ("arrive", "launch", "done", "gate", "wake", "offline", "take", "give", "kill", "preempt")
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "sim"
ROWS = [(20.0, 500, 3), (21.0, 3000, 2), (200.0, 100, 4), (207.0, 60, 2), (420.0, 6000, 2)]
TIGHT = Settings(memory_utilization=0.5)
PUBLISHED = partial(OurMemory, settings=ReservationSettings(rule=ReservationRule.MIAD, hold_share=0.8))
CASES = {
    "channel-budget": (Compute.CHANNEL, OurMemory, True),
    "channel-ours": (Compute.CHANNEL, PUBLISHED, True),
    "channel-ours-without-hint": (Compute.CHANNEL, PUBLISHED, False),
    "channel-prism": (Compute.CHANNEL, lambda: Prism(online_reserve=2), True),
    "gpreempt-uvm": (Compute.GPREEMPT, Uvm, False),
    "kernel-uvm": (Compute.KERNEL_TGS, Uvm, False),
    "layer-ours": (Compute.LAYER, PUBLISHED, True),
}


def text_of(world: World, memory, hinted: bool) -> str:
    result = run(world, memory, ProductWake(hinted=hinted))
    lines = [f"{at / 1e6:12.6f} ms  {EVENTS[kind]:8s} {a} {b}" for at, kind, a, b in result.trace_rows.tolist()]
    totals = " ".join(f"{name}={value}" for name, value in sorted(result.totals.items()))
    return "\n".join([*lines, totals, ""])


@pytest.mark.parametrize("case", CASES)
def test_a_small_world_unfolds_as_recorded(case):
    compute, memory, hinted = CASES[case]
    world = world_of(ROWS, compute=compute, settings=TIGHT, hinted=hinted, seconds=0.6)
    found = text_of(replace(world, log=True), memory(), hinted)
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("VALVE_GOLDEN") == "write":
        path.write_text(found)

    assert path.read_text() == found
