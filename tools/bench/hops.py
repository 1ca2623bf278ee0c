"""Says where the time of one reclaim goes: the hops of its way, and of each how long no process stood in a driver call.

The edges are moments that the daemon's event tells, and the driver calls that the emulator's pages tell. Between two
edges a thread of valved or of a shim computes, or it was woken and waits for a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from valve_tools.emulator.process import ThreadCall, union_ns

HOPS = {
    "ask": "the hook rings, valved reads it and orders the stop, until the first call that stops the GPU",
    "stop": "between the calls that stop it",
    "stopped": "from the last of them until valved's loop has a plan and knows that the GPU stands",
    "tell": "the offline engine's table says what is lost",
    "order": "from there to the first call that takes memory: by the shim's two threads, or by a thread of valved",
    "taking": "between the calls that take it",
    "taken": "from the last of them until valved's loop knows",
    "give": "from there to the receiver's first call: by the two threads of its shim",
    "giving": "between the calls that map",
}
TAKING = frozenset({"unmap", "map", "access", "sparse ioctl"})


def hops_ns(
    detail: Mapping[str, Any],
    end_ns: int,
    calls: Mapping[int, Sequence[ThreadCall]],
    receiver: int,
    mapped_ns: int,
) -> dict[str, int]:
    """Own time of each hop: they add up to the own time of the whole. `calls`: by process, those that count."""
    taken_ns = end_ns - int(detail["give_ns"])
    told_ns = taken_ns - int(detail["take_ns"])
    stopped_ns = told_ns - int(detail["tell_ns"])
    begin_ns = end_ns - int(detail["total_ns"]) - int(detail["heard_ns"])
    others = [call for process, of in calls.items() if process != receiver for call in of]
    stops = [call for of in calls.values() for call in of if call.kind == "gate ioctl"]
    asked_ns, gated_ns = _stretch(stops, begin_ns, stopped_ns)
    first_ns, last_ns = _stretch([call for call in others if call.kind in TAKING], told_ns, taken_ns)
    giving = [call for call in calls[receiver] if call.thread != receiver]  # its engine may be at work, too
    giving_ns, _ = _stretch(giving, taken_ns, mapped_ns)
    edges = (asked_ns, gated_ns, stopped_ns, told_ns, first_ns, last_ns, taken_ns, giving_ns, mapped_ns)
    intervals = [(call.begin_ns, call.end_ns) for of in calls.values() for call in of]
    found: dict[str, int] = {}
    before = begin_ns
    for name, edge in zip(HOPS, edges, strict=True):
        after = max(before, edge)
        found[name] = after - before - union_ns(intervals, before, after)
        before = after
    return found


def _stretch(calls: Iterable[ThreadCall], begin_ns: int, end_ns: int) -> tuple[int, int]:
    """From the first of these calls to the last, inside of these bounds; nothing of it where there was none."""
    inside = [call for call in calls if begin_ns <= call.begin_ns and call.end_ns <= end_ns]
    if not inside:
        return begin_ns, begin_ns
    return min(call.begin_ns for call in inside), max(call.end_ns for call in inside)
