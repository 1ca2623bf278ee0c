"""Promise P10 on what ships: the hook's own asking half, on both rungs, serves a load in virtual time.

The lab judges the policy alone over many loads; that it is the very class which the hook asks is shown here.
"""

from __future__ import annotations

from functools import cache

import pytest
from paced_engine import MS, PacedEngine, Terms, paced
from valve_hook import grants
from valve_tools.bench.row import percentile
from valve_tools.lab.granted import sweep
from valve_tools.lab.granted.engine import Load
from valve_tools.sim.generator import generate

MOST_OVER = 0.01
TTFT, TTFT_FAR, FAR = 1.05, 1.10, 3.0
RUNGS = pytest.mark.parametrize("by_slices", [False, True], ids=["gate", "timeslice"])


@cache
def chat() -> Load:
    trace = next(trace for trace in generate().traces if trace.name == "chat")
    return Load.of(trace, 400.0)


@pytest.fixture(scope="module")
def alone() -> PacedEngine:
    with pytest.MonkeyPatch.context() as patch:
        return paced(chat(), None, patch)


def solo_ms(alone: PacedEngine) -> float:
    return sum(each.tpot_ms for each in alone.done) / len(alone.done)


def over(engine: PacedEngine, tpot_ms: float) -> float:
    return sum(each.tpot_ms > tpot_ms for each in engine.done) / len(engine.done)


def ttft_p99(engine: PacedEngine) -> float:
    return percentile(sorted(each.ttft_ms for each in engine.done), 0.99)


def share(engine: PacedEngine) -> float:
    """Of the time, offline's."""
    return (engine.idle_ns + engine.valved.granted_ns) / engine.now_ns


@RUNGS
@pytest.mark.parametrize("times", [1.5, 4.0])
def test_p10_holds_on_the_hook_that_ships(
    alone: PacedEngine, by_slices: bool, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = Terms(tpot_ms=times * solo_ms(alone), by_slices=by_slices)
    granted = paced(chat(), terms, monkeypatch)
    given = granted.asking.sums

    assert len(granted.done) == len(alone.done)
    assert over(alone, terms.tpot_ms) == 0
    assert over(granted, terms.tpot_ms) <= MOST_OVER
    assert ttft_p99(granted) <= ttft_p99(alone) * (TTFT if times <= FAR else TTFT_FAR)
    assert granted.longest_pause_ns <= terms.gap_ms * MS
    assert granted.shared_prompts == 0
    assert given.given > 100
    assert share(granted) > share(alone)
    rung = sum(rings > 0 for rings in granted.rings_by_pause)
    if by_slices:
        assert rung <= granted.valved.openings + granted.valved.asked_open + given.ended_early  # no other pause rings
        assert rung < given.given / 2
    else:
        assert rung == given.given


@RUNGS
def test_a_service_that_misses_its_target_alone_is_never_paused(
    alone: PacedEngine, by_slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = Terms(tpot_ms=0.9 * solo_ms(alone), by_slices=by_slices)
    granted = paced(chat(), terms, monkeypatch)

    assert granted.asking.sums.given == granted.valved.openings == 0
    assert [each.last_ns for each in granted.done] == [each.last_ns for each in alone.done]


def test_steps_beside_offline_work_that_are_slower_than_the_target_miss_nothing(
    alone: PacedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They spend credit, and end while the next token still comes in time; and what each costs ends granting."""
    terms = Terms(tpot_ms=2 * solo_ms(alone), by_slices=True, slowed=4.0)
    granted = paced(chat(), terms, monkeypatch)

    assert over(granted, terms.tpot_ms) <= MOST_OVER
    assert granted.valved.openings > 0


def test_the_lab_judges_the_class_that_the_hook_asks() -> None:
    assert sweep.GrantPolicy is grants.GrantPolicy
