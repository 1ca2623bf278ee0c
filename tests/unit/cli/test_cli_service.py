"""`valve service`: what is installed comes into force, and what is removed leaves nothing behind."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from valve.v1 import node_pb2

from valved.cli import policy, systemd
from valved.cli.exits import FAILED, NOT_RUNNING, REFUSED, CliError
from valved.machine.processes import LinuxProcesses
from valved.model.ids import Role
from valved.paths import ENV_RUN_DIR, STATE_FILE, SYSTEM_RUN_DIR
from valved.state.saved import VERSION, SavedClient, SavedState, boot_id, save


def is_gone(_):
    raise CliError("no valved answers", NOT_RUNNING, is_silence=True)


def hangs(_):
    raise CliError("valved does not answer", FAILED, "restart it", is_silence=True)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What systemctl is asked, in turn. The unit runs where the file `active` is there."""
    log, active, state = tmp_path / "calls", tmp_path / "active", tmp_path / "state"
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\nif [ "$1" = show ]; then cat {state}; exit; fi\n'
        f'echo "$*" >> {log}\n[ "$1" != is-active ] || [ -e {active} ]\n'
    )
    tool.chmod(0o755)
    state.write_text("MainPID=0\nActiveState=active\n")
    monkeypatch.setattr(systemd, "_wait_until_up", lambda *_: SimpleNamespace(mode=node_pb2.MODE_OBSERVE))
    monkeypatch.setattr(systemd, "PROGRAM", tmp_path / "program")
    (tmp_path / "program").mkdir()
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "ask", is_gone)
    monkeypatch.setattr(systemd, "BOOTED", tmp_path)  # systemd runs this machine
    return lambda: log.read_text().splitlines() if log.exists() else []


def service(folder, action="install", *, mode=None, config=None, no_start=False):
    return systemd.service(
        argparse.Namespace(action=action, mode=mode, config=config, folder=folder, no_start=no_start)
    )


@pytest.fixture
def running(tmp_path):
    """What the unit runs."""
    valved = subprocess.Popen(["sleep", "1000"])
    yield valved
    valved.kill()
    valved.wait()


def runs(tmp_path, valved):
    (tmp_path / "state").write_text(f"MainPID={valved.pid}\nActiveState=active\n")


def a_tick_later():
    """The kernel says within which tick a process began."""
    until = time.clock_gettime(time.CLOCK_BOOTTIME) + 3 / os.sysconf("SC_CLK_TCK")
    while time.clock_gettime(time.CLOCK_BOOTTIME) < until:
        time.sleep(0.005)


RESTARTED = ["daemon-reload", "try-restart valved.service", "enable --now valved.service"]


@pytest.mark.parametrize("what", ["program", "configuration", "unit that was only written", "nothing"])
def test_what_was_installed_over_a_running_unit_is_never_left_for_its_next_start(tmp_path, calls, running, what):
    config = tmp_path / "valved.toml"
    config.touch()
    module = tmp_path / "program" / "main.py"
    module.touch()
    service(tmp_path, config=config)
    a_tick_later()
    with subprocess.Popen(["sleep", "1000"]) as valved:  # began after all that was written
        runs(tmp_path, valved)
        a_tick_later()
        if what == "program":
            module.write_text("changed")
            os.utime(module, (0, 0))  # as an archive brings it
        elif what == "configuration":
            config.write_text("mode = 'observe'\n")
        elif what != "nothing":
            service(tmp_path, config=config, mode="observe", no_start=True)
        mode = "observe" if what == "unit that was only written" else None
        service(tmp_path, config=config, mode=mode)
        valved.kill()

    assert calls()[2:] == ([one for one in RESTARTED if what != "nothing" or "try" not in one])


def answers(pid):
    return lambda folder: SimpleNamespace(pid=pid)


@pytest.mark.parametrize("state", ["failed", "activating"])
def test_a_unit_whose_valved_ends_at_once_is_never_called_installed(tmp_path, calls, monkeypatch, state):
    """systemd calls it started as soon as its program has begun."""
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "ask", is_gone)
    monkeypatch.setattr(systemd, "BOOTED", tmp_path)
    monkeypatch.setattr(systemd, "PATIENCE_S", 0.0)
    (tmp_path / "state").write_text(f"MainPID=0\nActiveState={state}\nInvocationID=abc\n")
    journal = tmp_path / "bin" / "journalctl"
    journal.write_text('#!/bin/sh\necho "$*" | grep -q _SYSTEMD_INVOCATION_ID=abc && echo "valved: no such setting"\n')
    journal.chmod(0o755)

    with pytest.raises(CliError, match=r"its valved .*:\n  valved: no such setting") as caught:
        service(tmp_path)

    assert (caught.value.code, "journalctl -u valved.service" in caught.value.next_step) == (FAILED, True)


def test_another_valved_that_answers_is_never_taken_for_the_one_that_was_started(tmp_path, calls, monkeypatch):
    looks = []
    states = iter(["MainPID=5", "MainPID=6", "MainPID=7"])

    def shown():
        looks.append(next(states))
        return dict([looks[-1].split("=")])

    monkeypatch.undo()
    monkeypatch.setattr(systemd, "shown", shown)
    monkeypatch.setattr(systemd, "ask", answers(7))
    systemd._wait_until_up(tmp_path, tmp_path / "valved.service")

    assert len(looks) == 3


def test_a_setting_that_is_installed_over_a_running_unit_is_never_left_for_its_next_start(tmp_path, calls, running):
    service(tmp_path)
    runs(tmp_path, running)
    a_tick_later()
    service(tmp_path, mode="observe")

    assert calls()[-3:] == ["daemon-reload", "try-restart valved.service", "enable --now valved.service"]
    assert "--default-mode observe" in (tmp_path / "valved.service").read_text()


def test_a_mode_that_is_installed_never_yields_to_one_that_was_set_before(tmp_path, calls, monkeypatch):
    told = []
    monkeypatch.setattr(policy, "mode", lambda options: told.append((options.mode, os.environ[ENV_RUN_DIR])))
    monkeypatch.setenv(ENV_RUN_DIR, "/of/the/caller")
    service(tmp_path)
    service(tmp_path, mode="observe")
    service(tmp_path, mode="off")

    assert told == [("off", str(SYSTEM_RUN_DIR))]


def test_the_same_unit_installed_again_never_restarts_what_runs(tmp_path, calls):
    service(tmp_path)
    service(tmp_path)

    assert calls() == ["daemon-reload", "enable --now valved.service"] * 2


def test_a_unit_is_never_called_installed_beside_a_valved_that_it_did_not_start(tmp_path, calls, monkeypatch):
    """Its own would end at once, for the folder is taken."""
    monkeypatch.setattr(
        systemd, "ask", lambda folder: SimpleNamespace(pid=77) if folder == SYSTEM_RUN_DIR else is_gone(folder)
    )

    with pytest.raises(CliError, match=r"already \(pid 77\), and not by this unit") as caught:
        service(tmp_path)

    assert (caught.value.code, "kill 77" in caught.value.next_step) == (REFUSED, True)
    monkeypatch.setattr(systemd, "ask", hangs)
    with pytest.raises(CliError, match="does not answer, and not by this unit"):
        service(tmp_path)
    assert not (tmp_path / "valved.service").exists()
    (tmp_path / "active").touch()
    service(tmp_path)


@pytest.mark.parametrize("before", [None, "[Service]\nExecStart=valved\n"], ids=["none", "another"])
def test_a_unit_that_systemd_does_not_read_for_this_user_is_never_left_behind(tmp_path, calls, before):
    path = tmp_path / "valved.service"
    if before is not None:
        path.write_text(before)
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho 'authentication required' >&2\nexit 1\n")

    with pytest.raises(CliError, match="authentication required"):
        service(tmp_path)

    assert (path.read_text() if path.exists() else None) == before


@pytest.mark.parametrize("name", ["plain", "with blank", "100% of $HOME"])
def test_a_unit_is_never_removed_before_its_own_valved_is_empty(tmp_path, calls, monkeypatch, name):
    """Its run folder is what its file says, whatever the environment of who removes it says."""
    config = tmp_path / f"{name}.toml"
    config.write_text(f'run_dir = "{tmp_path / name}"\n')
    service(tmp_path, config=config)
    asked, drained = [], []
    monkeypatch.setenv(ENV_RUN_DIR, "/elsewhere")
    monkeypatch.setattr(systemd, "ask", asked.append)
    monkeypatch.setattr(systemd.drain, "drain", lambda options: drained.append((options.stop, os.environ[ENV_RUN_DIR])))

    service(tmp_path, "remove")

    assert (asked, drained) == ([tmp_path / name], [(True, str(tmp_path / name))])
    assert calls()[-1] == "disable --now valved.service"


def test_a_unit_whose_valved_hangs_is_never_removed_with_offline_work_behind_it(tmp_path, calls, monkeypatch):
    service(tmp_path)

    monkeypatch.setattr(systemd, "ask", hangs)
    with pytest.raises(CliError, match="does not answer"):
        service(tmp_path, "remove")
    assert (tmp_path / "valved.service").exists()

    monkeypatch.setattr(systemd, "ask", is_gone)
    service(tmp_path, "remove")
    assert not (tmp_path / "valved.service").exists()


@pytest.mark.parametrize("boot", [None, "another"], ids=["this boot", "another boot"])
def test_a_unit_whose_valved_was_stopped_is_never_removed_with_offline_work_behind_it(tmp_path, calls, boot):
    """It stays stopped beside an online service until the next valved is there."""
    config = tmp_path / "valved.toml"
    config.write_text(f'run_dir = "{tmp_path}"\n')
    service(tmp_path, config=config)
    job = subprocess.Popen(["sleep", "1000"])
    client = SavedClient(
        pid=job.pid,
        start_time=LinuxProcesses().start_time(job.pid),
        role=Role.OFFLINE,
        service=2,
        channels=[],
    )
    empty = {"counters": {}, "refusals": {}, "gpus": [], "services": [], "next_client": 2, "next_service": 3}
    save(
        tmp_path / STATE_FILE,
        SavedState(version=VERSION, boot_id=boot or boot_id(), driver="", clients=[client], **empty),
    )

    try:
        if boot is None:
            with pytest.raises(CliError, match=f"left stopped: processes {job.pid}"):
                service(tmp_path, "remove")
            assert (tmp_path / "valved.service").exists()
        else:
            service(tmp_path, "remove")
            assert not (tmp_path / "valved.service").exists()
    finally:
        job.kill()
        job.wait()
    service(tmp_path, "remove")
    assert not (tmp_path / "valved.service").exists()


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("", SYSTEM_RUN_DIR),
        (f"ExecStart={sys.executable} -m valved.main --run-dir /run/other --mode off\n", "/run/other"),
        ("ExecStart=valved --config /is/not/there.toml\n", SYSTEM_RUN_DIR),
        ('ExecStart=valved --run-dir "half a word\n', SYSTEM_RUN_DIR),
    ],
)
def test_a_unit_that_somebody_has_changed_never_keeps_itself_from_being_removed(text, folder):
    assert str(systemd.folder_of(text)) == str(folder)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt-get install systemd")
@pytest.mark.parametrize("words", [[], ["mode"], ["config"]])
def test_systemd_itself_never_finds_fault_with_the_unit(tmp_path, words):
    """It needs no systemd that runs. A word that it does not know is a line of its answer, whatever its exit code."""
    config = tmp_path / "a folder" / 'of 100 % $HOME "x".toml'
    config.parent.mkdir()
    config.touch()
    named = {"mode": "observe" if "mode" in words else None, "config": config if "config" in words else None}
    path = tmp_path / "valved.service"
    path.write_text(systemd.unit(argparse.Namespace(**named)))

    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    path.write_text(path.read_text().replace("RestartSec", "RestartSecs"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert "RestartSecs" in done.stdout + done.stderr, "it looks at all"
