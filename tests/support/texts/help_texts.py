"""What each command line of this project says about itself: its parsers, walked, and what is missing in their help."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

UNIT = re.compile(
    r"\b(seconds?|milliseconds|microseconds|minutes|hours|bytes|MiB|ports?|seed|numbers?|shares?|factor|norm|lengths"
    r"|tokens|requests|batch|cards?|GPUs|steps|layers|averages|benchmarks?|microsecond)\b"
)
"""A number's help says of what it is a number."""
NO_VALUE = (None, "", [], False, True, argparse.SUPPRESS, Path())
OWN = (argparse._HelpAction, argparse._SubParsersAction)


class Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(main: Callable[..., object], *arguments: object) -> argparse.ArgumentParser:
    """The parser by which `main` would have read its command line."""

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Captured(self)

    with patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            main(*arguments)
        except Captured as captured:
            return captured.parser
    raise AssertionError(f"{main} reads no command line")


def said(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.Action | None]]:
    """(option or command, its help as it is printed, the option) of a parser and of the commands below it."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {each.dest: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                yield f"{parser.prog} {name}", told.get(name, ""), None
                yield from said(below)
        elif not isinstance(action, OWN) and action.help != argparse.SUPPRESS:
            text = formatter._expand_help(action) if action.help else ""
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", text, action


def is_sentence(text: str) -> bool:
    return len(text.split()) >= 3 and not text[0].islower() and text.endswith(".")


def missing(parser: argparse.ArgumentParser) -> list[str]:
    """A line for each help that is no sentence, leaves out its unit or does not say its default."""
    found = []
    for name, text, action in said(parser):
        if not is_sentence(text):
            found.append(f"{name}: {text!r} is no sentence")
        elif action is not None and action.type in (int, float) and not UNIT.search(text):
            found.append(f"{name}: {text!r} names no unit")
        elif action is not None and action.default not in NO_VALUE and "Default: " not in text:
            found.append(f"{name}: {text!r} leaves out the default {action.default}")
    return found


def unsaid(source: str) -> list[str]:
    """Options and commands of a Python file that have no help, or one that is written there and is no sentence."""
    found = []
    for call in ast.walk(ast.parse(source)):
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
        if name in ("add_argument", "add_parser", "option"):
            told = call.args[3:] if name == "option" else [k.value for k in call.keywords if k.arg in ("help", None)]
            is_bad = any(isinstance(text, ast.Constant) and not is_sentence(str(text.value)) for text in told)
            if not told or is_bad:
                found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found
