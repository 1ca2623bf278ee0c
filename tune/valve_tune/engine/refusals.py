"""Why a vLLM trains no job, in words; empty where it may. What was not tried here is refused, not tried there."""

from __future__ import annotations

from typing import Any


def why_not(config: Any, *, untried: bool = False) -> str:
    """Of the engine's configuration. `untried`: its owner asks for what no card has run yet."""
    device = config.device_config.device_type
    parallel, scheduling = config.parallel_config, config.scheduler_config
    compiled = getattr(config.compilation_config.mode, "name", config.compilation_config.mode)
    reasons = {
        'a card: the lane was never run on one; "untried": true asks for it all the same': device == "cuda"
        and not untried,
        f"{device}: there are lanes for the CPU and for CUDA cards": device not in ("cpu", "cuda"),
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "CUDA graphs and compiled models: start it with --enforce-eager": not config.model_config.enforce_eager
        or compiled not in (None, 0, "NONE"),
        "speculative decoding": config.speculative_config is not None,
        "adapters that it serves: start it without --enable-lora": config.lora_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "answers without tokens": config.model_config.runner_type != "generate",
        "steps that are scheduled ahead: start it with --no-async-scheduling": bool(scheduling.async_scheduling),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def why_not_job(values: dict[str, Any]) -> str:
    """Of a job: what of `valve tune run` has no meaning inside an engine."""
    reasons = {
        "share_weights": "vLLM packs its weights in a form of its own; the job has a copy",
        "stash_mib": "the lane borrows from no pool",
        "resident_layers": "the lane keeps every layer",
    }
    return next((f"{name}: {reason}" for name, reason in reasons.items() if values.get(name)), "")


def why_not_threads(wanted: int, there: int) -> str:
    """torch's threads are the engine's to choose: to change them here would change what it computes."""
    if wanted in (0, there):
        return ""
    return f"threads: the engine's process computes with {there}, the job wants {wanted}; set it to {there} or 0"
