"""The hold of launches over a lost link (shim/src/link/pages.c) in every interleaving.

Two links that are lost, by the death of valved or under one that lives; a service that comes, goes, and is late to come
back; an answer that comes late.

Never a launch beside the service for which it waited as the link was lost, and which has not stopped since; never
launches that wait for ever. Each changed rule breaks one of these, and is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from explore import explore

LOSSES = 2


class State(NamedTuple):
    # the service, and whether the present valved knows of it: one that has just begun holds until it does
    busy: bool = False
    known: bool = True
    # valved
    alive: bool = True
    armed: bool = True
    word: bool = False  # held, in the control page of the present link
    old: bool = False  # and in that of the last one
    # the offline process
    linked: bool = True
    losses: int = 0
    launches: str = "told"
    request: str = ""  # may my launches go on: asked, go, again
    owed: bool = False  # they waited for the service as the link was lost, and it has not stopped since


class Variant(NamedTuple):
    """What is done otherwise than it should be."""

    follows_new_pages: bool = False
    follows_old_pages: bool = False
    asks_nobody: bool = False
    takes_any_answer: bool = False
    answers_unasked_service: bool = False  # a valved that has just begun takes its empty books for the truth


RIGHT = Variant()


def waits(s: State) -> bool:
    if s.launches == "told":
        return s.word if s.linked else s.old
    return True


def shim(s: State, variant: Variant) -> Iterator[State]:
    if s.linked and not s.alive:
        yield lost(s, variant)
    if not s.linked and s.alive:
        keeps = waits(s) and not variant.follows_new_pages
        yield s._replace(linked=True, word=False, armed=False, launches="kept" if keeps else "told")
    if s.linked and s.launches == "kept" and not s.request and not variant.asks_nobody:
        yield s._replace(request="asked")
    if s.linked and s.request in ("go", "again"):
        may = s.request == "go" or variant.takes_any_answer
        yield s._replace(request="", launches="told" if may else s.launches)


def lost(s: State, variant: Variant) -> State:
    held = waits(s)
    ours = held and not variant.follows_old_pages
    return s._replace(
        linked=False,
        losses=s.losses + 1,
        old=held,
        launches="ours" if ours else "told",
        request="",
        owed=s.owed or (s.busy and held),
    )


def valved(s: State, variant: Variant) -> Iterator[State]:
    if not s.alive:
        yield s._replace(alive=True, known=False)
        return
    if not s.known:
        yield s._replace(known=True)
    if s.linked and not s.armed:
        yield s._replace(armed=True)
    if s.linked and s.armed and s.known and s.word != s.busy:
        yield s._replace(word=s.busy)
    if s.request == "asked" and s.armed and not (s.busy and s.known) and (s.known or variant.answers_unasked_service):
        yield s._replace(request="go")
    if not s.linked and s.old:  # whose link is gone has no channels in its books
        yield s._replace(old=False)


def work(s: State, variant: Variant) -> Iterator[State]:
    yield from shim(s, variant)
    yield from valved(s, variant)


def whims(s: State, variant: Variant) -> Iterator[State]:
    """What may happen at any time, or never."""
    yield s._replace(busy=not s.busy, owed=s.owed and not s.busy)
    if s.request == "asked":
        yield s._replace(request="again")
    if s.alive and s.linked and s.losses < LOSSES:
        yield lost(s, variant)
        yield s._replace(alive=False)


def wrong(s: State, is_still: bool) -> str:
    if s.owed and not waits(s):
        return "a launch beside the service"
    if is_still and not s.busy and waits(s):
        return "launches that wait for ever"
    return ""


def outcome(variant: Variant) -> tuple[int, set[str]]:
    return explore(State(), lambda s: work(s, variant), lambda s: whims(s, variant), wrong)


def test_no_loss_of_a_link_lets_a_launch_go_on_that_waits_and_none_waits_for_ever() -> None:
    states, found = outcome(RIGHT)

    assert not found
    assert states > 200


@pytest.mark.parametrize(
    ("variant", "breaks"),
    [
        (Variant(follows_new_pages=True), "a launch beside the service"),
        (Variant(follows_old_pages=True), "a launch beside the service"),
        (Variant(asks_nobody=True), "launches that wait for ever"),
        (Variant(takes_any_answer=True), "a launch beside the service"),
        (Variant(answers_unasked_service=True), "a launch beside the service"),
    ],
)
def test_another_rule_is_found_out(variant: Variant, breaks: str) -> None:
    assert breaks in outcome(variant)[1]
