"""Column-affine hand-out on small pools: three columns of four blocks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from valved.policy import handout
from valved.policy.handout import ColumnFreeList, choose_column

THREE_BY_FOUR = [block // 4 for block in range(12)]


def test_a_request_fills_its_column_before_it_takes_another() -> None:
    free = ColumnFreeList(THREE_BY_FOUR)
    first = free.take(3)
    other = free.take(2)

    assert first == [0, 1, 2]
    assert other == [4, 5]
    assert free.take(3, last_block=first[-1]) == [3, 8, 9]


def test_the_column_with_most_free_blocks_is_next() -> None:
    assert choose_column([2, 4, 4], None) == 1
    assert choose_column([2, 4, 4], 0) == 0
    assert choose_column([0, 4, 4], 0) == 1
    assert choose_column([0, 0], 1) is None


def test_reserved_blocks_are_never_handed_out() -> None:
    free = ColumnFreeList(THREE_BY_FOUR, reserved=[0])

    assert len(free) == 11
    assert 0 not in free.take(11)


def test_a_withheld_column_gives_nothing_until_it_is_restored() -> None:
    free = ColumnFreeList(THREE_BY_FOUR)
    held = free.take(2)
    free.withhold(0)
    free.give(held)

    assert len(free) == 8
    assert {4, 5, 6, 7, 8, 9, 10, 11} == set(free.take(8))
    free.restore(0)
    assert free.take(4) == [0, 1, 2, 3]


def test_more_than_there_is_is_refused_and_changes_nothing() -> None:
    free = ColumnFreeList(THREE_BY_FOUR)

    with pytest.raises(ValueError, match="13 blocks wanted, 12 are free"):
        free.take(13)

    assert len(free) == 12


def test_columns_that_shrank_untold_are_still_found_in_order() -> None:
    """An engine takes single blocks out of the middle when a prefix is hit; only freed blocks are told."""
    counts = [4, 4, 3]
    order = handout.FullestColumn(3, 4)
    for column, count in enumerate(counts):
        order.file(column, count)
    found = []
    for shrunk in ((0, 1), (1, 2), (2, 0), (1, 0), (0, 0)):
        found.append(order.find(counts.__getitem__))
        counts[shrunk[0]] = shrunk[1]

    assert found == [0, 1, 2, 1, 0]


def test_a_lost_block_is_found_by_the_books() -> None:
    free = ColumnFreeList(THREE_BY_FOUR)
    held = free.take(2)
    free.check_integrity(held)

    with pytest.raises(AssertionError, match="lost or has two owners"):
        free.check_integrity(held[:1])


def test_the_module_loads_with_the_standard_library_alone() -> None:
    """It is shipped into the engine's process, where neither valved nor numpy may be assumed."""
    tree = ast.parse(Path(handout.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    assert {"__future__", "heapq", "collections", "collections.abc", "itertools"} == imported
