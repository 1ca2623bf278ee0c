"""Options of a command line, of the kinds that come more than once."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any


class TuneCommand(argparse.ArgumentParser):
    """One of several commands, for `add_subparsers`. An argument that it does not know it refuses with its own usage:
    argparse leaves that to the parser above, whose usage names no option of this command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


TUNE_COMMAND: type[argparse.ArgumentParser] = TuneCommand


def whole(least: int = 0, most: int = 1_000_000_000) -> Callable[[str], int]:
    """A whole number, for argparse."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):  # of very many digits, too
            if least <= (found := int(text)) <= most:
                return found
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {most}")

    return read


def option(parser: argparse._ActionsContainer, name: str, default: object, text: str, **more: Any) -> None:
    """Adds an option of the default's type, whose help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    more.setdefault("type", whole() if type(default) is int else type(default))
    parser.add_argument(name, default=default, help=f"{text} Default: {shown}.", **more)


def key_file(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    """Adds an option that names the file of a key (serve/publish.token_in). Nothing said is an empty name."""
    parser.add_argument(name, default="", metavar="FILE", help=text)
