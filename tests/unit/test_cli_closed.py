"""No command breaks, whatever of its input and outputs is closed, whatever its run folder is called, and whatever is
found there.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from valved.cli import words
from valved.cli.exits import FAILED, FINDINGS, NOT_RUNNING, OK, REFUSED
from valved.paths import ENV_RUN_DIR

VALVE = str(Path(sys.executable).parent / "valve")
COMMANDS = [
    ["status"],
    ["status", "--json"],
    ["top", "--looks", "1"],
    ["explain", "gpu0"],
    ["explain", "reclaims"],
    ["events"],
    ["mode"],
    ["policy"],
    ["drain"],
    ["doctor"],
    ["service", "show"],
    ["pause"],
    ["resume"],
    ["record", "FILE"],
    ["run", "--offline", "--", "true"],
    ["run", "--online", "--", "true"],
]
ASKING = [["status"], ["drain"], ["events", "--follow"], ["pause"], ["run", "--online", "--", "true"]]


def run(command, folder, redirect=""):
    """Its exit code, and what it said where somebody could hear it."""
    words = [str(folder / "events") if word == "FILE" else word for word in command]
    env = {**os.environ, ENV_RUN_DIR: str(folder)}
    shell = f'"$@" {redirect}'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", VALVE, *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done.returncode


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_whose_input_and_outputs_are_closed_never_ends_otherwise(tmp_path, command):
    with_all = run(command, tmp_path / "a")

    assert with_all in (OK, NOT_RUNNING, FINDINGS)
    assert run(command, tmp_path / "a", "<&- >&- 2>&-") == with_all


def test_a_command_that_is_run_never_finds_open_what_was_closed(tmp_path):
    look = f"for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] || touch {tmp_path}/closed-$fd; done"
    run(["run", "--online", "--", "sh", "-c", look], tmp_path / "run", "<&- >&- 2>&-")

    assert len(list(tmp_path.glob("closed-*"))) == 3


@pytest.mark.parametrize("name", ["100%", "a%41b", "a b", "a?b#c", "ü"])
def test_a_run_folder_of_any_name_is_never_another_one(tmp_path, name):
    """gRPC reads the path as a part of a URI."""
    folder = tmp_path / name
    try:
        assert run(["up", "--mode", "observe"], folder) == OK
        assert run(["status"], folder) == OK
    finally:
        assert run(["drain", "--stop"], folder) == OK


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder", "silence", "noise"])
@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_socket_that_is_none_of_valveds_is_always_named(tmp_path, kind, command):
    path = tmp_path / "valved.sock"
    listener = None
    if kind == "a file":
        path.touch()
    elif kind == "a folder":
        path.mkdir()
    elif kind != "nothing":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(64)
    talker = None
    if kind == "noise":
        program = (
            "import socket, sys; one = socket.socket(fileno=int(sys.argv[1]))\n"
            "while True:\n"
            "    peer = one.accept()[0]\n"
            "    peer.send(b'HTTP/1.1 400 no\\r\\n\\r\\n' * 10)\n"
            "    peer.close()\n"
        )
        fd = listener.fileno()
        talker = subprocess.Popen([sys.executable, "-c", program, str(fd)], pass_fds=[fd])
    try:
        assert run(command, tmp_path) in (OK, FAILED, NOT_RUNNING, REFUSED, FINDINGS)
    finally:
        if talker is not None:
            talker.kill()
            talker.wait()
        if listener is not None:
            listener.close()


@pytest.mark.parametrize("text", ["1e300", "nan", "-1", "inf", "1e10"])
def test_a_time_that_no_clock_holds_is_never_waited_for(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a time in seconds"):
        words.seconds(text)
