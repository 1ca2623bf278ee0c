"""Two daemons on one machine, each in a run folder of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from valve_tools.demo.node import EmulatedNode, NodeError, demo_folder
from valve_tools.emulator import node as emulated


def test_a_second_daemon_never_starts_on_cards_that_have_one(node, tmp_path):
    other = tmp_path / "other"
    argv = [sys.executable, "-m", "valved.main", "--run-dir", str(other)]
    ended = subprocess.run(
        argv, env=node.environment(), capture_output=True, text=True, timeout=200, cwd="/", check=False
    )
    assert ended.returncode == 78
    assert "manages /dev/nvidia0 already" in ended.stderr
    assert node.status().pid == node.valved.pid


def test_the_cards_are_free_once_the_daemon_has_gone(node):
    node.stop_valved()
    node.start_valved()


def test_a_node_never_takes_an_earlier_daemon_of_its_folder_for_the_one_it_started(node):
    earlier = node.valved
    try:
        with pytest.raises(NodeError, match=f"valved {earlier.pid} already runs"):
            node.start_valved()
    finally:
        node.valved = earlier


def test_a_node_never_comes_up_beside_processes_of_an_earlier_one_in_its_folder(node):
    """As when a demo was killed and starts again in the folder that it keeps."""
    with pytest.raises(NodeError, match=f"of an earlier run.*: .*{node.valved.pid}"), EmulatedNode(node.folder):
        pass
    assert node.status().pid == node.valved.pid


def test_a_card_that_a_killed_demo_left_is_never_an_error_without_its_process(tmp_path):
    server = emulated.start(tmp_path / "emu", emulated.Options())
    try:
        with pytest.raises(NodeError, match=f"of an earlier run.*: {server.pid}"), EmulatedNode(tmp_path):
            pass
    finally:
        emulated.stop(server)


def test_a_demo_never_counts_what_an_earlier_run_left_in_its_folder(tmp_path):
    with demo_folder(tmp_path) as folder:
        EmulatedNode(folder).run_dir.mkdir()

    with pytest.raises(NodeError, match="holds an earlier run"), demo_folder(tmp_path):
        pass
