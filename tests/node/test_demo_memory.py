"""A short `valve demo memory`: the five-minute one is the same with more of it."""

from __future__ import annotations

from valve_tools.demo.memory import Plan, perform


def test_the_demo_moves_memory_and_every_answer_is_right(tmp_path):
    figures = perform(Plan(seconds=8.0, every_s=2.0), tmp_path)

    assert figures.problems == []
    assert sum(figures.per_window) >= 1
    assert figures.offline["lost_blocks"] > 0
    assert figures.phases_ms["total"]
    assert 0 < figures.capacity < 1
