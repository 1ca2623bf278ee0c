"""The end of a stop of a process's own, and of a service's hold, in every order of the steps of all that takes part.

A service with open requests; its watcher, which may stand still; valved's listener and loop, with messages under way to
and from an offline process whose link was lost once, and whose threads may stand still between any two steps. A step
that comes late is a stall of whoever takes it, or of the process that has it.

Never a channel that is on while the service is busy and its gate is closed, and never one that stays off. Each changed
rule breaks one of these, and is found. All but the last are what Valve did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from explore import explore

CHANGES = 3  # of the service


class State(NamedTuple):
    # the service: open requests, and how old its word of them is; rings are heard by the listener
    busy: bool = True
    changes: int = 0
    stale: bool = False  # its watcher stands still, and what it told is too old to be believed
    asked: bool = True  # it was asked to watch a moment ago
    bell: bool = False
    # the listener
    word: bool = False  # open
    looked: str = ""  # wake: it has decided, opened: the word is open
    held: bool = True
    # the loop, and the socket between it and the offline process
    armed: bool = False
    question: str = ""  # asked, answered: run or handed
    done: bool = False  # on its way: I ran, or switch nothing any more
    # the offline process
    chosen: bool = False  # its report, by another thread
    sent: bool = False
    stopped: bool = True  # by its own hand
    owes_done: bool = False
    # the driver
    on: bool = False


class Variant(NamedTuple):
    """What is done otherwise than it should be."""

    enables_late: bool = False  # the process ends its stop by an enable of its own
    asks_untold: bool = False  # before all that it has chosen to tell is sent
    believes_silence: bool = False  # a watcher that was just asked to watch counts as alive, whatever it told
    looks_once: bool = False  # requests are not looked for again once the word is open
    forgets_done: bool = False  # valved runs nothing at SCHEDULE_DONE


RIGHT = Variant()


def service(s: State, variant: Variant) -> Iterator[State]:
    if s.changes < CHANGES:
        rings = not s.busy and s.word
        yield s._replace(busy=not s.busy, changes=s.changes + 1, stale=False, bell=s.bell or rings)
    if not s.stale:
        yield s._replace(stale=True)
    if s.asked:
        yield s._replace(asked=False)


def believes_idle(s: State, variant: Variant) -> bool:
    if s.stale:
        return s.asked and variant.believes_silence
    return not s.busy


def listener(s: State, variant: Variant) -> Iterator[State]:
    if s.bell and not s.looked:
        yield s._replace(bell=False, word=False, held=True, on=s.on and not s.armed)
        return
    if s.held and not s.looked and believes_idle(s, variant):
        yield s._replace(looked="wake")
    if s.looked == "wake":
        yield s._replace(looked="opened", word=True)
    if s.looked == "opened":
        if variant.looks_once or believes_idle(s, variant):
            yield s._replace(looked="", held=False, on=s.on or s.armed)
        else:
            yield s._replace(looked="", word=False)


def loop(s: State, variant: Variant) -> Iterator[State]:
    if s.sent and not s.armed:
        yield s._replace(armed=True, on=not s.held)
    knows_all = s.armed or not s.sent  # as far as it knows
    if s.question == "asked" and not s.held and knows_all:
        yield s._replace(question="handed" if s.armed and not variant.enables_late else "run")
    if s.done:
        runs = s.armed and not s.held and not variant.forgets_done
        yield s._replace(done=False, on=(s.on or runs) and not (s.held and s.armed))


def process(s: State, variant: Variant) -> Iterator[State]:
    if not s.chosen:
        yield s._replace(chosen=True)
    elif not s.sent:
        yield s._replace(sent=True)
    may_ask = s.sent or (s.chosen and variant.asks_untold)
    if may_ask and s.stopped and not s.question:
        yield s._replace(question="asked")
    if s.question in ("run", "handed"):
        yield s._replace(question="", stopped=False, owes_done=True, on=s.on or s.question == "run")
    if s.owes_done:
        yield s._replace(owes_done=False, done=True)


def work(s: State, variant: Variant) -> Iterator[State]:
    yield from listener(s, variant)
    yield from loop(s, variant)
    yield from process(s, variant)
    if s.stale:
        yield s._replace(stale=False, asked=False)  # some time it goes on


def whims(s: State, variant: Variant) -> Iterator[State]:
    yield from service(s, variant)
    if s.stopped and s.on:
        yield s._replace(on=False)  # its stop is made again: another channel came


def wrong(s: State, is_still: bool) -> str:
    if s.on and s.busy and s.held and not s.bell and not s.looked:
        return "offline work beside a service whose gate is closed"
    if s.busy and not s.held and not s.bell and not s.looked:
        return "a gate that is open to requests that nobody hears of"
    if is_still and not s.busy and not s.on:
        return "a channel that stays off"
    return ""


def outcome(variant: Variant) -> tuple[int, set[str]]:
    return explore(State(), lambda s: work(s, variant), lambda s: whims(s, variant), wrong)


def test_no_order_of_steps_lets_offline_work_run_beside_a_busy_service_and_none_leaves_it_off() -> None:
    states, found = outcome(RIGHT)

    assert not found
    assert states > 500


@pytest.mark.parametrize(
    ("variant", "breaks"),
    [
        (Variant(enables_late=True), "offline work beside a service whose gate is closed"),
        (Variant(asks_untold=True), "offline work beside a service whose gate is closed"),
        (Variant(believes_silence=True), "a gate that is open to requests that nobody hears of"),
        (Variant(looks_once=True), "a gate that is open to requests that nobody hears of"),
        (Variant(forgets_done=True), "a channel that stays off"),
    ],
)
def test_another_rule_is_found_out(variant: Variant, breaks: str) -> None:
    assert breaks in outcome(variant)[1]
