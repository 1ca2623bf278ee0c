"""The argument of slice.c in every interleaving: a GPU that one service holds and shares, an end that each step of its
engine moves on, another service that holds in the middle of it, a second engine of the same service that launches, an
end that passes while it is being moved on, an offline process that stops itself, a hook that takes it back or steps no
more, and the death of hook and valved at every step.

Never offline work beside a second holder; never an open gate after its end and the process's own stop, beyond the gap
after the last step, beside a second engine beyond the end that stood at its launch, or after the hook took it back;
never channels that stay off while the GPU is shared. Each changed order breaks one of these, and is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from explore import explore

STEPS = 2  # of the engine; the gap after step k is the end number k
HOLDS = 1  # by the other service
NOBODY = -1


class State(NamedTuple):
    # the listener
    listener: str = "idle"
    slicing: bool = False
    sliced: bool = False  # the GPU's bit
    ends: int = 0  # the last that was set
    until: int = 0
    moved: int = 0  # it has looked, and is about to move the end on to this one
    alive: bool = True
    # the hook
    steps: int = 0
    taken: bool = False  # it has taken it back, or is dead: its ring, or the end of its link, is heard
    # a second engine of the service: once it has launched, the last end that stood then, was about to, or was told
    second: int = NOBODY
    # whoever else holds: a ring, the brake, a move of memory
    other: str = "idle"
    holds: int = 0
    saw: bool = False
    holders: int = 1
    heard: bool = False  # the listener was kicked; it looks at holders and hook then, else only at the time
    # the issuer
    issuer: str = "idle"
    kicked: bool = False  # it looks when it was kicked, else by its timer
    state: str = "stopped"
    loaded: int = 0
    # the offline process
    shim: str = "idle"
    told: int = 0
    claim: int = 0
    done: int = 0
    dealt: int = 0
    again: bool = False
    on: bool = False
    # the clock: ends that are over
    over: int = 0


class Variant(NamedTuple):
    """What is done otherwise than it should be."""

    trusts_the_bit: bool = False  # nobody looks at the holders again
    clears_end_first: bool = False
    ignores_claims: bool = False
    tells_unlooked: bool = False  # the moved end is told to a GPU that is held by now
    looks_once: bool = False  # who holds looks at the GPU's bit before it counts, and not again
    trusts_the_word: bool = False  # the end moves on with the hook's word alone, without a step
    deaf: bool = False  # the hook's ring is heard as a wish like any other
    silent: bool = False  # a hook that sees its end passed does not ring: a renewal that comes late goes unheard
    shares_beside_a_second: bool = False  # nobody looks for a second engine of the service


RIGHT = Variant()


def is_shared(s: State, variant: Variant) -> bool:
    return s.sliced and (s.holders == 1 or variant.trusts_the_bit)


def listener(s: State, variant: Variant) -> Iterator[State]:
    match s.listener:
        case "idle" if not s.slicing:
            is_free = s.holders == 1 and s.state == "stopped" and not s.until and is_sole(s, variant)
            if s.steps > max(s.ends, s.over) and is_free:
                end = s.steps
                yield s._replace(listener="share", slicing=True, ends=end, until=end, kicked=True, taken=False)
        case "idle":
            is_broken = not s.sliced or (s.holders > 1 and not variant.trusts_the_bit)
            is_over = (s.taken and not variant.deaf) or not is_sole(s, variant)
            if s.over >= s.until or (s.heard and (is_broken or is_over)):
                yield s._replace(listener="close", heard=False)
            elif s.heard:
                yield s._replace(heard=False)
            yield from moving_on(s, variant, ends=is_broken or is_over)
        case "move":
            yield s._replace(listener="idle", until=s.moved, moved=0, kicked=True)
        case "share":
            yield s._replace(listener="look", sliced=True)
        case "look":
            is_alone = s.holders == 1 or variant.trusts_the_bit
            is_alone &= s.sliced
            yield s._replace(listener="idle", kicked=True) if is_alone else s._replace(listener="close")
        case "close" if variant.clears_end_first:
            yield s._replace(listener="unshare", until=0, kicked=True)
        case "unshare":
            yield s._replace(listener="idle", sliced=False, slicing=False)
        case "close":
            yield s._replace(listener="clear", sliced=False)
        case "clear":
            yield s._replace(listener="idle", until=0, slicing=False, kicked=True)


def moving_on(s: State, variant: Variant, *, ends: bool) -> Iterator[State]:
    """The engine has stepped: the listener looks at its time, and finds whatever ended it meanwhile, too. Until it has
    moved the end on, anything may come between, the end itself as well.
    """
    end = s.until + 1 if variant.trusts_the_word else s.steps
    if s.over < s.until < end <= STEPS and not ends:
        yield s._replace(listener="move", ends=end, moved=end)


def is_sole(s: State, variant: Variant) -> bool:
    return s.second == NOBODY or variant.shares_beside_a_second


def second(s: State) -> Iterator[State]:
    """Its launches ring nobody."""
    if s.second == NOBODY:
        yield s._replace(second=max(s.moved, s.until, s.loaded, s.told))


def hook(s: State, variant: Variant) -> Iterator[State]:
    """It may do nothing at any time, and for ever: then it hangs."""
    if s.steps < STEPS:
        yield s._replace(steps=s.steps + 1)
    if s.slicing and not s.taken:
        is_passed = bool(s.until) and s.over >= s.until
        yield s._replace(taken=True, heard=not (variant.silent and is_passed))


def other(s: State, variant: Variant) -> Iterator[State]:
    if s.other == "idle" and s.holds < HOLDS:
        yield s._replace(other="count", holds=s.holds + 1, saw=s.sliced)
    if s.other == "count":
        after = "break" if s.saw else "held" if variant.looks_once else "look"
        yield s._replace(other=after, holders=s.holders + 1)
    if s.other == "look":
        yield s._replace(other="break" if s.sliced else "held")
    if s.other == "break":
        yield s._replace(other="kick", sliced=False, heard=True)
    if s.other == "kick":
        yield s._replace(other="held", kicked=True)


def issuer(s: State, variant: Variant) -> Iterator[State]:
    shared = is_shared(s, variant)
    match s.issuer:
        case "idle" if not s.kicked:
            pass
        case "idle" if not shared and s.state != "stopped":
            yield s._replace(issuer="disable")
        case "idle" if shared and s.state == "stopped":
            yield s._replace(issuer="leave", loaded=s.until)
        case "idle" if shared and s.state == "watched" and s.told != s.until:
            yield s._replace(issuer="read")
        case "idle":
            yield s._replace(kicked=False)  # nothing left to do: it sleeps
        case "disable":
            yield s._replace(issuer="clear", on=False)
        case "clear":
            yield s._replace(issuer="idle", told=0, state="stopped")
    yield from enabling(s, variant)
    yield from following(s, variant)


def enabling(s: State, variant: Variant) -> Iterator[State]:
    """As for any wake: the end is told first, and stops of the process's own are waited for."""
    shared = is_shared(s, variant)
    match s.issuer:
        case "leave":
            yield s._replace(issuer="look", state="enabling")
        case "look":
            yield s._replace(issuer="tell") if shared else s._replace(issuer="idle", state="stopped")
        case "tell":
            yield s._replace(issuer="wait", told=s.loaded)
        case "wait" if s.claim == s.done or variant.ignores_claims:
            yield s._replace(issuer="enable")
        case "enable":
            yield s._replace(issuer="check", on=True)
        case "check" if s.until == s.loaded or not shared:
            yield s._replace(issuer="idle", state="watched")
        case "check":
            yield s._replace(issuer="tell", loaded=s.until)


def following(s: State, variant: Variant) -> Iterator[State]:
    """The end has moved on."""
    match s.issuer:
        case "read":
            yield s._replace(issuer="follow", loaded=s.until)
        case "follow" if is_shared(s, variant) or variant.tells_unlooked:
            yield s._replace(issuer="claims", told=s.loaded)
        case "follow":
            yield s._replace(issuer="idle")
        case "claims":
            is_claimed = s.claim not in (0, s.loaded) and not variant.ignores_claims
            yield s._replace(issuer="tell" if is_claimed else "idle")


def offline(s: State) -> Iterator[State]:
    """As in test_grant_protocol.py."""
    if s.shim == "idle" and s.dealt and s.told != s.dealt and (s.alive or not s.told):
        yield s._replace(dealt=0, again=False)
    if s.shim == "idle" and s.dealt and not s.again and s.told and not s.alive:
        yield s._replace(on=False, dealt=s.told, again=True)
    if s.shim == "idle" and not s.dealt and s.told and s.over >= s.told:
        yield s._replace(shim="claimed", claim=s.told)
    if s.shim == "claimed":
        yield s._replace(shim="stop" if s.told == s.claim else "say")
    if s.shim == "stop":
        yield s._replace(shim="say", on=False, dealt=s.claim, again=not s.alive)
    if s.shim == "say":
        yield s._replace(shim="idle", done=s.claim)


def work(s: State, variant: Variant) -> Iterator[State]:
    yield from offline(s)
    if s.alive:
        yield from (each for each in listener(s, variant) if each.ends == s.ends)
        yield from issuer(s, variant)
        yield from (each for each in other(s, variant) if s.other != "idle")


def whims(s: State, variant: Variant) -> Iterator[State]:
    """What may happen at any time, or never."""
    if s.alive:
        yield from (each for each in listener(s, variant) if each.ends > s.ends)  # the hook asks, or steps
        yield from (each for each in other(s, variant) if s.other == "idle")
        yield s._replace(alive=False)
        yield s._replace(kicked=True)  # its timer, at any time or never
    yield from hook(s, variant)
    yield from second(s)
    if s.over < max(s.ends, s.steps):
        yield s._replace(over=s.over + 1)


def wrong(s: State, is_still: bool) -> str:
    if not is_still:
        return ""
    if s.on and s.holders > 1 and s.alive:
        return "beside a second holder"
    if s.on and s.told and s.over >= s.told:
        return "open after its end"
    if s.on and not s.told:
        return "open without an end"
    if s.on and s.over >= s.steps:
        return "beyond the gap after the last step"
    if s.on and s.second != NOBODY and s.over >= s.second:
        return "beside a second engine beyond the end at its launch"
    if s.on and s.alive and s.taken:
        return "after the hook took it back"
    if s.alive and s.slicing and is_sole(s, RIGHT) and s.over < s.until and s.holders == 1 and not s.on:
        return "channels that stay off while shared"
    return ""


def outcome(variant: Variant, enough: str = "") -> tuple[int, set[str]]:
    return explore(State(), lambda s: work(s, variant), lambda s: whims(s, variant), wrong, enough)


def test_no_order_of_steps_and_no_death_shares_with_a_second_holder_or_beyond_the_end() -> None:
    states, found = outcome(RIGHT)

    assert not found
    assert states > 100_000


@pytest.mark.parametrize(
    ("variant", "breaks"),
    [
        (Variant(trusts_the_bit=True), "beside a second holder"),
        (Variant(clears_end_first=True), "open without an end"),
        (Variant(ignores_claims=True), "channels that stay off while shared"),
        (Variant(tells_unlooked=True), "open without an end"),
        (Variant(looks_once=True), "beside a second holder"),
        (Variant(trusts_the_word=True), "beyond the gap after the last step"),
        (Variant(deaf=True), "after the hook took it back"),
        (Variant(silent=True), "after the hook took it back"),
        (Variant(shares_beside_a_second=True), "beside a second engine beyond the end at its launch"),
    ],
)
def test_another_order_of_steps_is_found_out(variant: Variant, breaks: str) -> None:
    assert breaks in outcome(variant, enough=breaks)[1]
