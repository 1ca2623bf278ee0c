"""May the hook attach to this SGLang, as it is configured, and how? A refusal is a sentence for an operator."""

from __future__ import annotations

import os
from typing import Any

from valve_hook import VERSION, Refused
from valve_hook.link import ENV_RUN_DIR
from valve_hook.wire import Mode

SUPPORTED = ("0.5.23",)
SCHEDULER_NAMES = (
    "pause_generation",
    "continue_generation",
    "flush_cache",
    "batch_result_processor",
    "running_batch",
    "last_batch",
    "chunked_req",
    "_pending_chunked_abort_req",
    "max_queued_requests",
    "_add_request_to_queue",
    "device_module",
    "send_abort_output",
    "new_token_ratio_tracker",
)
ROWS_NAMES = ("req_to_token", "write", "free")
TREE_NAMES = ("_evict_device_next_node", "_evict_device_leaf", "tree_components")
CORE_NAMES = ("evict_device_start", "evict_device_end", "collect_path_info", "collect_full_device_indices")


def judge(version: str, scheduler: Any) -> Mode:
    is_hybrid = any(getattr(scheduler, name, False) for name in ("is_hybrid_swa", "is_hybrid_ssm"))
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    refuse(version, scheduler.server_args, pool, scheduler.model_config, is_hybrid=is_hybrid)
    _refuse(
        {
            "speculative decoding": not scheduler.spec_algorithm.is_none(),
            "a diffusion language model": getattr(scheduler, "dllm_config", None) is not None,
            "HiSparse": bool(getattr(scheduler, "enable_hisparse", False)),
            "unified memory": bool(getattr(scheduler, "enable_unified_memory", False)),
            "prefill and decode multiplexed": bool(getattr(scheduler, "enable_pdmux", False)),
        }
    )
    lacks = [name for name in SCHEDULER_NAMES if not hasattr(scheduler, name)]
    lacks += [f"ReqToTokenPool.{name}" for name in ROWS_NAMES if not hasattr(scheduler.req_to_token_pool, name)]
    if lacks:
        raise Refused(f"SGLang {version} lacks {', '.join(lacks)}")
    return Mode.FULL if can_forget(scheduler.tree_cache) else Mode.COARSE


def refuse(version: str, config: Any, pool: Any, model: Any, *, is_hybrid: bool) -> None:
    """Scheduler and pool both ask this one function, because memory that comes and goes needs both."""
    refuse_version(version)
    refuse_configuration(config)
    _refuse(
        {
            "hybrid attention": is_hybrid,
            "a model that takes images, sound or video": getattr(model, "is_multimodal", False) is True,
        }
    )
    refuse_pool(pool)


def refuse_pool(pool: Any) -> None:
    """One that keeps something else, or in another order."""
    kind, order = type(pool).__name__, getattr(pool, "kv_cache_layout", None)
    is_quantized = getattr(pool, "is_quantized_kv_cache", False)
    if kind != "MHATokenToKVPool" or order != "nhd" or is_quantized:
        what = "a quantized KV cache" if is_quantized else f"a KV pool of kind {kind} (layout {order})"
        raise Refused(f"{what} is not supported with Valve's memory")


def refuse_version(version: str) -> None:
    if version not in SUPPORTED:
        raise Refused(f"SGLang {version}, and valve_hook {VERSION} knows {', '.join(SUPPORTED)}")


def refuse_configuration(config: Any) -> None:
    """What the arguments of SGLang say. They are known before there is a scheduler."""
    _refuse(
        {
            "an engine over several nodes": config.nnodes > 1,
            f"tensor parallelism without {ENV_RUN_DIR} (each rank would look for a valved by itself)": (
                config.tp_size > 1 and not os.environ.get(ENV_RUN_DIR)
            ),
            "expert or context parallelism": max(config.ep_size, config.attn_cp_size, config.dcp_size) > 1,
            "pipeline parallelism": config.pp_size > 1,
            "data parallelism": config.dp_size > 1,
            "hierarchical cache": config.enable_hierarchical_cache,
            "prefill and decode in different processes": config.disaggregation_mode != "null",
            "speculative decoding": config.speculative_algorithm is not None,
            "LoRA": bool(getattr(config, "enable_lora", None) or getattr(config, "lora_paths", None)),
            "streaming sessions": config.enable_streaming_session,
            "giving the hidden states of an answer": (  # of one sent back SGLang gives those of a prompt in between
                bool(getattr(config, "enable_return_hidden_states", None))
                or getattr(config, "return_hidden_states_mode", None) == "full"
            ),
            "a diffusion language model": getattr(config, "dllm_algorithm", None) is not None,
            "HiSparse": bool(getattr(config, "enable_hisparse", False)),
            "unified memory": bool(getattr(config, "enable_unified_memory", False)),
            "prefill and decode multiplexed": bool(getattr(config, "enable_pdmux", False)),
        }
    )


def _refuse(reasons: dict[str, bool]) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise Refused(f"{found[0]} is not supported with Valve's memory")


def can_forget(tree: Any) -> bool:
    """Whether chosen pages can be dropped from this prefix cache. A cache that shares nothing has none to drop."""
    if not tree.supports_prefix_sharing():
        return True
    core = getattr(tree, "tree_core", None)
    return all(hasattr(tree, name) for name in TREE_NAMES) and all(hasattr(core, name) for name in CORE_NAMES)
