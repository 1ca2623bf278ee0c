"""An option of a command line that has a default."""

from __future__ import annotations

import argparse
from typing import Any


def option(parser: argparse._ActionsContainer, name: str, default: object, text: str, **more: Any) -> None:
    """Adds an option of the default's type, whose help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    more.setdefault("type", type(default))
    parser.add_argument(name, default=default, help=f"{text} Default: {shown}.", **more)
