"""The commands that a page of the manual shows, and what is wrong with each: read by the parser that would run it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from help_texts import parser_of
from valve_tools.bench.command import TOLD

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
SHELLS = ("", "sh", "bash", "console")
PROGRAMS = r"(?:valve|valved|valve-scheduler|make|kubectl[- ]valve)"
SPAN = re.compile(rf"`((?:sudo )?{PROGRAMS} [^`]+)`")
SYNOPSIS = re.compile(r"[\[\]<>{}|…]|\.\.\.")
"""What stands for something else: such a command is walked word by word, not parsed."""
LESS = re.compile(r"required|expected one argument|: [A-Z]+ is no ")
"""What argparse says of a command that prose names without its arguments, or with a letter for a value."""
ENDS = re.compile(r"\s*(?:&&|\|\||;|\||>|<|&)\s*")


@dataclass(frozen=True)
class Shown:
    page: str
    words: tuple[str, ...]
    is_whole: bool  # as a user would type it

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def shown(page: str, text: str) -> list[Shown]:
    """All commands of Valve in a page: in blocks of a shell, in indented blocks, and in code within a sentence."""
    found = [one for block in blocks(text) for one in lines_of(page, block)]
    prose = FENCE.sub("", text)
    return found + [
        one for span in SPAN.findall(prose) for one in commands(page, re.sub(r"\s+", " ", span.replace("\\|", "|")))
    ]


def blocks(text: str) -> Iterator[str]:
    for fence in FENCE.finditer(text):
        if fence[2] in SHELLS:
            yield fence[3]
    rest = FENCE.sub("", text)
    for block in re.findall(r"(?:^|\n)\n((?: {4}[^\n]*\n|\n)+)", f"\n\n{rest}\n"):
        yield re.sub(r"^ {4}", "", block, flags=re.M)


def lines_of(page: str, block: str) -> Iterator[Shown]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        yield from commands(page, line.strip())


def commands(page: str, line: str) -> Iterator[Shown]:
    """One line may hold several: `cd there && make build`, in front of a pipe, behind `sudo` or a variable."""
    line = re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ")
    has_sketch = bool(SYNOPSIS.search(re.sub(r"\s\|\s.*", "", line)))
    for part in [line] if has_sketch else ENDS.split(line):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        while words and (words[0] in ("sudo", "emu") or re.fullmatch(r"[A-Z_]+=\S*", words[0])):
            del words[0]
        if words[:2] == ["kubectl", "valve"]:
            words[:2] = ["kubectl-valve"]
        if words and re.fullmatch(PROGRAMS, Path(words[0]).name):
            yield Shown(page, (Path(words[0]).name, *words[1:]), not has_sketch)


@cache
def parser_for(words: tuple[str, ...]) -> tuple[argparse.ArgumentParser, int]:
    """The parser that reads these words, and how many of them chose it."""
    program, *rest = words
    if program == "valved":
        return named("valved.main", "main", []), 1
    if program == "valve-scheduler":
        return named("valve_scheduler.main", "main", []), 1
    if program == "kubectl-valve":
        return named("valve_scheduler.cli.commands", "main", []), 1
    if rest[:2] == ["explain", "pod"]:
        return named("valve_scheduler.cli.commands", "main", []), 1
    extra = {one.name: one.value for one in importlib.metadata.entry_points(group="valve.commands")}
    if rest and rest[0] in extra:
        chosen = rest[1:2] if rest[0] in ("demo", "gpu-lab") and rest[1:2] and rest[1][:1].isalpha() else []
        chosen = [] if rest[1:2] == ["cluster"] and rest[0] != "demo" else chosen
        parser = named(*extra[rest[0]].split(":"), chosen)
        return parser, 2 + len(chosen) if chosen and parser.prog.endswith(chosen[0]) else 2
    return named("valved.cli.main", "main", ["status"]), 1


def named(module: str, function: str, words: list[str]) -> argparse.ArgumentParser:
    before, sys.argv = sys.argv, [module, *words]
    try:
        return parser_of(getattr(importlib.import_module(module), function), words)
    finally:
        sys.argv = before


def fault(one: Shown) -> str:
    """Why this command cannot be given; empty where it can."""
    if one.words[0] == "make":
        return fault_of_make(one.words[1:])
    if one.words[:2] == ("valve", "tune"):
        return fault_of_tune(one.words[2:])
    if one.words[:2] == ("valve", "bench"):
        benches = [word for word in one.words[2:] if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", word)]
        if unknown := [name for name in benches if name not in TOLD]:
            return f"no benchmark {unknown[0]}"
    parser, taken = parser_for(one.words[:3])
    rest = list(one.words[taken:])
    if one.words[1:3] == ("explain", "pod"):
        rest = ["explain", *one.words[3:]]
    if not one.is_whole or not rest:
        return walked(parser, rest)
    if "--" in rest and parser.prog != "valve":  # what follows is another program's
        rest = rest[: rest.index("--")]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(rest)
        except SystemExit as end:
            if end.code not in (0, None):
                return walked(parser, rest) if LESS.search(said.getvalue()) else said.getvalue().splitlines()[-1]
    return ""


def walked(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Whether each command and each option of a sketch exists."""
    for word in re.split(r"[\s\[\]|,=]+", " ".join(words)):
        if word == "--":
            break
        below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        if word.startswith("-") and word not in ("-h", "--help"):
            if not any(word in action.option_strings for action in parser._actions):
                return f"{parser.prog} has no option {word}"
        elif below and word[:1].islower():
            if word in below[0].choices:
                parser = below[0].choices[word]
            elif word.isalpha():
                siblings = below[0].choices
                return f"{parser.prog} has no command {word}; there are: {', '.join(siblings)}"
    return ""


def fault_of_make(words: tuple[str, ...]) -> str:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        if word in ("...", "[", "]"):
            continue
        known = rf"\b{re.escape(name)}\b" if is_variable else rf"^(?:\S+ )*{re.escape(name)}:"
        known = r"^\$\((?:TUNE|VENV)\)" if name.startswith(".venv") else known
        if not re.search(known, text, re.M):
            return f"the Makefile has no {name}"
    return ""


def fault_of_tune(words: tuple[str, ...]) -> str:
    """Its parser needs torch: its commands and options are read in its source."""
    room = ROOT / "tune/valve_tune"
    source = "".join(path.read_text() for path in sorted(room.rglob("*.py")))
    options = set(re.findall(r'"(--[a-z][a-z-]+)"', source)) | {"--ungated", "--help"}
    options |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^ {4}([a-z_0-9]+): ", source, re.M)}
    listed = re.search(r"^commands: (.*)$", importlib.import_module("valved.cli.tune").HELP_WITHOUT, re.M)
    assert listed
    first, *rest = [word for word in re.split(r"[\s\[\]|,]+", " ".join(words)) if word] or ["run"]
    if first.isalpha() and first.islower() and first not in listed[1].split(", "):
        return f"valve tune has no command {first}"
    for word in rest:
        flag = word.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag != "--" and not options & {flag, flag.replace("--no-", "--")}:
            return f"valve tune has no option {flag}"
    return ""
