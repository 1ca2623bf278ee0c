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

from valve_hook.link import Layout, Tensor
from valve_hook.sglang.check import Refused, refuse_configuration, refuse_version
from valve_hook.shim import shim_call
from valve_hook.wire import KV_ELASTIC

log = logging.getLogger("valve")


def range_flags() -> int:
    """Elastic where the scheduler's hook will heed the table: the same judgement, as far as the arguments tell."""
    import sglang
    from sglang.srt.runtime_context import get_server_args

    try:
        refuse_version(sglang.__version__)
        refuse_configuration(get_server_args())
    except Refused:
        return 0
    return KV_ELASTIC


def around_create(original: Callable[..., Any], pool: Any) -> Any:
    """MHATokenToKVPool._create_buffers. A pool of torch's own keeps it from serving us out of older segments."""
    begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
    if begin is None or end is None:
        return original(pool)
    try:
        flags = range_flags()
    except Exception:
        log.exception("valve: KV memory stays SGLang's own; nothing is reclaimed from it")
        return original(pool)
    with contextlib.ExitStack() as stack:
        if str(pool.device).startswith("cuda"):
            import torch

            stack.enter_context(torch.cuda.use_mem_pool(torch.cuda.MemPool()))
        begin(ctypes.c_uint32(flags))
        stack.callback(end)
        return original(pool)


def layout_of(pool: Any, pages: int, page_tokens: int) -> Layout:
    """A pool that keeps something else, or in another order, is refused."""
    kind, order = type(pool).__name__, getattr(pool, "kv_cache_layout", None)
    if kind != "MHATokenToKVPool" or order != "nhd" or getattr(pool, "is_quantized_kv_cache", False):
        raise Refused(f"a KV pool of kind {kind} (layout {order}) is not supported with Valve's memory")
    return Layout(
        blocks=pages,
        block_tokens=page_tokens,
        tensors=[_run(buffer, page_tokens) for buffer in (*pool.k_buffer, *pool.v_buffer)],
    )


def _run(buffer: Any, page_tokens: int) -> Tensor:
    page_bytes = int(buffer.stride(0)) * int(buffer.element_size()) * page_tokens
    return Tensor(base=int(buffer.data_ptr()), block_stride=page_bytes, block_bytes=page_bytes)
