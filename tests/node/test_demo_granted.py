"""A short `valve demo granted`: the two-minute one is the same with more requests."""

from __future__ import annotations

from pathlib import Path

from valve_tools.demo.granted import Plan, perform


def test_offline_work_gets_pauses_with_consent_and_none_without(tmp_path: Path) -> None:
    """Targets are the demo's own business: this machine may be busy. Here the tokens may take long."""
    plan = Plan(requests=40, rate=8.0, tpot_ms=120.0, gap_ms=300.0, hasty=True)
    without, consenting = perform(plan, tmp_path)

    assert without.problems(plan) == consenting.problems(plan) == []
    assert without.grants == 0
    assert "consents to no pauses" in without.words
    assert consenting.grants > 5
    assert consenting.granted_s > 0.1
    assert consenting.offline_share > without.offline_share
