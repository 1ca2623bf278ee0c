"""C15 never calls a card fit whose cache was silently not Valve's, or that gave another's bytes."""

from __future__ import annotations

import pytest
from valve_tools.gpu.steps.bracket import complaint

GOOD = {
    "is_valves": True,
    "was_said": False,
    "taken": 3,
    "returned": 3,
    "wrong_pages_in_graph": 0,
    "wrong_pages_read": 0,
}
ORDINARY = {"is_valves": False, "was_said": True, "taken": 0, "returned": 0}


@pytest.mark.parametrize(
    ("allocator", "change", "words"),
    [
        ("native", {}, ""),
        ("async", ORDINARY, ""),
        ("native", ORDINARY, "no block was taken and given back"),
        ("native", {"taken": 0}, "no block was taken and given back"),
        ("expandable", {**ORDINARY, "was_said": False}, "memory was silently not Valve's"),
        ("async", {**ORDINARY, "wrong_pages_read": 1}, "a page held what it must not"),
        ("native", {"wrong_pages_in_graph": 1}, "a page held what it must not"),
    ],
)
def test_what_is_wrong_is_said(allocator, change, words):
    assert complaint(allocator, {**GOOD, **change}) == words
