"""No command breaks, whatever of its input and outputs is closed, whatever its run folder is called, and whatever is
found there.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from valve.v1 import node_pb2, node_pb2_grpc
from warm_valve import WarmValve

from valved.cli import words
from valved.cli.exits import FAILED, FINDINGS, NOT_FOUND, NOT_RUNNING, OK, REFUSED, USAGE
from valved.paths import ENV_RUN_DIR, grpc_address

CLOSED = "<&- >&- 2>&-"
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
ASKING += [
    ["top", "--looks", "1"],
    ["explain", "gpu0"],
    ["policy"],
    ["mode"],
    ["record", "FILE"],
    ["resume"],
    ["doctor"],
]


@pytest.fixture(scope="module")
def valve(tmp_path_factory):
    warm = WarmValve(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.close()


def run(valve, command, folder, **how):
    """Its exit code."""
    words = [str(folder / "events") if word == "FILE" else word for word in command]
    done = valve.run(words, {**os.environ, ENV_RUN_DIR: str(folder)}, **how)
    assert "Traceback" not in done.stderr + done.stdout
    return done.returncode


def start(command, folder, redirect):
    """The exit code of an interpreter of its own."""
    env = {**os.environ, ENV_RUN_DIR: str(folder)}
    argv = ["sh", "-c", f'"$@" {redirect}', "sh", VALVE, *command]
    return subprocess.run(argv, env=env, capture_output=True, check=False).returncode


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_whose_input_and_outputs_are_closed_never_ends_otherwise(valve, tmp_path, command):
    with_all = run(valve, command, tmp_path / "a")

    assert with_all in (OK, NOT_RUNNING, FINDINGS)
    assert run(valve, command, tmp_path / "a", are_closed=True) == with_all


def test_an_interpreter_that_begins_without_input_and_outputs_never_ends_otherwise(tmp_path):
    assert start(["status"], tmp_path, CLOSED) == NOT_RUNNING


def test_no_command_waits_for_what_only_valved_needs():
    """numpy takes a third of the start of a command."""
    program = "import sys, valved.cli.main; print({'numpy', 'valved.config'} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


@pytest.mark.parametrize("how", ["an interpreter of its own", "a fork"])
def test_a_command_that_is_run_never_finds_open_what_was_closed(valve, tmp_path, how):
    look = f"for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] || touch {tmp_path}/closed-$fd; done"
    command = ["run", "--online", "--", "sh", "-c", look]
    if how == "a fork":
        run(valve, command, tmp_path / "run", are_closed=True)
    else:
        start(command, tmp_path / "run", CLOSED)

    assert len(list(tmp_path.glob("closed-*"))) == 3


def test_what_a_command_says_is_always_heard(valve, tmp_path):
    """Else no test here would see a traceback."""
    said = valve.run(["status"], {**os.environ, ENV_RUN_DIR: str(tmp_path)})

    assert (said.returncode, said.stdout, "no valved answers" in said.stderr) == (NOT_RUNNING, "", True)
    assert valve.run(["mode", "--help"], os.environ).stdout.startswith("usage: valve mode")


@pytest.mark.parametrize("name", ["100%", "a%41 ?b#c", "ü"])
def test_a_run_folder_of_any_name_is_never_another_one(valve, tmp_path, name):
    """gRPC reads the path as a part of a URI."""
    folder = tmp_path / name
    try:
        assert run(valve, ["up", "--mode", "observe"], folder) == OK
        assert run(valve, ["status"], folder) == OK
    finally:
        assert run(valve, ["drain", "--stop"], folder) == OK


@pytest.mark.parametrize("name", ["a b", "a%41", "a?b#c", "ü", "\udcff\udcfe", "a\nb"])
def test_a_socket_of_any_name_is_found_by_servers_and_callers_alike(tmp_path, name):
    path = tmp_path / name
    server = grpc.server(futures.ThreadPoolExecutor(1))
    node_pb2_grpc.add_NodeServicer_to_server(node_pb2_grpc.NodeServicer(), server)
    server.add_insecure_port(grpc_address(path))
    server.start()
    channel = grpc.insecure_channel(grpc_address(path))
    try:
        with pytest.raises(grpc.RpcError) as caught:
            node_pb2_grpc.NodeStub(channel).GetStatus(node_pb2.GetStatusRequest(), wait_for_ready=True)
        assert path.is_socket()
    finally:
        channel.close()
        server.stop(None)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_no_socket_is_named_to_grpc_but_by_the_one_function(repository):
    """A path that is put behind `unix:` as it is may be another one."""
    files = [path for room in ("valved", "tools", "scheduler", "tests") for path in (repository / room).rglob("*.py")]
    named = [path.name for path in files if re.search(r"""f["']unix:\{""", path.read_text())]

    assert named == ["paths.py"]


@pytest.mark.parametrize("command", [*ASKING, ["up"], ["doctor"]], ids=" ".join)
def test_a_run_folder_that_valved_refuses_is_named_in_words(valve, tmp_path, command):
    code = run(valve, command, tmp_path / "\udcff\udcfe")

    assert code in (OK, FAILED, NOT_RUNNING, FINDINGS)
    assert run(valve, command, tmp_path / "\udcff\udcfe", are_closed=True) == code


NONSENSE = {
    "run --online -- ": NOT_FOUND,
    "run --online -- /is/not/there": NOT_FOUND,
    "run --online --slo zz -- true": USAGE,
    "run --offline --": USAGE,
    "up --config /is/not/there": USAGE,
    "service show --config /is/not/there": USAGE,
    "service remove --folder /is/not/there": FAILED,
    "policy x=1": USAGE,
    "policy cooldown.floor_ms=nan": USAGE,
    "explain gpu99999999999999": USAGE,
    "explain x y": USAGE,
    "drain --timeout nan": USAGE,
    "top --looks -1": USAGE,
    "record /": FAILED,
    "mode nonsense": USAGE,
    "nonsense": USAGE,
}


@pytest.mark.parametrize("columns", ["", "40"])
@pytest.mark.parametrize("line", NONSENSE)
def test_nonsense_is_never_answered_but_by_a_sentence_and_a_code(valve, tmp_path, line, columns):
    terminal = {"LC_ALL": "C", "COLUMNS": columns} if columns else {}
    done = valve.run(line.split(" "), {**os.environ, **terminal, ENV_RUN_DIR: str(tmp_path)})

    assert (done.returncode, "Traceback" in done.stderr) == (NONSENSE[line], False)
    assert done.stderr.splitlines()[-1].strip()


@pytest.mark.parametrize("command", [one for one in COMMANDS if one[0] != "run"], ids=" ".join)
def test_what_nobody_takes_is_never_called_done_or_a_traceback(valve, tmp_path, command):
    """A full disk. A command that says nothing on its output has done what it says."""
    quiet = run(valve, command, tmp_path)
    full = run(valve, command, tmp_path, output="/dev/full")

    assert full == quiet if quiet == NOT_RUNNING else full == FAILED


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder", "silence", "noise"])
@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_socket_that_is_none_of_valveds_is_always_named(valve, tmp_path, kind, command):
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
        deadline_s = 0.2 if kind == "silence" else 0.0  # that no answer comes is known before
        assert run(valve, command, tmp_path, deadline_s=deadline_s) in (OK, FAILED, NOT_RUNNING, REFUSED, FINDINGS)
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
