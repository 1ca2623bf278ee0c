"""The drawing of one preemption says what the settings and the promises say."""

from __future__ import annotations

import re
from pathlib import Path

from valved.config import Config

ROOT = Path(__file__).parents[2]
SVG = (ROOT / "docs" / "preemption.svg").read_text()
PICTURE = " ".join(re.findall(r">([^<]+)<", SVG))


def test_no_number_in_the_picture_ever_contradicts_the_settings():
    cooldown = Config().cooldown

    bounds = f"({cooldown.floor_ms:g} to {cooldown.ceiling_ms:g} ms)"
    said = f"{cooldown.factor:g} x the largest gap inside requests {bounds}"
    assert said in PICTURE


def test_no_bound_in_the_picture_ever_contradicts_the_promises():
    (promise,) = [line for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if line.startswith("| P1 |")]

    assert set(re.findall(r"\d+ [mu]s", promise)) == {"1 ms", "50 us"}
    assert "preemption: under 1 ms," in PICTURE
    assert "our own share: goal 50 us at p99" in PICTURE


def test_no_step_of_the_picture_is_missing_from_the_text():
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## One preemption, step by step")[1].split("\n## ")[0]

    steps = {int(number) for number in re.findall(r'class="[ng]"[^>]*>(\d)<', SVG)}
    told = {int(number) for number in re.findall(r"^(\d)\. \*\*", text, re.MULTILINE)}
    assert steps == {1, 2, 3, 4, 6, 7, 8}
    assert steps <= told
