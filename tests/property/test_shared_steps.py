"""The rung without a call per pause, as an engine's hook uses it: what is rung for, what is not, and who ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from grant_valved import GAP_MS, STEP_NS, Valved, Waiting, decoding, facts_of, grants_of, stop_time
from valve_hook.grants import MS, OPENED_NS, Asking

FAR_NS = 3600 * 1000 * MS


@pytest.fixture
def valved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valved]:
    stop_time(monkeypatch)
    valved = Valved()
    valved.by_slices()
    yield valved
    valved.close()


class Opened:
    """A hook that has been given its first pause; valved shares until far away."""

    def __init__(self, valved: Valved) -> None:
        self.valved, self.hook = valved, grants_of(valved)
        self.resume_ns = self.hook.wants(decoding(self.hook), facts_of())
        valved.share(FAR_NS + time.monotonic_ns())
        assert self.hook.pause(self.resume_ns, Waiting(valved), is_done=True)
        assert valved.rings == 1

    def step(self, after_ns: int = 0) -> int:
        now = time.monotonic_ns() + after_ns
        assert self.hook.follows
        self.hook.stepped(now - STEP_NS, now, 1, prefill=False)
        self.hook.delivered([("a", 1, False)], now)
        return now

    def pause(self, interrupts: int = -1) -> Waiting:
        """Wanted or not: what a pause of these 50 ms does."""
        wait = Waiting(self.valved, interrupts=interrupts)
        assert self.hook.pause(time.monotonic_ns() + 50 * MS, wait, is_done=True)
        return wait


def is_over(valved: Valved, hook: Asking) -> None:
    """By one ring."""
    assert valved.until_ns == 0
    assert valved.rings == 1
    hook.rested(time.monotonic_ns())
    assert valved.rings == 0


def test_a_pause_between_two_steps_is_never_a_ring(valved: Valved) -> None:
    opened = Opened(valved)
    for _ in range(50):
        opened.step()
        assert len(opened.pause().waited_s) == 1  # nobody is asked, and no answer is looked for
    assert valved.rings == 0
    assert opened.hook.sums.given == 51


def test_each_step_moves_the_end_on_and_never_beyond_the_gap_after_its_token(valved: Valved) -> None:
    opened = Opened(valved)
    for number in range(5):
        ends_ns = opened.step(number * STEP_NS) + GAP_MS * MS
        assert ends_ns - MS < valved.until_ns <= ends_ns + MS // 100  # floats of ms
    assert valved.rings == 0


def test_a_reader_that_got_no_token_is_never_shared_beyond_its_own_gap(valved: Valved) -> None:
    opened = Opened(valved)
    now = time.monotonic_ns()
    opened.hook.arrived("b", 10, now)
    opened.hook.delivered([("a", 1, False), ("b", 1, False)], now)
    for number in range(1, 4):  # b gets none
        opened.step(number * STEP_NS)

    assert valved.until_ns <= now + GAP_MS * MS + MS // 100


@pytest.mark.parametrize("is_short", [False, True], ids=["credit", "no credit"])
@pytest.mark.parametrize("fact", [{"waiting": 1}, {"prefilling": 1}, {"reclaim_pending": True}])
def test_whatever_is_no_step_ends_it_before_it_runs(valved: Valved, fact: dict[str, object], is_short: bool) -> None:
    """Also where the policy, short of credit, need not look at what the engine does."""
    opened = Opened(valved)
    assert opened.hook.policy is not None
    if is_short:
        opened.hook.policy._needed_ms = float("inf")
        assert opened.hook.wants(opened.step(), facts_of()) == 0
        assert valved.rings == 0
    assert opened.hook.wants(opened.step(), facts_of(**fact)) == 0
    is_over(valved, opened.hook)


def test_something_that_came_while_a_step_was_awaited_ends_it(valved: Valved) -> None:
    opened = Opened(valved)
    now = opened.step()
    assert opened.hook.still(now, facts_of()) == now
    assert valved.rings == 0
    assert opened.hook.still(now, facts_of(waiting=1)) == 0
    is_over(valved, opened.hook)


def test_a_request_that_comes_in_a_pause_ends_it(valved: Valved) -> None:
    opened = Opened(valved)
    opened.step()
    opened.pause(interrupts=0)
    is_over(valved, opened.hook)


@pytest.mark.parametrize("how", ["the last reader ends", "nothing to do", "the hook fails", "another target"])
def test_nothing_is_left_shared_behind_an_engine_that_steps_no_more(valved: Valved, how: str) -> None:
    opened = Opened(valved)
    opened.step()
    match how:
        case "the last reader ends":
            opened.hook.delivered([("a", 1, True)], time.monotonic_ns())
        case "nothing to do":
            opened.hook.rested(time.monotonic_ns())
        case "the hook fails":
            opened.hook.refuse("the hook failed")
        case _:
            valved.consent(30.0, GAP_MS)
            assert opened.hook.follows
    is_over(valved, opened.hook)


@pytest.mark.parametrize("how", ["closed", "its word has run out", "an older valved"])
def test_no_pause_is_waited_for_that_valved_has_ended(valved: Valved, how: str) -> None:
    """It is asked for anew; and what is given without an end is taken back behind the pause."""
    opened = Opened(valved)
    opened.step()
    valved.share({"closed": 0, "its word has run out": time.monotonic_ns(), "an older valved": 0}[how])

    wait = opened.pause()

    assert len(wait.waited_s) > 1  # an answer is looked for
    assert wait.asked_until_ns > 0
    assert valved.until_ns == 0


@pytest.mark.parametrize("how", ["dead", "consent"])
def test_without_valved_or_consent_nothing_is_rung(valved: Valved, how: str) -> None:
    opened = Opened(valved)
    if how == "dead":
        valved.grant = None
    else:
        valved.consent(40.0, GAP_MS, consented=0)
    opened.step()

    assert opened.hook.wants(time.monotonic_ns(), facts_of()) == 0
    assert not opened.hook.pause(time.monotonic_ns() + 50 * MS, Waiting(valved), is_done=True)
    opened.hook.rested(time.monotonic_ns())
    assert valved.rings == 0


def test_an_end_that_has_passed_is_never_left_for_valved_to_move_on(valved: Valved) -> None:
    """The hook's word lies ahead of it: valved would take it, and share the prompt that comes now."""
    opened = Opened(valved)
    valved.share(opened.step())
    assert valved.until_ns > time.monotonic_ns()

    assert opened.hook.wants(time.monotonic_ns(), facts_of(waiting=1)) == 0

    is_over(valved, opened.hook)


def test_an_older_valved_never_shares_a_step(valved: Valved) -> None:
    """It goes by slices, and says no end: the way back is the hook's own, before anything else runs."""
    hook = grants_of(valved)
    resume_ns = hook.wants(decoding(hook), facts_of())

    assert hook.pause(resume_ns, Waiting(valved), is_done=True)

    assert time.monotonic_ns() >= resume_ns
    assert (valved.until_ns, valved.rings) == (0, 2)
    now = time.monotonic_ns()
    hook.stepped(now - STEP_NS, now, 1, prefill=False)
    hook.delivered([("a", 1, False)], now)
    assert valved.until_ns == 0


def test_it_is_not_opened_more_often_than_the_gate_rung_may(valved: Valved) -> None:
    opened = Opened(valved)
    valved.share(0)
    opened.pause()  # of 50 ms: opened anew so long ago

    assert opened.hook.wants(opened.step(), facts_of()) == 0
    assert opened.hook.wants(opened.step(OPENED_NS), facts_of()) > 0
