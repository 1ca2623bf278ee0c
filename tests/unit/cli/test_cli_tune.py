"""`valve tune` finds the environment that can train, and starts training as offline work where valved answers."""

from __future__ import annotations

import ast

import pytest

from valved.cli import main as cli
from valved.cli import run, tune
from valved.cli.exits import FAILED, NOT_FOUND, NOT_RUNNING, REFUSED, CliError

RUN = run.run


@pytest.fixture
def became(monkeypatch, tmp_path):
    """What the command would have become; nothing here can train unless the test says so."""
    seen = []
    monkeypatch.delenv(tune.ENV_PYTHON, raising=False)
    monkeypatch.delenv(tune.ENV_ROLE, raising=False)
    monkeypatch.setattr(tune, "NEEDED", ("no_such_module",))
    monkeypatch.setattr(tune.sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "become", lambda argv, env: seen.append(("plain", argv)) or 0)
    monkeypatch.setattr(run, "run", lambda options: seen.append(("offline", options.argv)) or 0)
    monkeypatch.setattr(tune, "run_dir", lambda: tmp_path / "run")
    return seen


def environment(folder):
    python = folder / ".venv-tune" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return str(python)


def has_socket(tmp_path, name="valved.sock"):
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / name).touch()


def test_without_an_environment_the_one_command_that_makes_it_is_said(became):
    with pytest.raises(CliError) as error:
        tune.main(["ls"])
    assert error.value.code == NOT_FOUND
    assert "make .venv-tune/.installed" in error.value.next_step
    assert not became


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["run", "--help"]])
def test_help_never_fails_where_the_trainer_is_not_installed(became, capsys, argv):
    assert cli.main(["tune", *argv]) == 0

    said = capsys.readouterr().out
    assert said.startswith("usage: valve tune COMMAND")
    assert "set one up in a checkout of Valve: make .venv-tune/.installed" in said
    assert not became


def test_a_command_of_the_trainer_is_never_missing_from_that_help(repository):
    room = repository / "tune" / "valve_tune" / "serve"
    calls = [
        node
        for name in ("cli.py", "fleet.py")
        for node in ast.walk(ast.parse((room / name).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_parser"
    ]
    names = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    told = next(line for line in tune.HELP_WITHOUT.splitlines() if line.startswith("commands: "))

    assert {"run", "fleet"} < names
    assert set(told.removeprefix("commands: ").split(", ")) == names | {
        *("watch", "pause", "resume", "cancel", "checkpoints")  # a table there: ABOUT_A_JOB
    }


@pytest.mark.parametrize("place", ["here", "beside", "named"])
def test_the_environment_is_found(became, monkeypatch, tmp_path, place):
    python = environment({"here": tmp_path, "beside": tmp_path / "elsewhere", "named": tmp_path / "other"}[place])
    if place == "named":
        monkeypatch.setenv(tune.ENV_PYTHON, python)
    assert cli.main(["tune", "ls"]) == 0
    assert became == [("plain", [python, "-m", "valve_tune.serve", "ls"])]


@pytest.mark.parametrize("command", ["run", "resume", "serve", "publish"])
def test_what_may_use_a_gpu_beside_valved_is_never_started_as_anything_but_offline_work(
    became, monkeypatch, tmp_path, command
):
    python = environment(tmp_path)
    has_socket(tmp_path)
    tune.main([command, "--x"])
    assert became == [("offline", [python, "-m", "valve_tune.serve", command, "--x"])]


def test_what_does_not_train_or_is_offline_work_already_is_not_started_twice(became, monkeypatch, tmp_path):
    environment(tmp_path)
    has_socket(tmp_path)
    tune.main(["ls"])
    tune.main(["run", "--help"])
    monkeypatch.setenv(tune.ENV_ROLE, "offline")
    tune.main(["run", "--x"])
    assert [how for how, _ in became] == ["plain"] * 3


def test_where_nothing_stops_the_job_it_says_so(became, tmp_path, capsys):
    environment(tmp_path)
    tune.main(["run", "--x"])
    assert "this job is not stopped" in capsys.readouterr().err
    tune.main(["publish", "--x"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("socket", ["valved.sock", "view.sock", "link.sock"])
@pytest.mark.parametrize("code", [REFUSED, FAILED, NOT_RUNNING])
def test_a_valved_that_refuses_or_is_silent_never_leaves_training_ungated(became, monkeypatch, tmp_path, socket, code):
    def refuse(role, name, said):
        raise CliError("no", code, is_silence=code != REFUSED)

    environment(tmp_path)
    has_socket(tmp_path, socket)
    monkeypatch.setattr(run, "run", RUN)
    monkeypatch.setattr(run, "obstacle", lambda program: "")
    monkeypatch.setattr(run, "claim", refuse)
    with pytest.raises(CliError, match="offline work is refused: no"):
        tune.main(["run", "--x"])
    assert not became
    tune.main(["run", "--ungated", "--x"])
    ((how, argv),) = became
    assert how == "plain"
    assert argv[-2:] == ["run", "--x"]


def test_a_folder_that_may_not_be_looked_into_is_never_taken_for_no_valved(monkeypatch, tmp_path):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tune.Path, "lstat", denied)
    assert tune.has_valved(tmp_path)
