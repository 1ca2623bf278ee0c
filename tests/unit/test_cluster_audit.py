"""The table of findings about the cluster names tests that exist, in the files it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS / "cluster/README.md").read_text().partition("## What each finding")[2]
FINDINGS, _, POINTS = TABLE.partition("\nWhat was asked for")
ROW = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)
ROWS = ROW.findall(FINDINGS)


def test_no_finding_is_without_a_row() -> None:
    assert [number for number, _ in ROWS] == [str(number) for number in range(1, 23)]


@pytest.mark.parametrize(("number", "row"), ROWS)
def test_no_finding_is_ever_held_by_a_test_that_is_gone(number: str, row: str) -> None:
    held = re.findall(r"([\w/]+\.py)((?:,? ?`test_\w+`)*)", row.split(" | ")[-2])  # the last column says what it ran on

    assert held
    for file, named in held:
        path = TESTS / file if "/" in file else TESTS / "cluster" / file
        known = set(re.findall(r"def (test_\w+)", path.read_text()))
        assert set(re.findall(r"test_\w+", named)) <= known, (number, file)


def test_no_test_is_named_without_its_file() -> None:
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))

    assert named <= set(re.findall(r"def (test_\w+)", sources))


def test_no_point_that_was_asked_for_is_held_by_a_file_that_is_gone() -> None:
    points = ROW.findall(POINTS)
    named = re.findall(r"[\w/]+\.(?:py|md)", POINTS)

    assert [number for number, _ in points] == [str(number) for number in range(1, 11)]
    assert all(held for _, _, held in (row.rpartition(" | ") for _, row in points))
    roots = (TESTS, TESTS / "cluster", TESTS.parent)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
