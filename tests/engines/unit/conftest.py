"""Fixtures that several files share."""

from __future__ import annotations

import pytest
from kv_node import KvNode
from sglang_world import world
from valve_hook.link import Link

__all__ = ["link", "node", "world"]


@pytest.fixture
def node(request, tmp_path):
    """A file that names no COLUMNS has ten."""
    node = KvNode(tmp_path, columns=getattr(request.module, "COLUMNS", 10))
    yield node
    node.stop()


@pytest.fixture
def link(node):
    link = Link(build="test", path=node.path, retry_s=0.02)
    link.start()
    yield link
    link.close()
