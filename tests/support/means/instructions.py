"""Work as a count: what neither the speed of a machine nor its load changes.

The garbage collector is off meanwhile: what garbage of other tests says when it is collected is not counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(call: Callable[[], object], events: tuple[str, ...] = ("call",)) -> list[str]:
    """The names of the functions that are called in it, or that call with "c_call"."""
    calls: list[str] = []
    gc.disable()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event in events else None)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def instructions_of(call: Callable[[], object]) -> int:
    """Python instructions that a call takes on this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return count
