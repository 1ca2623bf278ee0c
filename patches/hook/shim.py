"""What the preloaded shim exports to an engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def kv_ranges() -> int | None:
    """How many ranges of this process are memory that valved gives and takes. None: the shim cannot say."""
    try:
        return int(ctypes.CDLL(None).valve_kv_ranges())
    except AttributeError:
        return None


def shim_call(name: str) -> Callable[..., None] | None:
    """A function that the preloaded shim exports; None without the shim."""
    try:
        function = ctypes.CDLL(None)[name]
    except AttributeError:
        return None
    function.restype = None
    return function  # type: ignore[no-any-return]
