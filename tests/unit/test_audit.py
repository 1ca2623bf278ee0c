"""The table of findings (tests/AUDIT.md) names tests that exist, for every finding."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FINDINGS = {"Daemon": 30, "Native": 25, "Newcomer": 30}
WITHOUT_A_TEST = {"Newcomer 9", "Newcomer 30"}


def rows():
    """(review and number, what holds it)"""
    for review in re.split(r"^## ", (TESTS / "AUDIT.md").read_text(), flags=re.MULTILINE)[1:]:
        name = review.partition(":")[0]
        for number, held in re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", review, re.MULTILINE):
            yield f"{name} {number}", held


def test_no_finding_is_ever_missing_from_the_table():
    expected = [f"{review} {number}" for review, count in FINDINGS.items() for number in range(1, count + 1)]

    assert [name for name, _ in rows()] == expected


def test_no_finding_is_ever_held_by_a_test_that_is_gone():
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)", sources))
    named = {test for _, held in rows() for test in re.findall(r"`(test_\w+)`", held)}

    assert named - there == set()


def test_findings_without_a_test_never_become_more():
    without = {name for name, held in rows() if not re.search(r"`test_\w+`", held)}

    assert without == WITHOUT_A_TEST
    assert all(held.startswith("no test: ") for name, held in rows() if name in without)
