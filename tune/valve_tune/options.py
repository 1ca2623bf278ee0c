"""An option of a command line that has a default."""

from __future__ import annotations

from typing import Any, Protocol


class Options(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **how: Any) -> Any: ...


def option(parser: Options, name: str, default: object, text: str, **more: Any) -> None:
    """Adds an option of the default's type, whose help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    parser.add_argument(
        name, **{"type": type(default), "default": default, "help": f"{text} Default: {shown}.", **more}
    )
