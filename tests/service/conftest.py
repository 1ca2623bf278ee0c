"""Fixtures that several files share."""

from __future__ import annotations

import time

import pytest
from link_peers import OwnTime, Server
from node_world import World
from plain_words import everything_told, people_never_read_python

__all__ = ["everything_told", "people_never_read_python", "server", "world"]


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.check()


@pytest.fixture
def own_time(monkeypatch):
    own_time = OwnTime()
    monkeypatch.setattr(time, "thread_time_ns", own_time.now_ns)
    return own_time


@pytest.fixture
def server(tmp_path, own_time):
    with Server(tmp_path) as server:
        yield server
        server.call(server.world.books.check_integrity)
