"""Has torch ask the driver by cuMemAlloc for what is allocated in a shim's bracket.

Between valve_kv_begin and valve_kv_end the shim turns device allocations by cuMemAlloc into ranges of pool handles.
torch must then really allocate by that call, neither out of older segments (so it gets a pool of its own) nor by
mapping memory itself (expandable segments, off for the allocation). Where it cannot, the cache is ordinary memory, and
one line says so.

With CUDA this has been read, not run: no GPU was at hand (`valve gpu-lab run torch-bracket` asks a card).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("valve")
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments"
ORDINARY = "the KV cache is ordinary memory, nothing is reclaimed from it"


def own_pool(torch: Any, stack: contextlib.ExitStack) -> bool:
    """Whether torch asks the driver for what is allocated until the stack unwinds."""
    ours = contextlib.ExitStack()
    try:
        ours.enter_context(without_expandable(torch))
        ours.enter_context(torch.cuda.use_mem_pool(torch.cuda.MemPool()))
    except Exception as error:
        ours.close()
        log.warning("valve: %s: torch makes no pool for it (%s)", ORDINARY, error)
        return False
    stack.push(ours)
    return True


@contextlib.contextmanager
def without_expandable(torch: Any) -> Iterator[None]:
    """torch's allocator with expandable segments off and all else as it was: it resets what it is not told again."""
    settings = _settings(torch)
    if not is_expandable(settings):
        yield
        return
    _set(torch, switched_off(settings))
    try:
        yield
    finally:
        _set(torch, settings)


def is_expandable(settings: str) -> bool:
    fields = [field.partition(":") for field in settings.split(",")]
    return any(name.strip() == EXPANDABLE and value.strip().lower() in ("true", "1") for name, _, value in fields)


def switched_off(settings: str) -> str:
    kept = [field for field in settings.split(",") if field.strip() and field.partition(":")[0].strip() != EXPANDABLE]
    return ",".join([*kept, f"{EXPANDABLE}:False"])


def _settings(torch: Any) -> str:
    """In effect now, which another part of the process may have set; else as the process was started."""
    with contextlib.suppress(Exception):
        told = torch.cuda.memory._snapshot()["allocator_settings"]
        found = next((told[name] for name in SETTINGS if told.get(name) is not None), None)
        if found is not None:
            return str(found)
    return next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")


def _set(torch: Any, settings: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    setter(settings)
