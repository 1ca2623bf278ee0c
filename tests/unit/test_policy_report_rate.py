"""When a node writes its report: heartbeats, early changes, and never more than the bucket holds."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from valved.policy.report_rate import SECOND_NS, RateSettings, RateState, decide_report, side_of

SETTINGS = RateSettings()


def run(changes: list[tuple[int, object]], until_s: int, phase: float = 0.5) -> list[int]:
    """Seconds at which a report is written, looking once a second; `changes` are (second, standing)."""
    state, standing, written = RateState(), ("start",), []
    for second in range(until_s):
        standing = next(((value,) for at, value in reversed(changes) if at <= second), standing)
        state, decision = decide_report(state, standing, phase, second * SECOND_NS, SETTINGS)
        if decision.write:
            written.append(second)
    return written


def test_the_first_report_is_written_at_once_then_one_per_period() -> None:
    assert run([], 120) == [0, 15, 45, 75, 105]


def test_nodes_started_together_part_after_their_first_report() -> None:
    assert {run([], 40, phase)[1] for phase in (0.1, 0.4, 0.8)} == {3 + 7, 12, 24}


def test_a_change_that_decides_something_comes_early_but_not_within_ten_seconds() -> None:
    assert run([(50, "other"), (52, "third")], 100) == [0, 15, 45, 55, 85]


def test_a_node_that_flips_at_every_look_writes_at_the_rate_of_its_bucket() -> None:
    written = run([(second, second) for second in range(3600)], 3600)

    assert len(written) <= 3600 / 30 + 3


def test_an_order_of_people_is_answered_at_once_and_a_figure_waits_its_turn() -> None:
    settled = RateState(tokens=0.0, seen_ns=SECOND_NS, written_ns=SECOND_NS, written=("old",), next_ns=99 * SECOND_NS)

    for asked, written in ((True, True), (False, False)):
        state, decision = decide_report(settled, ("new",), 0.5, 2 * SECOND_NS, SETTINGS, asked=asked)
        assert decision.write is written
        assert 0.0 <= state.tokens < 1.0
    assert not decide_report(settled, ("old",), 0.5, 2 * SECOND_NS, SETTINGS, asked=True)[1].write


@given(st.lists(st.integers(0, 600), max_size=60), st.floats(0, 0.999))
def test_over_any_stretch_the_bucket_bounds_the_writes(at: list[int], phase: float) -> None:
    written = run([(second, index) for index, second in enumerate(sorted(at))], 600, phase)

    for first in range(len(written)):
        for last in range(first, len(written)):
            assert last - first + 1 <= (written[last] - written[first]) / 30 + 3
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(written))


def test_a_share_near_the_mark_does_not_flutter() -> None:
    sides, side = [], None
    for share in (0.31, 0.29, 0.26, 0.24, 0.26, 0.34, 0.36):
        side = side_of(share, side, SETTINGS)
        sides.append(side)

    assert sides == [True, True, True, False, False, False, True]
