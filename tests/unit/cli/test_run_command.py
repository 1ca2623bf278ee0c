"""`valve run` becomes its command: the command is what it would be without Valve, and a service always starts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from valved.cli import run
from valved.cli.exits import REFUSED, CliError

VALVE = Path(sys.executable).parent / "valve"
STATUS = "grep SigIgn /proc/self/status"


@pytest.fixture
def became(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    seen = []
    monkeypatch.setattr(run, "become", lambda argv, env: seen.append((argv, env)) or 0)
    return seen


def options(role, *argv, ungated=False):
    words = {"name": "", "slo": "", "grant": None, "share_weights": None}
    return argparse.Namespace(argv=list(argv), online=role == "online", ungated=ungated, **words)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no /proc here"), RuntimeError("a defect"), ValueError("x")])
@pytest.mark.parametrize("part", ["claim", "leave_claim", "environment", "run_dir"])
def test_a_service_never_stays_down_because_something_fails_in_valve(became, monkeypatch, capsys, part, error):
    def fails(*arguments, **more):
        raise error

    monkeypatch.setattr(run, part, fails)

    assert run.run(options("online", "serve", "model")) == 0

    ((argv, env),) = became
    assert argv == ["serve", "model"]
    assert "VALVE_ROLE" not in env
    assert "serve runs untouched, and Valve does not protect it" in capsys.readouterr().err


def test_a_service_that_valve_does_not_protect_is_never_started_without_a_next_step(became, monkeypatch, capsys):
    def refused(*_):
        raise CliError("you may not use this socket", REFUSED, "use sudo")

    monkeypatch.setattr(run, "claim", refused)
    run.run(options("online", "serve"))

    told = capsys.readouterr().err.splitlines()
    assert (len(told), told[1:]) == (2, ["valve: use sudo"])


def test_a_service_never_stays_down_because_nobody_reads_what_valve_says(became, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())

    assert run.run(options("online", "serve")) == 0
    assert len(became) == 1


def test_a_command_that_does_not_start_never_leaves_its_signals_to_valve():
    """SIGPIPE would end whatever goes on, at its next write to a reader that has gone."""
    before = signal.getsignal(signal.SIGPIPE)

    with pytest.raises(CliError, match="no such command"):
        run.become(["no-such-command"], {})

    assert signal.getsignal(signal.SIGPIPE) == before


def test_offline_work_never_runs_untouched_because_something_fails_in_valve(became, monkeypatch):
    monkeypatch.setattr(run, "claim", lambda *_: (_ for _ in ()).throw(OSError(5, "no /proc here")))

    with pytest.raises(run.CliError, match="no /proc here"):
        run.run(options("offline", sys.executable))

    assert became == []


def test_a_user_without_a_home_never_loses_more_than_the_engines_plugin(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )

    assert "LD_PRELOAD" in run.environment("online", tmp_path / "file")


def shell(script, tmp_path):
    env = {**os.environ, "VALVE_RUN_DIR": str(tmp_path)}
    return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=False, cwd=tmp_path)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_service_never_stays_down_because_a_stream_is_closed(tmp_path, closed):
    done = shell(f"{VALVE} run --online -- touch started {closed}", tmp_path)

    assert done.returncode == 0
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize("before", ["", "trap '' PIPE XFSZ;", "trap '' INT;"])
def test_a_command_never_ignores_signals_that_it_would_not_ignore_without_valve(tmp_path, before):
    done = shell(f"{before} {STATUS}; {VALVE} run --online -- {STATUS}; true", tmp_path)

    without, within = done.stdout.splitlines()
    assert without == within


@pytest.mark.parametrize(
    ("name", "content", "mode", "code", "said"),
    [
        ("script", "echo hello\n", 0o755, 126, "#!/bin/sh"),
        ("other", "#!/no/such/interpreter\n", 0o755, 127, "the interpreter that it names is not there"),
        ("plain", "#!/bin/sh\n", 0o644, 126, "chmod +x"),
        ("plain/below", None, 0, 126, "Not a directory"),
    ],
)
def test_a_command_that_cannot_be_executed_is_never_reported_as_valves_own_failure(
    tmp_path, name, content, mode, code, said
):
    (tmp_path / "plain").touch()
    if content is not None:
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)

    done = shell(f"{VALVE} run --online -- ./{name}", tmp_path)

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_is_not_there_is_never_called_anything_else(tmp_path):
    with pytest.raises(CliError, match="no such command") as caught:
        run.become([str(tmp_path / "nothing")], {})

    assert caught.value.code == 127
