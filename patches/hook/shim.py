"""What the preloaded shim exports to an engine, and whether memory of this process may have holes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from valve_hook.wire import KV_ELASTIC

_asked_for_elastic = False  # by valve_kv_begin, in this process


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
    return _noted(function) if name == "valve_kv_begin" else function  # type: ignore[no-any-return]


def _noted(begin: Callable[..., None]) -> Callable[..., None]:
    def begin_and_note(flags: ctypes.c_uint32) -> None:
        global _asked_for_elastic  # noqa: PLW0603 - like the ranges themselves, one fact of the process
        _asked_for_elastic |= bool(flags.value & KV_ELASTIC)
        begin(flags)

    return begin_and_note


def may_have_holes() -> bool:
    """Whether an elastic cache of this process may lack memory before its scheduler reads the table.

    The cache of an online service cannot: valved backs it whole before the allocation returns (valved/kv/whole.py) and
    takes only what the hook offered. So Valve never stops an online engine here. `valve run --offline` and the device
    plugin both set this variable; an online pod does not have it. If a process is offline for valved and lacks the
    variable, its shim asks valved before the first step and waits.
    """
    return os.environ.get("VALVE_ROLE") == "offline"


class Blind(RuntimeError):
    """A step would compute from memory that may be missing, and its answers would be wrong without a sign."""


def refuse_blind(session: object | None, why: str = "") -> None:
    """Call before a step is launched. An elastic cache may have holes, and only the table says where. Without a
    session no hook reads the table, so every answer may be wrong, and the engine stops.
    """
    if session is None and _asked_for_elastic and may_have_holes() and kv_ranges() != 0:
        raise Blind(
            "valve: this engine's KV cache is Valve's memory and may have holes, but its scheduler is not attached"
            + (f" ({why})" if why else "")
            + ": it stops, because its answers would be wrong. Start it again, or run it without Valve"
        )
