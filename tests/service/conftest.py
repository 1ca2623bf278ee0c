"""Fixtures that several files share."""

from __future__ import annotations

import pytest
from node_world import World


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.check()
