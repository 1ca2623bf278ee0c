"""What command lines share: numbers within bounds, and commands that refuse themselves what they do not know."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any


class Subcommand(argparse.ArgumentParser):
    """One of several commands, for `add_subparsers`. An argument that it does not know it refuses with its own usage:
    argparse leaves that to the parser above, whose usage names no option of this command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


SUBCOMMAND: type[argparse.ArgumentParser] = Subcommand


def seconds(text: str) -> float:
    """A time above 0, for argparse."""
    with contextlib.suppress(ValueError):
        if 0.0 < (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")


def amount(text: str) -> float:
    """A number from 0 on, for argparse."""
    with contextlib.suppress(ValueError):
        if 0.0 <= (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text[:20]} is no number from 0 on")


def more_than_none(text: str) -> float:
    """A number above 0, for argparse."""
    if found := amount(text):
        return found
    raise argparse.ArgumentTypeError(f"{text[:20]} is no number above 0")


def whole(least: int = 0, most: int = 1_000_000_000) -> Callable[[str], int]:
    """A whole number, for argparse."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):  # of very many digits, too
            if least <= (found := int(text)) <= most:
                return found
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {most}")

    return read


PORT = whole(0, 65535)


def option(parser: argparse._ActionsContainer, name: str, default: object, text: str, **more: Any) -> None:
    """Adds an option of the default's type, whose help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    kind = type(default)
    more.setdefault("type", whole() if kind is int else amount if kind is float else kind)
    more["type"](str(default))  # bounds that refuse their own default are none that anybody meant
    parser.add_argument(name, default=default, help=f"{text} Default: {shown}.", **more)
