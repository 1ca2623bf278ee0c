"""Fixtures that several files share."""

from __future__ import annotations

import pytest
from kv_node import KvNode
from sglang_world import world

__all__ = ["node", "world"]


@pytest.fixture
def node(tmp_path):
    node = KvNode(tmp_path, columns=10)
    yield node
    node.stop()
