"""An option of a command line that has a default."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any


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
