"""A machine in trouble: valved starts, and ends, as it should all the same."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from node_rig import Offline, Online
from valve_tools.demo.node import EmulatedNode, NodeError


def start_with(hangup: signal.Handlers, node: EmulatedNode) -> int:
    """A valved that is started by a process which does this about SIGHUP. Its process."""
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        return node.start_valved().pid
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_never_ends_valved_without_a_hand_over(make_node: Callable[..., EmulatedNode]) -> None:
    node = make_node(start=False)
    start_with(signal.SIG_DFL, node)  # the tests may run under nohup
    offline, online = Offline(node, "batch"), Online(node, "chat")
    offline.wait_running()
    online.wait_ready()

    assert node.stop_valved(signal.SIGHUP) == 0

    assert '"event": "stopped"' in (node.folder / "valved.log").read_text()


def test_a_terminal_that_closes_never_ends_a_valved_that_was_told_to_ignore_it(
    make_node: Callable[..., EmulatedNode],
) -> None:
    """By nohup."""
    node = make_node(start=False)
    pid = start_with(signal.SIG_IGN, node)
    node.wait_for(lambda: '"event": "started"' in (node.folder / "valved.log").read_text(), "its handlers are set")

    ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    assert int(ignored, 16) & 1 << (signal.SIGHUP - 1)


def test_a_folder_that_takes_no_pid_never_keeps_valved_from_starting(make_node: Callable[..., EmulatedNode]) -> None:
    """As when the disk is full."""
    node = make_node(start=False)
    (node.run_dir / "valved.pid").mkdir()

    node.start_valved()

    assert node.status().pid
    assert "valved.pid cannot be written" in (node.folder / "valved.log").read_text()


def test_a_port_of_the_other_valved_never_keeps_its_successor_from_waiting(
    make_node: Callable[..., EmulatedNode],
) -> None:
    """Both are on the network of the host."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        node = make_node(start=False)

        node.start_valved("--wait", "--metrics-port", str(taken.getsockname()[1]))

        assert node.status().pid


def test_a_pipe_at_the_name_of_the_pid_file_never_keeps_valved_from_starting(
    make_node: Callable[..., EmulatedNode],
) -> None:
    """Nobody reads it, so to open it in the usual way never ends."""
    node = make_node(start=False)
    os.mkfifo(node.run_dir / "valved.pid")

    node.start_valved()

    assert node.status().pid


def test_a_socket_that_finds_its_name_taken_is_never_told_as_a_traceback(
    make_node: Callable[..., EmulatedNode],
) -> None:
    node = make_node(start=False)
    (node.run_dir / "valved.sock").mkdir()

    with pytest.raises(NodeError, match="valved ended with 1"):
        node.start_valved()

    log = (node.folder / "valved.log").read_text()
    assert "valved.sock: Is a directory" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("name", ["valved.sock", "link.sock", "client/link.sock", "client"])
def test_a_name_that_cannot_be_removed_never_keeps_valved_from_ending_in_good_order(
    node: EmulatedNode, name: str
) -> None:
    """As on a disk that can only be read by now: it lets go whom it froze, and writes its state, after that."""
    (node.run_dir / name).rename(node.folder / "aside")
    if name == "client":
        (node.run_dir / name).touch()
    else:
        (node.run_dir / name).mkdir()

    assert node.stop_valved() == 0

    assert "Traceback" not in (node.folder / "valved.log").read_text()
