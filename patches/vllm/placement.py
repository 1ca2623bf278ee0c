"""Placing vLLM's KV cache: the one allocation of the cache is made inside the shim's bracket (torch_pool.py)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from valve_hook.shim import kv_ranges, shim_call
from valve_hook.torch_pool import ORDINARY, own_pool

log = logging.getLogger("valve")


@dataclass(slots=True)
class Placement:
    """What is asked of the shim for the cache, and what came of it."""

    flags: int
    is_ours: bool = False
    """The shim made ranges of Valve's memory of it."""


@contextlib.contextmanager
def bracket(inner: contextlib.AbstractContextManager[Any], placement: Placement) -> Iterator[None]:
    """vLLM's own context within ours. What fails in ours leaves the cache where vLLM alone would have put it."""
    begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
    with contextlib.ExitStack() as stack:
        before = None
        if begin is not None and end is not None and _own_pool(stack):
            before = kv_ranges() or 0
            begin(ctypes.c_uint32(placement.flags))
            stack.callback(end)
        stack.enter_context(inner)
        yield
        if before is not None:
            after = kv_ranges()
            placement.is_ours = after is None or after > before  # a shim that cannot say is taken to have done it
            if not placement.is_ours:
                log.warning("valve: %s: it was not allocated by cuMemAlloc (another allocator here?)", ORDINARY)


def _own_pool(stack: contextlib.ExitStack) -> bool:
    """Whether the engine's allocations go to the driver until the stack unwinds."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return True
    import torch

    return own_pool(torch, stack)
