"""What strangers choose, and what an operator mistypes: names of processes, numbers, commands that are none."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from valve.v1 import node_pb2

from valved.cli import doctor, drain, explain, main, policy, status, top, up
from valved.cli.client import NodeClient, ask
from valved.cli.exits import FAILED, NOT_RUNNING, REFUSED, USAGE, CliError
from valved.machine.processes import LinuxProcesses
from valved.main import EXIT_CONFIG
from valved.main import main as start_valved
from valved.model.plain import MOST, plain
from valved.paths import MOST_NAME

NAMES = ["[/x]", "[red]", "[", "a[/]b", ":warning:"]


def printed(what):
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    return console.file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_process_never_breaks_a_view_or_vanishes_from_it(name, monkeypatch):
    service = node_pb2.Service(id=7, name=name, role=node_pb2.ROLE_OFFLINE, gpus=[0], state=f"stopped: {name} holds")
    gpu = node_pb2.Gpu(index=0, name=name, channels=8, reach="own")
    client = node_pb2.Client(pid=9, comm=name, notes=[name])
    engine = node_pb2.Engine(service=7, name=name, state=name)
    memory = node_pb2.Memory(engines=[engine])
    answer = node_pb2.Status(gpus=[gpu], services=[service], clients=[client], memory=memory)
    shown = io.StringIO()
    monkeypatch.setattr(explain, "Paper", lambda **_: Console(file=shown, width=200))

    explain.show(node_pb2.Explanation(summary=f"service 7 {name}", facts=[f"fact {name}"]), 0)

    assert printed(status.render(answer)).count(name) >= 5
    assert name in printed(top.render(answer, top.History(), top.View()))
    assert shown.getvalue().count(name) == 2


def test_a_name_never_carries_escape_sequences_line_ends_or_what_is_no_text():
    assert plain("a\033]0;owned\007b\nc\udcff") == "a?]0;owned?b?c?"
    assert plain("Übung 7[b]") == "Übung 7[b]"
    assert len(plain("x" * 100_000)) == MOST


def test_the_name_that_a_process_gives_itself_is_never_passed_on_as_it_is(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_bytes(b"\033[2J\nx\n")

    assert LinuxProcesses(tmp_path).comm(7) == "?[2J?x"


@pytest.mark.parametrize("named", [[], ["--name", b"\xff\xfe"]])
def test_a_name_that_is_no_text_never_keeps_an_online_process_from_running(tmp_path, named):
    program = os.fsencode(tmp_path) + b"/serve\xff"
    os.symlink("/bin/true", program)
    command = [sys.executable, "-P", "-m", "valved.cli.main", "run", "--online", *named, "--", program]

    done = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "VALVE_RUN_DIR": str(tmp_path)})

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["1e30", "1e-9", "1e16"])
def test_a_setting_that_no_valved_can_take_is_never_a_traceback_or_a_success(text):
    with pytest.raises(CliError, match=r"cooldown\.floor_ms") as refused:
        policy.changes([f"cooldown.floor_ms={text}"])

    assert refused.value.code == USAGE


def test_a_command_that_is_none_is_never_answered_without_those_of_the_other_wheels(monkeypatch, capsys):
    monkeypatch.setattr(main, "plugins", lambda: {"cluster": None})

    assert main.main(["runn"]) == USAGE

    told = capsys.readouterr().err
    assert all(name in told for name in ("runn", "cluster", "doctor", "service"))


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """What a daemon was asked that never answers. Whoever asks it is not patient here."""
    asked, call = [], NodeClient.call

    def ask(self, method, request, **_):
        asked.append(request)
        return call(self, method, request, deadline_s=0.1)

    monkeypatch.setattr(NodeClient, "call", ask)
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "valved.sock"))
        listener.listen()
        yield asked


def test_the_doctor_never_calls_a_daemon_that_hangs_absent_and_asks_it_once(hung):
    first, *others = doctor.check_valved()

    assert (first.verdict, first.fix.count("valve up")) == (doctor.Grade.BROKEN, 0)
    assert "does not answer" in first.what
    assert {one.verdict for one in others} == {doctor.Grade.UNKNOWN}
    assert len(hung) == 1


def test_another_daemon_is_never_started_beside_one_that_hangs(hung, monkeypatch):
    monkeypatch.setattr(up, "start", lambda *_: pytest.fail("started"))

    with pytest.raises(CliError, match="does not answer"):
        up.up(argparse.Namespace(config=None, mode=None, foreground=False, metrics_port=None))


def test_the_doctor_never_praises_a_priority_that_the_gate_does_not_have():
    assert "real-time" not in doctor.check_privileges().what


def test_a_valved_of_another_version_than_the_installed_one_is_never_called_fine():
    told = doctor.judge_valved(node_pb2.Status(version="0.0.1"))

    assert told.verdict is doctor.Grade.NOTE
    assert "0.0.1" in told.what


@pytest.mark.parametrize(
    ("driver", "of_valved", "verdict"),
    [
        (doctor.fine("driver", "580.159.04"), "", doctor.Grade.BROKEN),
        (doctor.fine("driver", "580.159.04"), "580.159.04", doctor.Grade.FINE),
        (doctor.broken("driver", "none is loaded", ""), "", doctor.Grade.FINE),
    ],
)
def test_a_valved_that_began_before_the_driver_is_never_called_fine(monkeypatch, driver, of_valved, verdict):
    """It sees no card, `valve status` names the doctor, and every finding was green."""
    monkeypatch.setattr(doctor, "check_driver", lambda: driver)
    answer = node_pb2.Status(version=doctor.version("valve"), driver=node_pb2.Driver(version=of_valved))

    told = doctor.judge_valved(answer)

    assert told.verdict is verdict
    assert bool(told.fix) == (verdict is doctor.Grade.BROKEN)


def test_a_drain_where_no_valved_runs_never_ends_with_the_advice_to_start_one_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))

    with pytest.raises(CliError) as refused:
        drain.drain(SimpleNamespace(stop=True, timeout=1.0))

    assert refused.value.code == NOT_RUNNING
    assert refused.value.next_step != "start it: valve up"


def test_a_full_disk_never_ends_a_command_with_a_traceback(monkeypatch, capsys):
    def full(_options):
        raise OSError(errno.ENOSPC, "No space left on device", "trace.jsonl")

    monkeypatch.setattr(main.doctor, "doctor", full)

    assert main.main(["doctor"]) == FAILED
    assert capsys.readouterr().err == "valve: trace.jsonl: No space left on device\n"


def test_a_start_that_another_one_overtook_is_never_a_success_in_another_mode(tmp_path, monkeypatch):
    """Regression: of two `valve up` at once, each with a mode of its own, both ended with 0."""
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    running = node_pb2.Status(mode=node_pb2.MODE_OBSERVE, pid=os.getpid())
    nobody = [CliError("no valved answers", NOT_RUNNING)]

    def ask(folder):
        if nobody:
            raise nobody.pop()
        return running

    monkeypatch.setattr(up, "ask", ask)
    monkeypatch.setattr(up, "start", lambda argv, log: SimpleNamespace(pid=os.getpid() + 1))
    monkeypatch.setattr(up, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(up, "status_of", ask, raising=False)  # what the code before asked

    with pytest.raises(CliError, match="in mode observe") as refused:
        up.up(argparse.Namespace(config=None, mode="off", foreground=False, metrics_port=None))

    assert refused.value.code == REFUSED


def test_a_start_that_is_interrupted_never_leaves_a_valved_that_harvests(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    valved = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(up, "start", lambda argv, log: valved)
    monkeypatch.setattr(up, "wait_until_up", interrupted)

    with pytest.raises(KeyboardInterrupt):
        up.up(argparse.Namespace(config=None, mode=None, foreground=False, metrics_port=None))

    assert valved.poll() == -signal.SIGTERM


def test_a_start_that_takes_long_is_never_called_one_that_failed(tmp_path, monkeypatch):
    (log := tmp_path / "valved.log").touch()
    monkeypatch.setattr(up, "PATIENCE_S", 0.0)
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            with pytest.raises(CliError, match=f"pid {child.pid}.* goes on"):
                up.wait_until_up(child, tmp_path, log)
        finally:
            child.kill()


@pytest.mark.parametrize("name", ["007", "00", "gpu01", "\u0663"])
def test_the_name_of_a_service_is_never_taken_for_a_number_that_nobody_writes_so(name):
    """Regression: the service 007 was "no GPU 7 here"."""
    assert explain.is_name([name])


def test_a_run_folder_whose_name_no_socket_can_have_is_never_an_error_without_a_next_step(tmp_path, capsys):
    """Regression: "AF_UNIX path too long", and of the command "the target uri is not valid"."""
    folder = tmp_path / ("x" * MOST_NAME)
    folder.mkdir()

    with pytest.raises(CliError, match=f"longer than {MOST_NAME} bytes") as refused:
        ask(folder)
    assert "VALVE_RUN_DIR" in refused.value.next_step

    assert start_valved(["--run-dir", str(folder)]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "run_dir = " in said
    assert "next: " in said
