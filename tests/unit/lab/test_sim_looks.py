"""Looks of the reservation policy that would change nothing are left out, and leave nothing out of the answer."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from sim_worlds import lengths_of, world_of
from valve_tools.sim import ours
from valve_tools.sim.machine import MODELS, Settings
from valve_tools.sim.ours import OurMemory, ProductWake
from valve_tools.sim.world import OfflineSide, Result, run

from valved.model.memory import ReservationRule
from valved.policy import reservation
from valved.policy.reservation import ReservationSettings

SMALL = Settings(memory_utilization=0.52)
COARSE = replace(SMALL, handle_mib=256)
HOUR_S = 3600.0
TUNED = {
    "as it is": ReservationSettings(),
    "coarse": ReservationSettings(step_handles=1, headroom_min_handles=1, headroom_max_handles=8),
    "spent": ReservationSettings(step_handles=1, target_per_hour=4.0),
    "early": ReservationSettings(step_handles=2, pressure_ratio=0.8, target_per_hour=600.0),
    "hardly lowered": ReservationSettings(step_handles=1, target_per_hour=1e-4, hold_share=1e5),
    "short window": ReservationSettings(step_handles=1, target_per_hour=600.0, window_ns=60_000_000_000),
    "published": ReservationSettings(rule=ReservationRule.MIAD),
}


def bursts(seed: int) -> list[tuple[float, int, int]]:
    """Requests in bursts that come seconds to minutes apart: (ms, prompt, answer)."""
    draw = random.Random(seed)
    rows, at_ms = [], 0.0
    while at_ms < HOUR_S * 1000 / 2:
        for _ in range(draw.choice([1, 1, 2, 6])):
            rows.append((at_ms, draw.choice([40, 900, 4000, 12_000]), draw.choice([2, 60, 400])))
            at_ms += draw.expovariate(1 / 700)
        at_ms += draw.choice([300.0, 2_000.0, 9_000.0, 40_000.0]) * draw.random()
    return rows


def simulated(rows, settings: ReservationSettings, card: Settings, seed: int = 1) -> tuple[Result, OurMemory]:
    policy = OurMemory(settings=settings)
    job = OfflineSide(model=MODELS["8B"], lengths=lengths_of(1000, 100))
    world = world_of(rows, settings=card, job=job, seconds=HOUR_S / 2 + 60, seed=seed)
    return run(world, policy, ProductWake(hinted=True)), policy


def told(result: Result) -> list[object]:
    values = (getattr(result, one.name) for one in fields(result))
    return [one.tobytes() if isinstance(one, np.ndarray) else one for one in values]


@pytest.mark.parametrize("card", [SMALL, COARSE], ids=["fine", "coarse"])
@pytest.mark.parametrize("name", TUNED)
def test_a_look_that_is_left_out_never_changes_a_figure(monkeypatch, name, card):
    for seed in (1, 2):
        rows = bursts(seed)
        quick, left = simulated(rows, TUNED[name], card, seed)
        left._catch_up()
        with monkeypatch.context() as patch:
            patch.setattr(ours, "rests_until_ns", lambda *given: 0)
            each, known = simulated(rows, TUNED[name], card, seed)

        assert told(quick) == told(each)
        assert left._state == known._state


def test_the_policy_is_never_asked_each_second_of_a_night(monkeypatch):
    """21,600 looks of six hours were two thirds of what a service of `whatif` cost."""
    asked = []
    decide = reservation.decide
    monkeypatch.setattr(reservation, "decide", lambda *given: asked.append(1) or decide(*given))

    simulated([(1000.0, 40, 20), (HOUR_S * 1000 / 4, 40, 20)], TUNED["coarse"], COARSE)

    assert len(asked) < 300  # of 1,860 seconds: the 164 that a raised headroom takes to fall, and what follows a burst


def test_a_policy_that_would_act_at_a_look_that_was_left_out_ends_the_run(monkeypatch):
    monkeypatch.setattr(ours, "rests_until_ns", lambda *given: 1 << 62)

    with pytest.raises(AssertionError, match="a look was left out that would give"):
        simulated([(1000.0, 4000, 20), (HOUR_S * 1000 / 4, 40, 20)], TUNED["coarse"], COARSE)
