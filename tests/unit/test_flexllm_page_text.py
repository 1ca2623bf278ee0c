"""What FlexLLM's page says in words is what its own table holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from valve_tools.lab.cotrain.flexllm_page import READING

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "cotrain" / "flexllm.md"


def ratios(mine: str) -> list[float]:
    """Over FlexLLM, of each group in which it keeps its targets."""
    kept: dict[tuple[str, ...], dict[str, float]] = {}
    for line in PAGE.read_text("utf-8").partition("## All runs")[2].partition("\n## ")[0].splitlines():
        words = [word.strip() for word in line.split(" | ")]
        if len(words) > 4 and words[4][:1].isdigit():
            kept.setdefault(tuple(words[:3]), {})[words[3]] = float(words[4].split()[0].replace(",", ""))
    return [group[mine] / group["flexllm_greedy"] for group in kept.values() if group["flexllm_greedy"]]


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ("ours, same tiles", "nine groups with the same tiles, by 1 to 14 %"),
        ("ours, split processors", "four with split processors, by 2 to 18 %"),
    ],
)
def test_the_text_never_says_of_groups_below_flexllm_what_the_table_does_not(mine: str, words: str) -> None:
    below = [100 * (1 - ratio) for ratio in ratios(mine) if ratio < 1]
    count = {4: "four", 9: "nine"}.get(len(below), str(len(below)))

    assert words in " ".join(READING.split())
    assert " ".join(READING.split()) in " ".join(PAGE.read_text("utf-8").split())
    assert words.startswith(count)
    said = [float(number) for number in re.findall(r"\d+", words)]
    assert said == pytest.approx([min(below), max(below)], abs=0.6)  # the table is rounded, too
