"""Memory in a vLLM worker: the KV cache is allocated inside the shim's bracket, and its layout is told to valved.

Four methods of Worker are wrapped. `_maybe_get_memory_pool_context("kv_cache")` is entered around the one allocation
that backs the whole cache (placement.py). `initialize_from_config` returns when the cache stands; its KVCacheTensor
then says where its blocks lie: layer l of block b at base + offset + l * layer_stride + b * block_stride, for every
attention backend and both layer-outermost (LBNHC) and block-outermost (BLNHC) layouts; others are refused (check.py).
`execute_model` lets the shim carry out orders that wait for the place between two steps, and computes nothing in an
elastic cache that no scheduler heeds the table for. `compile_or_warm_up_model` makes steps that nobody reads.

With CUDA this has been read, not run: no GPU was at hand.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from valve_hook import Refused
from valve_hook.link import BlockLayout, Tensor, process_link
from valve_hook.shim import may_have_holes, shim_call
from valve_hook.vllm import check
from valve_hook.vllm.calls import UNHEEDED
from valve_hook.vllm.placement import Placement, bracket
from valve_hook.vllm.resumed import Resumed
from valve_hook.wire import KV_ELASTIC

log = logging.getLogger("valve")
MARK = "_valve_wrapped"


class Unheeded(RuntimeError):
    """Blocks of the cache may have no memory, and nothing keeps this step off them."""


class WorkerHook:
    """One per Worker, from the moment that its cache is to be made."""

    def __init__(self, config: Any, cache: Any) -> None:
        self.placement = Placement(flags=range_flags(config, cache))
        self._cache = cache
        self._between_steps = shim_call("valve_kv_step")
        self._resumed: Resumed | None = None
        self._is_warming_up = False

    @property
    def is_elastic(self) -> bool:
        return self.placement.is_ours and bool(self.placement.flags & KV_ELASTIC)

    def tell_layout(self, runner: Any) -> None:
        """Of an elastic cache: valved gives and takes nothing else. It refuses what lies outside its ranges."""
        link = process_link()
        if link is not None and self.placement.flags & KV_ELASTIC:
            link.register_layout(layout_of(storage_base(runner), self._cache))

    @contextlib.contextmanager
    def warming_up(self) -> Any:
        self._is_warming_up = True
        try:
            yield
        finally:
            self._is_warming_up = False

    def before_step(self, runner: Any, output: Any) -> None:
        if self._is_warming_up:  # before the first step the shim asks valved which rank heeds the table: none can yet
            return
        if self._between_steps is not None:
            self._between_steps()
        if self.is_elastic and may_have_holes() and output.total_num_scheduled_tokens:
            why = getattr(output, UNHEEDED, "the scheduler's process has no hook (is VLLM_PLUGINS set there?)")
            if why:
                raise Unheeded(
                    f"valve: this engine's KV cache is Valve's memory, and its scheduler does not read valved's table: "
                    f"{why}. Nothing is computed: start the engine again, or start it without Valve's memory"
                )
        if self._resumed is None:
            self._resumed = Resumed(runner)
        self._resumed.before_step(output, may_lose=self.is_elastic and may_have_holes())


def range_flags(config: Any, cache: Any) -> int:
    """Elastic where the scheduler's hook will heed the table: it asks the same, of the same."""
    try:
        check.judge(config, cache)
        check.refuse_second(process_link())
    except Refused as refused:
        log.warning("valve: the KV cache has its memory from the start: %s", refused)
        return 0
    except Exception:
        log.exception("valve: the KV cache has its memory from the start: checking this vLLM failed")
        return 0
    return KV_ELASTIC


def tensor_of(base: int, tensor: Any) -> Tensor:
    """One KVCacheTensor in the words of the contract. What pads a page, or a block of all layers, belongs to it."""
    layers = len(tensor.layers)
    is_block_outer = layers > 1 and tensor.layer_stride < tensor.block_stride
    return Tensor(
        base=base + tensor.offset,
        block_stride=tensor.block_stride,
        block_bytes=tensor.block_stride,
        repeats=[] if is_block_outer or layers == 1 else [(layers, tensor.layer_stride)],
    )


def layout_of(base: int, cache: Any) -> BlockLayout:
    """Precondition: `check.judge` let it pass, so there is one group and one tensor whose pages are in one piece."""
    spec = cache.kv_cache_groups[0].kv_cache_spec
    tensors = [tensor_of(base, tensor) for tensor in cache.kv_cache_tensors]
    return BlockLayout(blocks=cache.num_blocks, block_tokens=spec.block_size, tensors=tensors)


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
    execute = Worker.execute_model

    @functools.wraps(context)
    def valve_context(self: Any, tag: str) -> Any:
        inner, hook = context(self, tag), hook_of(self)
        return bracket(inner, hook.placement) if tag == "kv_cache" and hook is not None else inner

    @functools.wraps(initialize)
    def valve_initialize(self: Any, kv_cache_config: Any) -> Any:
        hook = self._valve = WorkerHook(self.vllm_config, kv_cache_config)
        result = initialize(self, kv_cache_config)
        try:
            hook.tell_layout(self.model_runner)
        except Exception:
            log.exception("valve: the KV layout could not be told to valved; nothing is reclaimed from this engine")
        return result

    @functools.wraps(execute)
    def valve_execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        hook = hook_of(self)
        if hook is not None:
            hook.before_step(self.model_runner, scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)

    setattr(valve_initialize, MARK, True)
    Worker.execute_model = valve_execute
    Worker._maybe_get_memory_pool_context, Worker.initialize_from_config = valve_context, valve_initialize
    Worker.compile_or_warm_up_model = in_warm_up(Worker.compile_or_warm_up_model)


def in_warm_up(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(warm_up)
    def valve_warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = hook_of(self)
        with hook.warming_up() if hook is not None else contextlib.nullcontext():
            return warm_up(self, *args, **kwargs)

    return valve_warm_up


def hook_of(worker: Any) -> WorkerHook | None:
    hook: WorkerHook | None = worker.__dict__.get("_valve")
    return hook
