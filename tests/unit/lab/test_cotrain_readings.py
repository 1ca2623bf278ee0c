"""What the pages of co-training say in words is what their tables hold, also when a table is made again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from valve_tools.lab.cotrain import shared
from valve_tools.lab.cotrain.cells import Cell
from valve_tools.lab.cotrain.readings import behind, prose, shared_reading, span

FLEXLLM = Path(__file__).resolve().parents[3] / "docs" / "results" / "cotrain" / "flexllm.md"


def ratios(mine: str) -> list[float]:
    """Over FlexLLM, of each group of the page in which FlexLLM keeps its targets."""
    kept: dict[tuple[str, ...], dict[str, float]] = {}
    for line in FLEXLLM.read_text("utf-8").partition("## All runs")[2].partition("\n## ")[0].splitlines():
        words = [word.strip() for word in line.split(" | ")]
        if len(words) > 4 and words[4][:1].isdigit():
            kept.setdefault(tuple(words[:3]), {})[words[3]] = float(words[4].split()[0].replace(",", ""))
    return [group[mine] / group["flexllm_greedy"] for group in kept.values() if group["flexllm_greedy"]]


@pytest.mark.parametrize(
    ("mine", "words"),
    [("ours, same tiles", "with the same tiles in"), ("ours, split processors", "with split processors in")],
)
def test_the_page_never_says_of_groups_below_flexllm_what_its_table_does_not(mine: str, words: str) -> None:
    found = ratios(mine)
    below = [100 * (1 - ratio) for ratio in found if ratio < 1]

    said = re.search(
        rf"{words} (\d+) of (\d+) groups, by (\d+) to (\d+) %", " ".join(FLEXLLM.read_text("utf-8").split())
    )

    assert said
    assert [int(said[1]), int(said[2])] == [len(below), len(found)]
    assert [float(said[3]), float(said[4])] == pytest.approx([min(below), max(below)], abs=0.6)  # the table is rounded


def cell(policy: str, trained: float, *, load: str = "one") -> Cell:
    return Cell(
        policy=policy,
        machine="A card, a model",
        load=load,
        goal_ms=20.0,
        ttft_goal_ms=500.0,
        margin=0.0,
        tokens_s=(trained,),
        cards=1,
        step50_ms=10.0,
        step99_ms=15.0,
        tpot99_ms=15.0,
        ttft99_ms=400.0,
        misses=0.0,
        busy=0.5,
        refused=0,
        requests=50,
        least_resident=1.0,
        memory_gb=5.0,
        needs_engine=False,
        note="2x",
    )


def group(load: str, ours: float) -> list[Cell]:
    return [cell(name, ours if name in shared.OURS else 100.0, load=load) for name in shared.POLICIES]


def test_a_table_made_again_never_leaves_the_old_words() -> None:
    assert "most in 2 of the 2 groups, by 15 % in the median and 20 % at most" in shared_reading(
        [*group("one", 110.0), *group("two", 120.0)]
    )
    worse = shared_reading([*group("one", 110.0), *group("two", 97.0)])
    assert "most in 1 of the 2 groups" in worse
    assert "A card, two at 2x: 0.97 of" in " ".join(worse.split())


def test_a_missed_target_never_goes_unsaid() -> None:
    cells = [replace(one, tpot99_ms=21.0) if one.policy == "granted" else one for one in group("one", 110.0)]

    assert "Targets missed by ours or by granted time: granted." in " ".join(shared_reading(cells).split())


def test_a_page_without_a_judged_group_claims_nothing() -> None:
    assert "nothing is claimed" in shared_reading([])


def test_ratios_are_counted_and_spans_printed_once() -> None:
    assert behind([0.9, 1.0, 0.98]) == "2 of 3 groups, by 2 to 10 %"
    assert behind([1.0, 1.2]) == "none of 2 groups"
    assert span([1.04, 1.2], 1) == "1.0 to 1.2"
    assert span([2.1, 2.2]) == "2"


def test_items_of_a_list_are_filled_one_by_one() -> None:
    assert prose("A head\nof two lines:\n\n- one\n  item\n- two") == "A head of two lines:\n\n- one item\n- two\n"
