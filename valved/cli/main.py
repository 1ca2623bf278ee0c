"""`valve`: the command line of a node. Each command is one module with `add(subparsers)` and a function to run.

Commands of other distributions' parts (demo, bench, replay, ...) come through the entry-point group `valve.commands`,
so that the product imports none of its tools.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Collection
from typing import Any

from valved.cli import doctor, drain, events, explain, pause, policy, record, run, status, systemd, top, up
from valved.cli.exits import FAILED, UNREAD, USAGE, CliError
from valved.errors import told

COMMANDS = (up, run, status, top, explain, events, pause, policy, record, doctor, drain, systemd)
GROUP = "valve.commands"
TOOLS = ("bench", "demo", "gpu-lab", "replay")  # come with the wheel valve-tools


class NodeCommand(argparse.ArgumentParser):
    """One of several commands, for `add_subparsers`. An argument that it does not know it refuses with its own usage:
    argparse leaves that to the parser above, whose usage names no option of this command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


NODE_COMMAND: type[argparse.ArgumentParser] = NodeCommand


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Commands that other packages of this installation provide."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def parser() -> argparse.ArgumentParser:
    return build()[0]


def build() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """With the names of its commands."""
    root = argparse.ArgumentParser(
        prog="valve",
        description="Offline work on the GPUs of online services, out of the way in under a millisecond.",
        epilog="More commands: " + ", ".join(sorted(plugins())) + ". Exit codes: docs/cli.md",
    )
    root.add_argument(
        "--version",
        action="version",
        version=importlib.metadata.version("valve"),
        help="Print the version of Valve and end.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=NODE_COMMAND)
    for module in COMMANDS:
        module.add(commands)
    return root, commands.choices


def dispatch(arguments: list[str]) -> int:
    extra = plugins()
    if arguments[:2] == ["explain", "pod"] and "cluster" in extra:
        return int(extra["cluster"].load()(["explain", *arguments[2:]]))
    if arguments and arguments[0] in extra:
        return int(extra[arguments[0]].load()(arguments[1:]))
    if arguments and arguments[0] in TOOLS:
        raise CliError(
            f"`valve {arguments[0]}` comes with valve-tools, which is not installed",
            USAGE,
            "in a checkout of Valve: pip install ./tools",
        )
    root, known = build()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        names = ", ".join(sorted({*known, *extra, *TOOLS}))
        raise CliError(f"{arguments[0]}: no such command", USAGE, f"there are: {names}")
    if not arguments:
        root.print_help(sys.stderr)
        return USAGE
    options = root.parse_args(arguments)
    return int(options.run(options))


def open_closed() -> None:
    """Input and outputs that we were started without: else our first socket takes the place of one, and what is
    printed goes there. What `valve run` becomes finds them closed, as it would without us."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="backslashreplace"))  # noqa: SIM115 - as long as we live


def forget_output() -> None:
    """Nobody takes it: the interpreter must not try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know each character of a name
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"valve: {error}", file=sys.stderr)
        print(f"valve: {error.next_step}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        forget_output()
        return UNREAD
    except OSError as error:  # a full disk, say, or a file that is not ours
        print(f"valve: {'' if error.filename else f'{arguments[0]}: '}{told(error)}", file=sys.stderr)
        forget_output()
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
