"""An engine's processes have sessions and parents of their own; none of them outlives its node."""

from __future__ import annotations

import sys

from valve_tools.demo.node import EmulatedNode

ORPHANS = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.fork()
    time.sleep(1e6)
"""


def test_whatever_a_program_left_behind_ends_with_its_node(tmp_path):
    with EmulatedNode(tmp_path) as node:
        program = node.run("", [sys.executable, "-c", ORPHANS])
        assert program.wait() == 0
        node.wait_for(lambda: len(node.inhabitants()) == 2, "both orphans live")

    assert node.inhabitants() == []
