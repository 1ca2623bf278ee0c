"""Memory in a vLLM worker: the KV cache is allocated inside the shim's bracket, and its layout is told to valved.

Three methods of Worker are wrapped. `_maybe_get_memory_pool_context("kv_cache")` is entered around the one allocation
that backs the whole cache; between valve_kv_begin and valve_kv_end the shim turns device allocations into ranges of
pool handles. `initialize_from_config` returns when the cache stands; every KVCacheTensor then says where its blocks
lie: layer l of block b at base + offset + l * layer_stride + b * block_stride, for every attention backend and both
layer-outermost (LBNHC) and block-outermost (BLNHC) layouts.
`execute_model` lets the shim carry out orders that wait for the place between two steps.

With CUDA this has been read, not run: no GPU was at hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from valve_hook.link import Layout, Tensor, process_link
from valve_hook.shim import shim_call
from valve_hook.vllm import check
from valve_hook.wire import KV_ELASTIC

log = logging.getLogger("valve")
MARK = "_valve_wrapped"


@contextlib.contextmanager
def bracket(inner: contextlib.AbstractContextManager[Any], flags: int) -> Iterator[None]:
    """vLLM's own context within ours. A pool of its own keeps torch from serving the cache out of older segments."""
    begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
    with contextlib.ExitStack() as stack:
        if begin is not None and end is not None:
            pool = _fresh_pool()
            if pool is not None:
                stack.enter_context(pool)
            begin(ctypes.c_uint32(flags))
            stack.callback(end)
        stack.enter_context(inner)
        yield


def _fresh_pool() -> contextlib.AbstractContextManager[Any] | None:
    import torch

    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    return torch.cuda.use_mem_pool(torch.cuda.MemPool())  # type: ignore[no-any-return]


def range_flags(config: Any, groups: Sequence[Any] | None) -> int:
    """Elastic where the scheduler's hook will heed the table: the same judgement, before there is a scheduler."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    try:
        check.refuse_version(vllm.__version__)
        check.refuse_for_worker(config, groups or ())
        check.refuse_scheduler_class(config.scheduler_config.get_scheduler_cls(), Scheduler)
        check.toy_pool()
    except check.Refused as refused:
        log.warning("valve: the KV cache has its memory from the start: %s", refused)
        return 0
    return KV_ELASTIC


def tensor_of(base: int, tensor: Any) -> Tensor:
    """One KVCacheTensor in the words of the contract."""
    layers = len(tensor.layers)
    page = min(tensor.layer_stride, tensor.block_stride) if layers > 1 else tensor.block_stride
    return Tensor(
        base=base + tensor.offset,
        block_stride=tensor.block_stride,
        block_bytes=page,
        repeats=[(layers, tensor.layer_stride)],
    )


def layout_of(base: int, config: Any) -> Layout:
    """Precondition: one KV cache group; the scheduler's hook refuses others."""
    spec = config.kv_cache_groups[0].kv_cache_spec
    tensors = [tensor_of(base, tensor) for tensor in config.kv_cache_tensors]
    return Layout(blocks=config.num_blocks, block_tokens=spec.block_size, tensors=tensors)


def storage_base(runner: Any) -> int:
    """Where the one backing allocation begins."""
    caches = runner.kv_caches
    first = caches[0] if isinstance(caches, list) else next(iter(caches.values()))
    return int(first.untyped_storage().data_ptr())


def wrap_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.initialize_from_config, MARK, False):
        return
    context, initialize = Worker._maybe_get_memory_pool_context, Worker.initialize_from_config
    execute, between_steps = Worker.execute_model, shim_call("valve_kv_step")

    @functools.wraps(context)
    def valve_context(self: Any, tag: str) -> Any:
        inner = context(self, tag)
        groups = self.__dict__.get("_valve_kv_groups")
        return bracket(inner, range_flags(self.vllm_config, groups)) if tag == "kv_cache" else inner

    @functools.wraps(initialize)
    def valve_initialize(self: Any, kv_cache_config: Any) -> Any:
        self._valve_kv_groups = kv_cache_config.kv_cache_groups
        result = initialize(self, kv_cache_config)
        try:
            register_layout(self.model_runner, kv_cache_config)
        except Exception:
            log.exception("valve: the KV layout could not be told; nothing is reclaimed from this engine")
        return result

    @functools.wraps(execute)
    def valve_execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if between_steps is not None:
            between_steps()
        forget_chunks(self.model_runner, scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)

    setattr(valve_initialize, MARK, True)
    Worker.execute_model = valve_execute
    Worker._maybe_get_memory_pool_context, Worker.initialize_from_config = valve_context, valve_initialize


def forget_chunks(runner: Any, output: Any) -> None:
    """Token-wise pooling gathers the hidden states of a prompt chunk by chunk. A request that was sent back to waiting
    begins again, and vLLM's V1 runner would put the new chunks behind the old ones.
    """
    try:
        for name in getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()):
            state = getattr(getattr(runner, "requests", {}).get(name), "pooling_states", None)
            if state is not None:
                state.clean()
    except Exception:
        log.exception("valve: this runner keeps its requests in another way; the engine goes on")


def register_layout(runner: Any, config: Any) -> None:
    link = process_link()
    if link is not None and len(config.kv_cache_groups) == 1:
        link.register_layout(layout_of(storage_base(runner), config))
