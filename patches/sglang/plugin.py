"""The zero-line form: SGLang loads `register` through the entry point `sglang.srt.plugins` in each of its processes.

Five hooks on its own registry: the calls of calls.py around three methods of the scheduler, unless the source patch
makes them, the pauses of granted time around a fourth, and the shim's bracket around the one that allocates the KV
buffers. Without a valved nothing is hooked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from valve_hook.link import ENV_RUN_DIR, socket_path
from valve_hook.sglang import calls, memory
from valve_hook.sglang.pauses import pauses_of

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
CREATE = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers"
RETRACT = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"


def is_patched() -> bool:
    """The source patch makes the calls: they are not to be made twice."""
    return hasattr(sys.modules["sglang.srt.managers.scheduler"], "valve")


def around_choose(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    if is_patched():
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)
    running_batch, last_batch = calls.before_choose(scheduler, running_batch, last_batch)
    pauses = pauses_of(scheduler)
    if pauses is not None and pauses.drains:
        plan = nothing(running_batch)
    else:
        plan = original(scheduler, running_batch=running_batch, last_batch=last_batch)
    calls.after_choose(scheduler, plan.batch_to_run)
    if pauses is not None:
        pauses.guard(lambda: pauses.chosen(plan.batch_to_run))
    return plan


def nothing(running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def around_ingest(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Where requests are taken in, between two steps."""
    pauses = pauses_of(scheduler) if not is_patched() else None
    if pauses is None:
        return original(scheduler, *args, **kwargs)
    pauses.guard(pauses.before_ingest)
    taken = original(scheduler, *args, **kwargs)
    pauses.guard(pauses.ingested)
    return taken


def around_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    if is_patched():
        return original(scheduler, batch, result)
    after_result = calls.before_result(scheduler, batch, result)
    try:
        return original(scheduler, batch, result)
    finally:
        after_result()
        pauses = pauses_of(scheduler)
        if pauses is not None:
            pauses.guard(lambda: pauses.processed(batch))


def around_retract(original: Callable[..., Any], batch: Any) -> Any:
    if is_patched():
        return original(batch)
    spare = calls.sparing(batch)
    retracted, ratio, aborted = original(batch)
    retracted, aborted = spare(retracted, aborted)
    return retracted, ratio, aborted


def register() -> None:
    path = socket_path()
    if path is None:
        return
    os.environ.setdefault(ENV_RUN_DIR, str(path.parent))  # the ranks that this process starts find the same
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.process_batch_result", around_result, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.get_next_batch_to_run", around_choose, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.ingest_requests", around_ingest, HookType.AROUND)
    HookRegistry.register(CREATE, memory.around_create, HookType.AROUND)
    HookRegistry.register(RETRACT, around_retract, HookType.AROUND)
