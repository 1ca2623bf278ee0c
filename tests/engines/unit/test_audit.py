"""The table of findings names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ENGINES = Path(__file__).resolve().parents[1]


def test_no_finding_is_ever_held_by_a_test_that_is_gone():
    table = (ENGINES / "README.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", table))
    sources = "".join(path.read_text() for path in ENGINES.parent.rglob("test_*.py"))

    assert len(re.findall(r"^\| \d+ \|", table, re.MULTILINE)) == 20
    assert named - set(re.findall(r"def (test_\w+)", sources)) == set()
