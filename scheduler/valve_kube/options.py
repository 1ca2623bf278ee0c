"""An option of a command line that has a default."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any


def seconds(text: str) -> float:
    """A time above 0, for argparse."""
    with contextlib.suppress(ValueError):
        if 0.0 < (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")


def option(parser: argparse._ActionsContainer, name: str, default: object, text: str, **more: Any) -> None:
    """Adds an option of the default's type, whose help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    more.setdefault("type", type(default))
    parser.add_argument(name, default=default, help=f"{text} Default: {shown}.", **more)
