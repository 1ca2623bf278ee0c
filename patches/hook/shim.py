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

    An online service's cannot: valved backs it whole before the allocation returns (valved/kv/whole.py) and takes only
    what the hook offered. So nothing of ours ever stops an online engine. Both who start offline work set this
    variable; an online pod has none. Whoever valved calls offline without it is held by the shim, which asks valved
    before its first step.
    """
    return os.environ.get("VALVE_ROLE") == "offline"


class Blind(RuntimeError):
    """A step would compute from memory that may not be there, and nobody would notice."""


def refuse_blind(session: object | None, why: str = "") -> None:
    """Call before a step is launched. A cache that was asked for elastic may have holes, and only who reads the table
    knows them: without a session every answer may be wrong, so the engine stops.
    """
    if session is None and _asked_for_elastic and may_have_holes() and kv_ranges() != 0:
        raise Blind(
            "valve: this engine's KV cache is Valve's memory and may have holes, but its scheduler is not attached"
            + (f" ({why})" if why else "")
            + ": it stops, because its answers would be wrong. Start it again, or run it without Valve"
        )
