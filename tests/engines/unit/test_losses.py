"""What a loss spoils: the fixpoint, by small cases and against a plain specification."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_hook.losses import NOTHING_WRITTEN, spread


def holder(name, *blocks, first=NOTHING_WRITTEN):
    return name, array("I", blocks), first


def judge(lost, *holders, copies=(), blocks=32):
    tables = [table for _, table, _ in holders]
    verdict = spread(np.array(lost, dtype=np.uint32), tables, lambda index: holders[index][2], copies, blocks)
    return {holders[index][0] for index in verdict.hit}, set(verdict.bad.tolist())


def test_who_holds_a_lost_block_is_hit_and_others_are_not():
    assert judge([3], holder("a", 1, 2, 3), holder("b", 4, 5)) == ({"a"}, {3})


def test_what_a_hit_request_wrote_in_flight_is_bad_and_hits_those_who_share_it():
    """`b` took `a`'s freshly hashed block 2 as its own beginning."""
    assert judge([1], holder("a", 1, 2, first=1), holder("b", 2, 6), holder("c", 7)) == ({"a", "b"}, {1, 2})


def test_taint_goes_on_until_nothing_changes():
    chain = [holder(f"r{number}", number, number + 1, first=1) for number in range(1, 9)]

    assert judge([1], *chain) == ({f"r{number}" for number in range(1, 9)}, set(range(1, 10)))


def test_blocks_before_the_first_one_written_stay_good():
    assert judge([9], holder("a", 1, 2, 9, 10, first=2)) == ({"a"}, {9, 10})


def test_a_copy_of_a_lost_block_is_lost():
    assert judge([5], holder("a", 1, 8), copies=[(5, 8)]) == ({"a"}, {5, 8})


@pytest.mark.parametrize("strange", [32, 33, 4_000_000_000])
def test_unknown_block_numbers_belong_to_nobody(strange):
    """Out of range in the table's word or in a row: ignored, and nobody is hit by it."""
    rows = holder("a", 1, strange, first=1), holder("b", strange)

    assert judge([strange], *rows, copies=[(1, strange)]) == (set(), set())
    assert judge([1, strange], *rows) == ({"a"}, {1})


def test_no_requests_and_no_blocks_are_no_trouble():
    assert judge([1, 2]) == (set(), {1, 2})
    assert judge([], holder("a")) == (set(), set())


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 15), max_size=6), st.integers(-1, 5)), max_size=8),
    st.sets(st.integers(0, 15), max_size=4),
)
def test_it_agrees_with_the_plain_specification(rows, lost):
    holders = [holder(f"r{index}", *blocks, first=first) for index, (blocks, first) in enumerate(rows)]
    bad, hit = set(lost), set()
    for _ in range(len(rows) + 1):
        for index, (blocks, first) in enumerate(rows):
            if bad & set(blocks):
                hit.add(f"r{index}")
                bad |= set(blocks[first:]) if first >= 0 else set()

    assert judge(sorted(lost), *holders) == (hit, bad)
