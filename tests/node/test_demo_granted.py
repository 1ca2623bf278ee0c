"""A short `valve demo granted`: the two-minute one is the same with more requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from valve_tools.demo.granted import Plan, perform


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
