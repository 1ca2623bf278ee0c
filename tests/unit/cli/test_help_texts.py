"""Every option and command of every command line has a sentence of help, with its unit and its default."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest
from help_texts import missing, parser_of, unsaid

LINES = [
    ("valved.cli.main", ["status"]),
    ("valved.main", []),
    ("valve_router.command", []),
    ("valve_scheduler.main", []),
    ("valve_scheduler.cli.commands", []),
    ("valve_tools.bench.command", []),
    ("valve_tools.bench.gate", []),
    ("valve_tools.bench.grants", []),
    ("valve_tools.demo.cluster", []),
    ("valve_tools.demo.command", []),
    ("valve_tools.demo.granted", []),
    ("valve_tools.demo.granted_service", []),
    ("valve_tools.demo.kv_batch", []),
    ("valve_tools.demo.kv_service", []),
    ("valve_tools.demo.memory", []),
    ("valve_tools.demo.tune", []),
    ("valve_tools.emulator.ctl", []),
    ("valve_tools.emulator.run", []),
    ("valve_tools.engines.demo", []),
    ("valve_tools.engines.granted_demo", []),
    ("valve_tools.gpu.command", []),
    ("valve_tools.gpu.command", ["report"]),
    ("valve_tools.gpu.command", ["replay"]),
    ("valve_tools.lab.fleet.__main__", []),
    ("valve_tools.replay.command", []),
]
FOLDERS = {"scheduler": "", "valved": "valved.", "tools": "valve_tools."}
ELSEWHERE = (  # they need torch or the engines: tests/tune walks the parsers of tune
    "tune/",
    "tools/tune/",
    "tools/gpu/engines/",
    "tools/engines/client.py",  # the engine's own parser
    "tools/lab/cotrain/",  # their files carry a hash on results pages
    "tools/lab/granted/",
)


@pytest.mark.parametrize(("module", "words"), LINES)
def test_no_option_and_no_command_is_without_its_sentence(module, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *words])
    main = importlib.import_module(module).main

    takes_words = main.__code__.co_argcount
    assert missing(parser_of(main, *([words] if takes_words else []))) == []


@pytest.mark.parametrize(("module", "words"), LINES)
def test_what_a_command_does_not_know_is_never_answered_with_the_usage_of_another(module, words, monkeypatch, capsys):
    """The usage of the parser above names none of its options."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    main = importlib.import_module(module).main

    takes_words = main.__code__.co_argcount
    root = parser_of(main, *([words] if takes_words else []))
    for action in root._actions:
        for name, command in (action.choices if isinstance(action, argparse._SubParsersAction) else {}).items():
            with pytest.raises(SystemExit):
                root.parse_args([name, "--no-such-option"])
            assert capsys.readouterr().err.startswith(f"usage: {command.prog} ")


def test_no_file_has_an_option_without_help_and_none_with_a_parser_is_left_out(repository):
    files = [path for top in ("scheduler", "valved", "tools", "tune") for path in (repository / top).rglob("*.py")]
    walked = {module for module, _ in LINES} | {
        "valve_tools.gpu.replay",
        "valve_tools.replay.options",
    }  # by their callers
    left_out, silent = [], {}
    for path in files:
        name, source = path.relative_to(repository).as_posix(), path.read_text()
        if name.startswith(("tools/lab/cotrain/", "tools/lab/granted/")):
            continue
        if found := unsaid(source):
            silent[name] = found
        if "ArgumentParser(" in source and not name.startswith(ELSEWHERE):
            top, _, rest = name.removesuffix(".py").partition("/")
            module = FOLDERS[top] + rest.replace("/", ".")
            left_out += [name] if module not in walked else []

    assert (silent, left_out) == ({}, [])


@pytest.mark.parametrize(
    ("told", "more", "finding"),
    [
        (None, {}, "is no sentence"),
        ("seconds", {"type": float}, "is no sentence"),
        ("how long to wait for them", {}, "is no sentence"),
        ("Wait so long for them.", {"type": float}, "names no unit"),
        ("Wait this many seconds.", {"type": float, "default": 5.0}, "leaves out the default 5.0"),
    ],
)
def test_empty_and_half_help_is_found(told, more, finding):
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", help=told, **more)

    assert finding in missing(parser)[0]


def test_an_option_without_help_is_found_in_a_file():
    good = (
        "p.add_argument('--a', help='Print it as JSON.')\np.add_argument('--b', **more)\np.add_parser(n, help=text)\n"
    )

    assert unsaid(good) == []
    assert unsaid(good + "p.add_argument('--c')\n") == ["line 4: p.add_argument('--c')"]
    assert len(unsaid("p.add_parser('up', help='start')\n")) == 1
