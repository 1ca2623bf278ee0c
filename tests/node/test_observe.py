"""Observing: what the operator decides by, before anything is harvested."""

from __future__ import annotations

import subprocess

from node_rig import Online, service


def test_observing_says_how_idle_a_service_is_and_what_harvesting_would_give(make_node):
    node = make_node(mode="observe")
    online = Online(node, "chat")
    online.wait_ready()
    online.launch(us=1000)
    node.wait_for(
        lambda: service(node, "chat").idle_ns > service(node, "chat").busy_ns > 0, "it was idle most of its life"
    )

    told = subprocess.run(
        node.valve_command("status"), env=node.environment(), capture_output=True, text=True, check=True
    ).stdout

    text = " ".join(told.split())
    assert "observing: chat was idle " in text
    assert "harvesting would give about" in text
