"""What the preloaded shim exports to an engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def shim_call(name: str) -> Callable[..., None] | None:
    """A function that the preloaded shim exports; None without the shim."""
    try:
        function = ctypes.CDLL(None)[name]
    except AttributeError:
        return None
    function.restype = None
    return function  # type: ignore[no-any-return]
