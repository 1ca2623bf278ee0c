"""Claimed processes that end while a successor takes their services over."""

from __future__ import annotations

import os

import pytest
from node_world import World, successor

from valved.errors import InvalidRequest
from valved.model.ids import Role, ServiceId


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def test_a_claimed_process_that_ends_during_the_takeover_never_leaves_a_service_without_a_book(first, monkeypatch):
    """Its end is told at once, by the very step that begins to wait for it."""
    first.online(pid=200)
    open_pidfd = first.processes.open_pidfd
    monkeypatch.setattr(first.processes, "open_pidfd", lambda pid: -1 if pid == 200 else open_pidfd(pid))

    second = successor(first)
    second.offline(pid=300)
    second.run(3000)

    assert not second.gating.online
    assert not second.gate.off
    second.check()


def test_a_service_without_a_book_is_never_kept(first):
    first.gating.add_service(ServiceId(99), frozenset())

    first.handover.settle(patience_over=False)

    assert not first.gating.online
    first.check()


def claimed_front_end(first):
    """A claimed process, and the engine that it started."""
    first.processes.add(210)
    assert first.node.launch(210, first.processes.start_time(210), Role.ONLINE, "chat")
    first.online(pid=211, parent=210)
    return first.service_of(first.books.client_of_process([*first._chain(211)]).id)


def end_front_end(world):
    world.processes.end(210)
    world.processes.add(211)  # init has taken it


def test_no_engine_is_refused_because_its_claimed_process_ended_before_it_was_back(first):
    service = claimed_front_end(first)
    second = successor(first)
    end_front_end(second)
    second.run(100)
    assert second.gate.is_gated(0)

    client = second.hello(211, Role.ONLINE).client

    assert client is not None
    assert second.service_of(client) == service
    second.check()


def test_no_service_outlives_the_last_process_that_it_waits_for(first):
    claimed_front_end(first)
    second = successor(first)
    end_front_end(second)
    assert second.gating.online
    second.processes.end(211)
    second.run(3000)

    assert not second.gating.online
    assert not second.books.claims
    second.check()


def test_a_drain_never_ends_valved_or_what_valved_runs_in(first):
    """Whoever may claim names any process, and offline processes are killed in the end."""
    first.processes.add(1, parent=0)
    first.processes.add(os.getpid(), parent=1)

    for pid in (1, os.getpid()):
        with pytest.raises(InvalidRequest, match="valved runs below"):
            first.node.launch(pid, first.processes.start_time(pid), Role.OFFLINE, "x")
    assert not first.books.claims
    assert first.node.launch(1, first.processes.start_time(1), Role.ONLINE, "a container")
