"""When a disk counts as one that hangs, and the words for it."""

from __future__ import annotations

HANGS_NS = 500_000_000  # a write that takes so long is told of, and nobody waits for it any more


def hanging(began_ns: int | None, now_ns: int) -> str:
    """Of a write that is under way since then. Empty: its disk may answer yet, or nothing is asked of it."""
    silent_ns = now_ns - began_ns if began_ns is not None else 0
    return f"its disk has not answered for {silent_ns / 1e9:.1f} s" if silent_ns >= HANGS_NS else ""
