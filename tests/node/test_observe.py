"""Observing: what the operator decides by, before anything is harvested."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess

from node_rig import Online, service, set_mode
from valve.v1 import node_pb2

from valved.cli import systemd
from valved.paths import SYSTEM_RUN_DIR


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


def test_the_next_start_of_a_unit_never_undoes_the_mode_that_was_set(make_node):
    """systemd says the same command after each crash. A service may rest on `valve mode off`, and jobs on harvest."""
    node = make_node()
    text = systemd.unit(argparse.Namespace(mode="observe", config=None))
    command = next(line for line in text.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    argv = [str(node.run_dir) if word == str(SYSTEM_RUN_DIR) else word for word in shlex.split(command)]

    def started():
        node.stop_valved(signal.SIGKILL)
        node.valved = subprocess.Popen(argv, env=node.environment(), cwd="/", start_new_session=True)
        node.wait_for(node._is_answering, "valved answers")
        return node.status().mode

    assert started() == node_pb2.MODE_OBSERVE
    for mode in (node_pb2.MODE_HARVEST, node_pb2.MODE_OFF):
        set_mode(node, mode)
        assert started() == mode
