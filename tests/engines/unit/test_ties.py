"""An answer that is not the undisturbed one is excused only where every token of it is proven to be as good."""

from __future__ import annotations

import pytest
from engine_trials import gaps, is_tied

WANTED = [10, 20, 30, 41]
TOPS = [  # at each place of an answer that took the other side of a tie at its third token, and went on from there
    [(-0.1, 10), (-3.0, 11)],
    [(-0.2, 20), (-2.5, 21)],
    [(-0.700000, 30), (-0.700004, 31)],
    [(-0.1, 50), (-2.0, 51)],
]


@pytest.mark.parametrize(
    ("got", "tops", "excused"),
    [
        ([10, 20, 31, 50], TOPS, True),
        ([10, 20, 32, 50], TOPS, False),
        ([10, 21, 31, 50], TOPS, False),
        ([10, 20, 31, 51], TOPS, False),
        ([10, 20, 31, 99], TOPS, False),
        ([10, 20, 31], TOPS[:3], False),
        ([10, 20, 31, 50], [*TOPS[:2], [(-0.7, 30), (-0.7002, 31)], TOPS[3]], False),
    ],
    ids=["the other candidate", "a third", "before the tie", "behind it", "garbage behind it", "cut short", "no tie"],
)
def test_nothing_but_a_tie_is_ever_excused(got, tops, excused):
    assert is_tied(got, WANTED, tops, 1e-4) is excused


def test_each_gap_is_kept():
    assert gaps([10, 20, 31, 99], TOPS) == pytest.approx([0, 0, 4e-6, float("inf")])
