"""Memory of SGLang's KV pool: allocated inside the shim's bracket, and where its pages lie is told to valved.

The scheduler's process holds the buffers, too. Between valve_kv_begin and valve_kv_end the shim turns device
allocations into ranges of pool handles. Each layer's K and V is a run of pages: page p at its base + p * page bytes.

With CUDA this has been read, not run: no GPU was at hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable
from typing import Any

from valve_hook import Refused
from valve_hook.link import BlockLayout, Tensor
from valve_hook.sglang.check import refuse, refuse_pool
from valve_hook.shim import kv_ranges, shim_call
from valve_hook.torch_pool import ORDINARY, own_pool
from valve_hook.wire import KV_ELASTIC

log = logging.getLogger("valve")


def range_flags(pool: Any) -> int:
    """Elastic where the scheduler's hook will heed the table: the same judgement, before there is a scheduler."""
    import sglang
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
    from sglang.srt.runtime_context import get_server_args, process_model_config

    model = process_model_config()
    try:
        is_hybrid = bool(model.is_hybrid_swa or uses_ssm_state(model))
        refuse(sglang.__version__, get_server_args(), pool, model, is_hybrid=is_hybrid)
    except Refused as refused:
        log.warning("valve: the KV cache has its memory from the start: %s", refused)
        return 0
    return KV_ELASTIC


def around_create(original: Callable[..., Any], pool: Any) -> Any:
    """MHATokenToKVPool._create_buffers. A pool of torch's own keeps it from serving us out of older segments."""
    begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
    if begin is None or end is None:
        return original(pool)
    try:
        flags = range_flags(pool)
    except Exception:
        log.exception("valve: KV memory stays SGLang's own; nothing is reclaimed from it")
        return original(pool)
    with contextlib.ExitStack() as stack:
        if str(pool.device).startswith("cuda"):
            import torch

            if not own_pool(torch, stack):
                return original(pool)
        before = kv_ranges() or 0
        begin(ctypes.c_uint32(flags))
        stack.callback(end)
        made = original(pool)
        after = kv_ranges()
        if after is not None and after <= before:  # a shim that cannot say is taken to have done it
            log.warning("valve: %s: it was not allocated by cuMemAlloc (another allocator here?)", ORDINARY)
        return made


def layout_of(pool: Any, pages: int, page_tokens: int) -> BlockLayout:
    refuse_pool(pool)
    return BlockLayout(
        blocks=pages,
        block_tokens=page_tokens,
        tensors=[_run(buffer, page_tokens) for buffer in (*pool.k_buffer, *pool.v_buffer)],
    )


def _run(buffer: Any, page_tokens: int) -> Tensor:
    page_bytes = int(buffer.stride(0)) * int(buffer.element_size()) * page_tokens
    return Tensor(base=int(buffer.data_ptr()), block_stride=page_bytes, block_bytes=page_bytes)
