"""A short `valve demo granted`: the two-minute one is the same with more requests."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from valve_tools.demo import stalls
from valve_tools.demo.endings import EXIT_VOID
from valve_tools.demo.granted import GrantedDemo, GrantedFigures, GrantedPlan, perform, settled, verdict
from valve_tools.demo.granted_service import OpenRequest
from valve_tools.demo.node import EmulatedNode
from valve_tools.demo.stalls import Stalls, StallWatch, outside

pytestmark = pytest.mark.timeout(1800)  # ends only a hung test
TRIES = 10
MS = 1_000_000


def until(is_so: Callable[[GrantedFigures], bool], runs: Callable[[int], list[GrantedFigures]]) -> list[GrantedFigures]:
    """The first runs whose last one is so. On a machine that stalls valved may refuse each pause of a run."""
    for number in range(TRIES):
        found = runs(number)
        assert not [run for run in found if not run.offline_ok]
        if is_so(found[-1]):
            return found
    raise AssertionError(f"never so in {TRIES} runs, the last of them {found[-1]}")


def test_offline_work_gets_pauses_with_consent_and_none_without(tmp_path: Path) -> None:
    """What a stalling machine cannot change. How much is granted, and which target is kept, is told on virtual time."""
    plan = GrantedPlan(requests=40, rate=8.0, tpot_ms=120.0, gap_ms=3000.0, hasty=True)

    def runs(number: int) -> list[GrantedFigures]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return perform(plan, folder)

    without, consenting = until(lambda run: run.grants > 0 and run.granted_s > 0, runs)

    any_pace = replace(plan, tpot_ms=float("inf"))
    assert verdict([without, replace(consenting, offline_share=2.0)], any_pace) == (0, [])
    assert without.grants == without.pauses == 0
    assert "consents to no pauses" in without.words
    assert without.requests == consenting.requests == plan.requests
    code, words = verdict([without, consenting], replace(plan, tpot_ms=0.0))
    assert code == EXIT_VOID  # alone it misses, too
    assert words[1] == "VOID: 40 of 40 requests missed 0 ms a token: without any pause, too"


def figures(*, consents: bool, tpots_ms: list[float], **other: Any) -> GrantedFigures:
    usual = {"words": "", "ttft_p99_ms": 1.0, "tpot_ms": 1.0, "tpot_p99_ms": 1.0, "longest_ms": 60.0}
    usual |= {"longest_plain_ms": 60.0, "offline_share": 0.5, "grants": int(consents), "pauses": 1, "broken": 0}
    usual |= {
        "granted_s": 1.0,
        "cost_ms": None,
        "worth": None,
        "offline_ok": True,
        "stood_share": 0.0,
    }
    usual |= {"requests": len(tpots_ms), "stood_ms": [0.0] * len(tpots_ms), "gaps": 200, "gaps_paused": 100}
    usual |= {"gaps_spoilt": 5}
    return GrantedFigures(consents=consents, tpots_ms=tpots_ms, **{**usual, **other})


CALM = [20.0] * 100
LATE = [60.0] * 10 + [20.0] * 90


@pytest.mark.parametrize(
    ("tpots_ms", "other", "code"),
    [
        (CALM, {}, 0),
        (CALM, {"longest_plain_ms": 110.0}, 0),
        (CALM, {"longest_plain_ms": 111.0}, EXIT_VOID),
        (CALM, {"longest_plain_ms": 169.0}, EXIT_VOID),
        (CALM, {"longest_plain_ms": 170.0}, 1),
        (CALM, {"longest_plain_ms": 300.0, "stood_share": 0.5}, 1),
        (LATE, {}, 1),
        (LATE, {"stood_ms": [25.0] * 100}, EXIT_VOID),
        (LATE, {"stood_ms": [5.0] * 100}, 1),
        (CALM, {"longest_plain_ms": 111.0, "offline_ok": False}, 1),
        (CALM, {"grants": 0}, 1),
        (CALM, {"grants": 0, "stood_share": 0.05}, EXIT_VOID),
        (CALM, {"offline_share": 0.5}, EXIT_VOID),
        (CALM, {"gaps_spoilt": 11}, EXIT_VOID),
        (CALM, {"gaps_spoilt": 10}, 0),
        (CALM, {"gaps_spoilt": 11, "longest_plain_ms": 300.0}, 1),
    ],
)
def test_what_a_stall_of_the_machine_made_is_void_and_never_a_failure(
    tpots_ms: list[float], other: dict[str, Any], code: int
) -> None:
    """And nothing else is: only as far as it stood still."""
    without = figures(consents=False, tpots_ms=CALM)
    consenting = figures(consents=True, tpots_ms=tpots_ms, **{"offline_share": 0.6, **other})

    assert verdict([without, consenting], GrantedPlan())[0] == code


def test_a_stall_is_counted_by_the_core_that_stood_still_longest() -> None:
    stalls = Stalls({0: [(0, 30), (100, 120)], 1: [(50, 95)]})

    assert (stalls.within(0, 200), stalls.within(10, 110), stalls.within(200, 300)) == (50, 45, 0)
    assert outside([(0, 10), (20, 90)], [(5, 30), (40, 50), (95, 99)]) == [(0, 5), (30, 40), (50, 90)]


def test_a_pause_beside_slices_is_no_grant_of_its_own(tmp_path: Path) -> None:
    """One grant holds many: valved opens, and the hook's pauses ask nobody. A stall longer than the gap ends one."""
    plan = GrantedPlan(requests=8, rate=8.0, tpot_ms=120.0, gap_ms=1000.0, hasty=True, rung="timeslice")
    with EmulatedNode(tmp_path, config=plan.config()) as node:
        until(
            lambda run: 0 < run.grants <= 0.75 * run.pauses,  # the last status may lack a grant or two
            lambda _: [GrantedDemo(node, plan).run(consents=True, rate=1.0)],
        )


def test_a_pause_never_hides_behind_the_prompt_that_ends_it() -> None:
    """And the step of a prompt is not taken for a pause."""
    asked = OpenRequest(name="a", prompt=1, tokens=9, arrived_ns=0)
    for now_ns, prompts in ((10, []), (30, [(4, 10)]), (90, [(70, 75), (76, 80)]), (95, [])):
        asked.token(now_ns, prompts, [])

    assert asked.longest_ns == 60
    assert asked.gaps == [[(10, 30)], [(30, 70), (75, 76), (80, 90)], [(90, 95)]]


def told(tmp_path: Path, stalls: Stalls, *gaps_ms: int, pauses: tuple[tuple[int, int], ...] = ()) -> GrantedFigures:
    """Of two requests with these gaps each, the first of which begins at 100 ms, and a target that no run misses."""
    asked = OpenRequest(name="a", prompt=1, tokens=9, arrived_ns=0)
    for at_ms in accumulate([100, *gaps_ms]):
        asked.token(at_ms * MS, [], [(begin * MS, end * MS) for begin, end in pauses if end <= at_ms])
    job_out = tmp_path / "job.out"
    job_out.write_text('{"summary": true, "now_s": 0.0, "units": 1, "wall_s": 1.0, "ok": true}\n')
    summary = {"requests": [asked.row(), {**asked.row(), "arrived_s": 1.0}], "given": 1, "cost_ms": 1.0, "worth": 0.1}
    granted = SimpleNamespace(words="", grants=1, broken=0, granted_ns=MS)
    found = GrantedDemo(None, GrantedPlan(hasty=True))._figures(granted, summary, job_out, True, 1.0, stalls)
    return replace(found, tpots_ms=CALM, requests=len(CALM), stood_ms=[0.0] * len(CALM), offline_share=0.6)


def test_time_in_which_the_machine_stood_still_never_makes_a_gap_longer(tmp_path: Path) -> None:
    stalls = Stalls({0: [(150 * MS, 250 * MS)], 1: [(295 * MS, 299 * MS)]})

    found = told(tmp_path, stalls, 40, 150, 10, 80)

    assert (found.gaps, found.gaps_paused, found.gaps_spoilt, found.longest_plain_ms) == (8, 0, 0, 80.0)


def test_a_pause_that_is_too_long_never_hides_behind_a_stall_in_it(tmp_path: Path) -> None:
    """The hook meant to wait for three times the gap; for most of it the machine stood still, which took no time."""
    stalls = Stalls({0: [(120 * MS, 395 * MS)], 1: [(120 * MS, 395 * MS)]})
    found = told(tmp_path, stalls, 310, 10, 10, 10, pauses=((101, 400),))

    code, words = verdict([figures(consents=False, tpots_ms=CALM), found], GrantedPlan())

    assert (code, words) == (1, ["310 ms between two tokens, less prompts; 100 ms are stated"])


def test_a_stall_after_the_end_of_a_pause_is_none_of_the_hooks(tmp_path: Path) -> None:
    """The wait ended late, or the step after it."""
    stalls = Stalls({0: [(50 * MS, 150 * MS), (195 * MS, 300 * MS)]})
    found = told(tmp_path, stalls, 205, *[85] * 18, pauses=((100, 190),))

    assert (found.gaps_paused, found.gaps_spoilt, found.longest_plain_ms) == (2, 2, 100.0)


def test_a_gap_never_hides_behind_a_stall_that_is_shorter_than_what_it_took_too_long(tmp_path: Path) -> None:
    """However few such gaps there are: a hook that waits for 3 s is no machine that stood still for 12 ms."""
    found = told(tmp_path, Stalls({0: [(500 * MS, 512 * MS)]}), 10, 3000, *[10] * 90)

    code, words = verdict([figures(consents=False, tpots_ms=CALM), found], GrantedPlan())

    assert (code, words) == (1, ["2988 ms between two tokens, less prompts; 100 ms are stated"])


def test_a_round_that_the_machine_spoilt_is_made_again_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure never gets a second chance, and rounds that are all spoilt are no pass."""
    without, void = figures(consents=False, tpots_ms=CALM), {"gaps_spoilt": 11}
    kept, missed = {"offline_share": 0.6}, {"longest_plain_ms": 300.0}

    def ends(*each: dict[str, Any]) -> tuple[int, str]:
        def make(number: int) -> list[GrantedFigures]:
            return [without, figures(consents=True, tpots_ms=CALM, **{**kept, **each[number - 1]})]

        code, _, words = settled(GrantedPlan(rounds=3), make)
        return code, words

    spoilt = "rounds made again because this machine spoilt them"
    assert ends(kept) == (0, f"kept, by round 1 of at most 3; {spoilt}: 0")
    assert ends(void, kept) == (0, f"kept, by round 2 of at most 3; {spoilt}: 1")
    assert ends(void, missed, kept) == (1, f"MISSED, by round 2 of at most 3; {spoilt}: 1")
    assert ends(void, void, void, kept) == (EXIT_VOID, f"VOID, by round 3 of at most 3; {spoilt}: 2")
    said = capsys.readouterr().err
    assert said.count(" of at most 3: VOID: 11 of 100 gaps") == 5
    assert said.count(" of at most 3 begins\n") == 8, "a round takes minutes: none is silent"


def test_what_a_process_of_valve_ran_is_never_taken_for_a_stall_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own. Of three waits that end 30 ms late, Valve ran all of the second and half of the third."""
    clock = {"now": 0, "own": 0}
    waits = deque([(35, 0), (35, 30), (35, 15), (5, 0)])
    watch = StallWatch(os.getpid())

    def sleep(_: float) -> None:
        taken, ran = waits.popleft()
        clock["now"] += taken * MS
        clock["own"] += ran * MS
        if not waits:
            watch._is_over.set()

    monkeypatch.setattr(stalls, "time", SimpleNamespace(sleep=sleep, monotonic_ns=lambda: clock["now"]))
    monkeypatch.setattr(StallWatch, "_own_ns", lambda _: clock["own"])
    monkeypatch.setattr(stalls.os, "sched_setaffinity", lambda *_: None)
    watch._watch(0)

    assert watch.stalls.spans[0] == [(5 * MS, 35 * MS), (90 * MS, 105 * MS)]


def test_the_processor_time_of_a_process_is_read_and_that_of_one_that_is_gone_is_none() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    own_ns = StallWatch(os.getpid())._own_ns()
    assert 0 < own_ns <= time.process_time_ns()
    assert StallWatch(ended.pid)._own_ns() == 0
