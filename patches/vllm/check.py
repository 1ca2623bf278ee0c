"""May the hook attach to this vLLM, as it is configured, and how? Versions, names, a behaviour test, then refusals.

A refusal is a sentence for an operator: what was found, what is supported, what to do. Nothing is patched on a guess:
an engine that is refused runs exactly as without Valve, and valved never reclaims from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Any

from valve_hook import VERSION, Refused

OLDEST = (0, 29)  # num_stale_output_tokens and drop_stale_output; one backing tensor with strides
NEWEST = (0, 33)
ENV_UNTESTED = "VALVE_HOOK_UNTESTED"  # set to 1: try a release newer than NEWEST

SCHEDULER_NAMES = (
    *("requests", "running", "waiting", "kv_cache_manager", "block_size", "max_num_running_reqs"),
    *("prev_step_scheduled_req_ids", "reset_preempted_req_ids", "_preempt_request", "grammar_compile_error_reqs"),
)
POOL_NAMES = ("blocks", "null_block", "free_block_queue", "num_gpu_blocks", "touch", "free_blocks", "evict_blocks")
OUTPUT_FIELDS = {
    *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"),
    *("preempted_req_ids", "kv_cache_block_copies"),
}
CACHED_FIELDS = {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}
REQUEST_FIELDS = {"request_id", "num_computed_tokens", "num_stale_output_tokens", "drop_stale_output", "resumable"}
PARAMETERS = {"reset_prefix_cache": "reset_running_requests", "_preempt_request": "drop_stale_output"}

SPECS = "vllm.v1.kv_cache_interface"
KINDS = {(SPECS, "FullAttentionSpec"), (SPECS, "MLAAttentionSpec")}
CONTEXT_SIZES = ("decode_context_parallel_size", "prefill_context_parallel_size")
SLEEP_MODES = ("enable_sleep_mode", "enable_cumem_allocator")  # vLLM then maps its memory itself
EXECUTORS = ("uni", "mp")
DRAFTS = ("", "ngram")  # others were never run: their drafts hold state of their own
STEP = "run this engine without Valve's memory, or without that feature"


class MemoryRefused(Refused):
    """Of its memory only: requests and tokens are counted all the same."""


def parse(version: str) -> tuple[int, int]:
    parts = version.split("+", maxsplit=1)[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise Refused(f"vLLM {version!r} is no release (valve_hook {VERSION} knows {_range()})") from None


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def refuse_version(version: str) -> None:
    """By its number alone."""
    release = parse(version)
    if release < OLDEST or (release > NEWEST and os.environ.get(ENV_UNTESTED) != "1"):
        step = f"; {ENV_UNTESTED}=1 tries all the same" if release > NEWEST else ""
        raise Refused(f"vLLM {version}, and valve_hook {VERSION} knows {_range()}{step}")


def judge(config: Any, cache: Any) -> str:
    """May valved give and take this engine's KV memory? The engine in words, or Refused.

    The only judgement there is. A worker asks before it makes the cache (is the memory elastic?), the scheduler when it
    is built (is the table heeded?); both ask with vLLM's configuration and that of its cache, so both get one answer.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    refuse_version(vllm.__version__)
    refuse_configuration(config, cache)
    scheduler = config.scheduler_config.get_scheduler_cls()
    refuse_scheduler_class(scheduler, Scheduler)
    missing = missing_names(scheduler)
    if missing:
        raise Refused(f"vLLM {vllm.__version__} lacks {', '.join(missing)} (valve_hook {VERSION})")
    toy_pool()
    return f"vllm {vllm.__version__}"


def refuse_scheduler_class(given: type, known: type) -> None:
    """One that replaces what the hook sits in may never call it, and then no hook reads the table."""
    replaced = [name for name in ("schedule", "update_from_output") if getattr(given, name) is not getattr(known, name)]
    if replaced:
        raise MemoryRefused(f"a scheduler class with a {replaced[0]} of its own ({given.__name__}) is not supported")


def refuse_second(link: Any) -> None:
    """Two engines in one process: the worker of the second asks before it makes its cache, its scheduler after it."""
    if link is not None and link.is_taken():
        raise MemoryRefused(f"a second engine in the same process is not supported: {STEP}")


def refuse_configuration(config: Any, cache: Any) -> None:
    """What cannot be recomputed from a block boundary, what schedules in more than one place, what was never run."""
    groups, parallel, model = cache.kv_cache_groups, config.parallel_config, config.model_config
    if not groups:
        raise MemoryRefused("an engine without a KV cache has no memory to lend")
    reasons = {
        f"{len(groups)} KV cache groups (hybrid, sliding-window or Mamba layers)": len(groups) > 1,
        **{f"KV of the kind {kind}": True for group in groups for kind in strange_kinds(group.kv_cache_spec)},
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": any(getattr(parallel, name, 1) > 1 for name in CONTEXT_SIZES),
        "an engine over several nodes": getattr(parallel, "nnodes", 1) > 1,
        f"the executor {executor_of(parallel)}": executor_of(parallel) not in EXECUTORS,
        "a KV connector (transfer or offload)": getattr(config, "kv_transfer_config", None) is not None,
        "an encoder-cache connector": getattr(config, "ec_transfer_config", None) is not None,
        "an encoder-decoder model": getattr(model, "is_encoder_decoder", False) is True,
        "a diffusion language model": getattr(model, "is_diffusion", False) is True,
        "LoRA": getattr(config, "lora_config", None) is not None,
        "a model that takes images, sound or video": getattr(model, "is_multimodal_model", False) is True,
        "sleep mode": any(getattr(model, name, False) is True for name in SLEEP_MODES),
        f"speculative decoding by {drafts_of(config)}": drafts_of(config) not in DRAFTS,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise MemoryRefused(f"{found[0]} is not supported: {STEP}")
    refuse_layout(groups[0], cache.kv_cache_tensors)


def executor_of(parallel: Any) -> str:
    """Ray places workers on any node; an external launcher runs a scheduler per rank, each with losses of its own."""
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and getattr(parallel, "world_size", 1) == 1:
        return "uni"
    return backend if isinstance(backend, str) else getattr(backend, "__name__", "uni")


def drafts_of(config: Any) -> str:
    speculative = getattr(config, "speculative_config", None)
    return "" if speculative is None else str(getattr(speculative, "method", "an unknown method"))


def strange_kinds(spec: Any) -> list[str]:
    """Kinds of KV in this group that were never run. A kind is its exact class: what is derived from full attention may
    keep KV that is written once (sinks) or drop blocks in mid-request.
    """
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        return sorted({kind for each in inner.values() for kind in strange_kinds(each)})
    kind = type(spec)
    if (kind.__module__, kind.__name__) not in KINDS:
        return [kind.__name__]
    if getattr(spec, "non_causal", False) is True:
        return ["non-causal attention (its prompt is computed in one piece, and answers would become part of it)"]
    return []


def refuse_layout(group: Any, tensors: Sequence[Any]) -> None:
    """Where a block's bytes lie must be what is told: page b of a layer in one piece, all of one size."""
    if len(tensors) > 1:  # the scheduler's configuration keeps the first kind alone, so it could not judge the others
        raise MemoryRefused(f"layers with pages of {len(tensors)} kinds are not supported: {STEP}")
    for tensor in tensors:
        if getattr(tensor, "host_resident", False) is True:
            raise MemoryRefused(f"a KV cache in host memory is not supported: {STEP}")
        page, layers = page_bytes(group.kv_cache_spec), len(tensor.layers)
        if tensor.block_stride < page or (layers > 1 and tensor.layer_stride < page):
            step = "set VLLM_KV_CACHE_LAYOUT to LBNHC or BLNHC"
            raise MemoryRefused(f"a KV cache layout that cuts the page of a block into pieces is not supported: {step}")


def page_bytes(spec: Any) -> int:
    """Of one layer and one block, as the engine says it."""
    inner = getattr(spec, "kv_cache_specs", None)
    one = next(iter(inner.values())) if inner else spec
    return int(one.page_size_bytes)


def missing_names(scheduler: type) -> list[str]:
    """What the hook relies on and this vLLM has not. Needs no scheduler: what is set up is named where it is set up."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched import output
    from vllm.v1.request import Request

    missing = [name for name in SCHEDULER_NAMES if not has_name(scheduler, name)]
    missing += [f"BlockPool.{name}" for name in POOL_NAMES if not has_name(BlockPool, name)]
    missing += [f"Request.{name}" for name in sorted(REQUEST_FIELDS) if not has_name(Request, name)]
    fields = {field.name for field in dataclasses.fields(output.SchedulerOutput)}
    cached = {field.name for field in dataclasses.fields(output.CachedRequestData)}
    missing += [f"SchedulerOutput.{name}" for name in sorted(OUTPUT_FIELDS - fields)]
    missing += [f"CachedRequestData.{name}" for name in sorted(CACHED_FIELDS - cached)]
    for method, parameter in PARAMETERS.items():
        function = getattr(scheduler, method, None)
        if function is None or parameter not in inspect.signature(function).parameters:
            missing.append(f"{method}({parameter})")
    return missing


def has_name(kind: type, name: str) -> bool:
    """A method, or something that a constructor of the class sets or calls by this name."""
    builders = [inspect.unwrap(vars(base)["__init__"]) for base in kind.__mro__ if "__init__" in vars(base)]
    codes = [builder.__code__ for builder in builders if hasattr(builder, "__code__")]
    return hasattr(kind, name) or any(name in code.co_names for code in codes)


def toy_pool() -> None:
    """Allocate, withhold, forget and give back on a pool of eight blocks: it must behave as the hook relies on."""
    from valve_hook.vllm.free_blocks import ColumnQueue

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    try:
        pool = BlockPool(8, True, 16)
        free = pool.get_num_free_blocks()
        pool.free_block_queue = ColumnQueue([0, 0, 0, 0, 1, 1, 1, 1], pool.free_block_queue.get_all_free_blocks())
        taken = pool.get_new_blocks(2)
        pool.touch([pool.blocks[7], taken[0]])
        held = pool.get_num_free_blocks(), taken[0].ref_cnt, pool.blocks[7].ref_cnt
        pool.evict_blocks({7, taken[0].block_id})
        pool.free_blocks([pool.blocks[7], *taken, taken[0]])
        columns = {block.block_id // 4 for block in pool.get_new_blocks(4)}
    except Exception as error:
        raise Refused(f"the block pool of this vLLM failed the self-check: {error!r}") from error
    facts = (free, held, [block.block_id // 4 for block in taken], columns, pool.null_block.block_id)
    if facts != (7, (4, 2, 1), [1, 1], {1}, 0) or not isinstance(taken[0], KVCacheBlock):
        raise Refused(f"the block pool of this vLLM behaves in another way than the hook relies on: {facts}")
