"""Whole numbers on the command line: what makes no sense is refused by name, by every command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from types import SimpleNamespace

import pytest
from valve.v1 import node_pb2
from valve_kube.options import option as shared_option

from valved.cli import explain, main, top
from valved.cli.exits import CliError

NONSENSE = ("-1", "1e3", "x", "", "9" * 30, "9" * 5000)


@pytest.mark.parametrize("text", NONSENSE)
@pytest.mark.parametrize("command", [["top", "--looks"], ["up", "--metrics-port"]])
def test_a_number_without_sense_is_never_accepted(command, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main.parser().parse_args([*command[:-1], f"{command[-1]}={text}"])

    assert ended.value.code == 2
    assert "is not a whole number from 0 to" in capsys.readouterr().err


@pytest.mark.parametrize("text", NONSENSE)
def test_an_option_with_a_whole_number_as_its_default_never_takes_nonsense(text, capsys):
    parser = argparse.ArgumentParser()
    shared_option(parser, "--count", 3, "A number.")

    with pytest.raises(SystemExit):
        parser.parse_args([f"--count={text}"])
    assert "is not a whole number from 0 to" in capsys.readouterr().err
    assert parser.parse_args(["--count=0"]).count == 0


def _integers(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from ((f"{name} {told}", kind) for told, kind in _integers(each))
        elif action.type is int:
            yield action.option_strings, action.type


@pytest.mark.parametrize("module", ["valved.cli.main", "valve_scheduler.main"])
def test_no_option_of_a_command_takes_any_integer(module):
    made = importlib.import_module(module)
    parser = made.parser() if hasattr(made, "parser") else made._parser()

    assert not list(_integers(parser))


@pytest.mark.parametrize(
    "words", ["gpu99999999999", "pid" + "9" * 30, "9" * 30, "service" + "9" * 30, "reclaim 1" + "0" * 30]
)
def test_a_number_that_no_field_holds_is_never_a_traceback(words):
    with pytest.raises(CliError, match="no such number exists"):
        explain.subject(words)


def test_a_view_in_a_pipe_never_ends_in_the_middle_of_a_line(monkeypatch):
    status = node_pb2.Status(monotonic_ns=1, mode=node_pb2.MODE_HARVEST)
    status.services.add(id=2, name="batch", role=node_pb2.ROLE_OFFLINE, state="running")
    monkeypatch.setattr(top, "node", lambda: contextlib.nullcontext(SimpleNamespace(status=lambda: status)))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert top.top(argparse.Namespace(sort="id", looks=1, interval=1.0)) == 0

    assert told.getvalue().endswith("\n")
    assert told.getvalue().count("batch") == 1
