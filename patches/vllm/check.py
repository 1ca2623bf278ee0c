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

from valve_hook import VERSION

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


class Refused(Exception):
    """Valve stays away; the text says why and what to do."""


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


def judge(scheduler: Any) -> str:
    """The engine in words, or Refused."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    refuse_version(vllm.__version__)
    refuse_configuration(scheduler)
    refuse_scheduler_class(type(scheduler), Scheduler)
    missing = missing_names(scheduler)
    if missing:
        raise Refused(f"vLLM {vllm.__version__} lacks {', '.join(missing)} (valve_hook {VERSION})")
    toy_pool()
    return f"vllm {vllm.__version__}"


def refuse_scheduler_class(given: type, known: type) -> None:
    """One that replaces what the hook sits in may never call it, and then nobody heeds the table."""
    replaced = [name for name in ("schedule", "update_from_output") if getattr(given, name) is not getattr(known, name)]
    if replaced:
        raise MemoryRefused(f"a scheduler class with a {replaced[0]} of its own ({given.__name__}) is not supported")


def refuse_configuration(scheduler: Any) -> None:
    """As the scheduler's process sees it."""
    refuse(
        scheduler.vllm_config.parallel_config,
        scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups,
        is_context_parallel=getattr(scheduler, "dcp_world_size", 1) * getattr(scheduler, "pcp_world_size", 1) > 1,
        has_connector=getattr(scheduler, "connector", None) is not None,
        has_encoder_connector=getattr(scheduler, "ec_connector", None) is not None,
        is_encoder_decoder=bool(getattr(scheduler, "is_encoder_decoder", False)),
        can_sleep=can_sleep(scheduler.vllm_config),
    )


def refuse_for_worker(config: Any, groups: Sequence[Any]) -> None:
    """The same judgement as a worker sees it, before the cache is made: memory that comes and goes needs a scheduler
    that heeds the table.
    """
    parallel = config.parallel_config
    context = ("decode_context_parallel_size", "prefill_context_parallel_size")
    refuse(
        parallel,
        groups,
        is_context_parallel=any(getattr(parallel, name, 1) > 1 for name in context),
        has_connector=config.kv_transfer_config is not None,
        has_encoder_connector=getattr(config, "ec_transfer_config", None) is not None,
        is_encoder_decoder=bool(getattr(config.model_config, "is_encoder_decoder", False)),
        can_sleep=can_sleep(config),
    )


def can_sleep(config: Any) -> bool:
    """vLLM then makes and unmaps its memory itself, with the same driver calls as Valve."""
    names = ("enable_sleep_mode", "enable_cumem_allocator")
    return any(getattr(getattr(config, "model_config", None), name, False) is True for name in names)


def refuse(
    parallel: Any,
    groups: Sequence[Any],
    *,
    is_context_parallel: bool,
    has_connector: bool,
    has_encoder_connector: bool,
    is_encoder_decoder: bool,
    can_sleep: bool,
) -> None:
    """What cannot be recomputed from a block boundary, or was never tried."""
    reasons = {
        "an engine without a KV cache": not groups,
        f"{len(groups)} KV cache groups (hybrid, sliding-window or Mamba layers)": len(groups) > 1,
        "KV that is not full attention": any(not is_full_attention(group.kv_cache_spec) for group in groups),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": is_context_parallel,
        "a KV connector (transfer or offload)": has_connector,
        "an encoder-cache connector": has_encoder_connector,
        "an encoder-decoder model": is_encoder_decoder,
        "sleep mode": can_sleep,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        step = "run this engine without Valve's memory, or without that feature"
        raise MemoryRefused(f"{found[0]} is not supported: {step}" if groups else f"{found[0]} has no memory to lend")


def is_full_attention(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        return all(is_full_attention(each) for each in inner.values())
    names = {base.__name__ for base in type(spec).__mro__}
    return "FullAttentionSpec" in names and "MambaSpec" not in names


def missing_names(scheduler: Any) -> list[str]:
    from vllm.v1.core.sched import output
    from vllm.v1.request import Request

    pool = scheduler.kv_cache_manager.block_pool
    missing = [name for name in SCHEDULER_NAMES if not hasattr(scheduler, name)]
    missing += [f"BlockPool.{name}" for name in POOL_NAMES if not hasattr(pool, name)]
    fields = {field.name for field in dataclasses.fields(output.SchedulerOutput)}
    cached = {field.name for field in dataclasses.fields(output.CachedRequestData)}
    missing += [f"SchedulerOutput.{name}" for name in sorted(OUTPUT_FIELDS - fields)]
    missing += [f"CachedRequestData.{name}" for name in sorted(CACHED_FIELDS - cached)]
    missing += [f"Request.{name}" for name in sorted(REQUEST_FIELDS - set(Request.__init__.__code__.co_names))]
    if "reset_running_requests" not in inspect.signature(scheduler.reset_prefix_cache).parameters:
        missing.append("reset_prefix_cache(reset_running_requests)")
    preempt = getattr(scheduler, "_preempt_request", None)
    if preempt is not None and "drop_stale_output" not in inspect.signature(preempt).parameters:
        missing.append("_preempt_request(drop_stale_output)")
    return missing


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
