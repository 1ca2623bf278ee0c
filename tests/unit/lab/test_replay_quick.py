"""`make lab-quick` asks what the pages claim, loosely; never what they say is missed, and a broken claim fails."""

from __future__ import annotations

import pytest
from valve_tools.replay import quick
from valve_tools.sim.metrics import at_least, at_most, not_judged


@pytest.mark.parametrize(
    ("claim", "ok"),
    [
        (at_most("TTFT mean increase %", "P1", 4.9, 2.5), True),
        (at_most("TTFT mean increase %", "P1", 5.1, 2.5), False),
        (at_least("offline kept", "P1", 0.72, 0.95), True),
        (at_least("offline kept", "P1", 0.7, 0.95), False),
        (at_most("preemptions per request", "P1", 2, 1), False),
    ],
)
def test_a_claim_is_asked_within_twice_its_mark_and_a_count_of_preemptions_as_it_is(claim, ok):
    assert quick.loosely(claim).ok is ok


def test_what_has_nothing_to_judge_stays_so():
    claim = not_judged("reclaims in an hour after the first", "P1", 30, "")

    assert quick.loosely(claim) == claim


def test_what_the_pages_say_is_missed_is_not_asked_and_nothing_else_is_left_out():
    for name, pair in quick.NOT_ASKED:
        assert not quick.is_asked(at_most(name, pair, 1.0, 1.0))
    assert quick.is_asked(at_most("TTFT mean increase %", "P1", 1.0, 1.0))
    assert not quick.is_asked(at_least("level with baselines that keep latency", "P1", 1.0, 0.99))
