"""Two daemons on one machine, each in a run folder of its own."""

from __future__ import annotations

import subprocess
import sys


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
