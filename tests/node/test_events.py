"""`valve events` and `valve explain` over a real node."""

from __future__ import annotations

import subprocess

from node_rig import Offline, Online


def told(node, *arguments):
    argv = node.valve_command(*arguments)
    return subprocess.run(argv, env=node.environment(), capture_output=True, text=True, check=True, cwd="/").stdout


def test_events_tell_what_happened_and_end(node):
    offline = Offline(node, "batch")
    offline.wait_running()
    online = Online(node, "chat")
    online.wait_ready()
    online.launch()

    plain, everything = told(node, "events"), told(node, "events", "--all")

    assert "claimed" in plain
    assert " gate: " not in plain
    assert " gate: " in everything
    assert told(node, "explain", "reclaims") == "no reclaim so far\n"
    assert "chat" in told(node, "explain", "chat")
