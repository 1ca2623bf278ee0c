"""Shares of the bench tune-idle: what is stopped, idle and on the card is added up without counting anything twice."""

from pathlib import Path

import pytest
from valve_tools.bench.tune import closed, common, host_shares, length, lines_of, rest, shares
from valve_tools.demo.figures import AnsweredRequest, OnlineRun


def record(kind: str, at_s: float) -> dict[str, object]:
    return {"kind": kind, "t_ns": int(at_s * 1e9)}


def test_the_gate_is_closed_from_the_first_stop_to_the_next_wake() -> None:
    trace = [record("gate", 1), record("gate", 1.5), record("hold", 2), record("wake", 3), record("wake", 4)]
    assert closed([*trace, record("gate", 6)], 10) == [(1, 3), (6, 10)]


def test_spans_that_overlap_are_never_counted_twice() -> None:
    assert rest((0, 10), [(4, 6), (1, 5), (9, 12)]) == [(0, 1), (6, 9)]
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert rest((0, 1), []) == [(0, 1)]


def test_the_shares_of_a_calm_stretch() -> None:
    """Ten seconds, two of them busy; the gate opens half a second late; the job has pauses of a second in all."""
    request = AnsweredRequest(arrival_s=2.0, ttft_ms=1000.0, tpot_ms=500.0, out_tokens=3)
    served = OnlineRun(requests=(request,), start_s=100.0, wall_s=10.0)
    open_, used = shares(served, [(99.0, 101.0), (102.0, 120.0)], [(102.0, 104.5)])
    assert open_ == pytest.approx(7.5 / 8)
    assert used == pytest.approx(6.5 / 7.5)
    assert length([(1, 2), (3, 5)]) == 3


def test_what_others_take_between_two_tiles_is_never_counted_against_the_job(tmp_path: Path) -> None:
    """Tiles of 20 ms a second apart, with 5 ms of its own CPU time between them; a torn last line."""
    lines = "".join(f"{at}.0 {at}.5 0.02 0.005\n" for at in range(10))
    (tmp_path / "tiles").write_text(lines + "10.0 10.5 0.0")
    found = lines_of(tmp_path / "tiles")
    assert len(found) == 10
    assert host_shares(found, 5) == [pytest.approx(0.8)] * 5
    assert host_shares(found[:2], 5) == [pytest.approx(0.8)] * 2
