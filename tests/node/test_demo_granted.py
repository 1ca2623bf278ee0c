"""A short `valve demo granted`: the two-minute one is the same with more requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from valve_tools.demo.granted import GrantedDemo, Plan, perform
from valve_tools.demo.granted_service import Asked
from valve_tools.demo.node import EmulatedNode


def test_offline_work_gets_pauses_with_consent_and_none_without(tmp_path: Path) -> None:
    """A machine that stalls is late with answers and tokens: so the gap is long, for pauses that are worth their cost
    all the same, and the target is judged at twice its value. What the hook keeps to is told on virtual time."""
    plan = Plan(requests=40, rate=8.0, tpot_ms=120.0, gap_ms=3000.0, hasty=True)
    without, consenting = perform(plan, tmp_path)

    judged = replace(plan, tpot_ms=2 * plan.tpot_ms)
    assert without.problems(judged) == consenting.problems(judged) == []
    assert without.grants == 0
    assert "consents to no pauses" in without.words
    assert consenting.granted_s > 0.1
    assert consenting.offline_share > without.offline_share


def test_a_pause_beside_slices_is_no_grant_of_its_own(tmp_path: Path) -> None:
    """One grant holds many: valved opens, and the hook's pauses ask nobody."""
    plan = Plan(requests=8, rate=8.0, tpot_ms=120.0, gap_ms=1000.0, hasty=True, rung="timeslice")
    with EmulatedNode(tmp_path, config=plan.config()) as node:
        found = GrantedDemo(node, plan).run(consents=True, rate=1.0)

    assert found.offline_ok
    assert 0 < found.grants < found.pauses


def test_a_prompts_gap_is_not_taken_for_a_pauses() -> None:
    asked = Asked(name="a", prompt=1, tokens=9, arrived_ns=0)
    for now_ns, prompted_ns in ((10, 10), (30, 10), (90, 80), (95, 80)):
        asked.token(now_ns, prompted_ns)

    assert (asked.longest_ns, asked.longest_plain_ns) == (60, 20)
