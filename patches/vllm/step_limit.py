"""Reads and sets the limit on the tokens of a step in a vLLM scheduler, and says when a lower one starves a request."""

from __future__ import annotations

from typing import Any

from valve_hook.step_limit import StepLimit


def step_limit(scheduler: Any) -> StepLimit:
    own = int(getattr(scheduler, "max_num_scheduled_tokens", 0) or 0)
    guessed = int(getattr(scheduler, "num_spec_tokens", 0) or 0)

    def set_limit(tokens: int) -> None:
        scheduler.max_num_scheduled_tokens = tokens

    return StepLimit(
        set_limit=set_limit,
        own=own,
        why_not=_why_not(getattr(scheduler, "scheduler_config", None), own),
        least=int(scheduler.max_num_running_reqs) * (1 + guessed),  # a token each for those that run
    )


def _why_not(config: Any, own: int) -> str:
    if not own:
        return "this vLLM has no limit on the tokens of a step"
    if not getattr(config, "enable_chunked_prefill", False):
        return "chunked prefill is off, so a prompt that is longer than a step would never begin"
    if getattr(config, "disable_chunked_mm_input", False):
        return "images are not cut (disable_chunked_mm_input), so one that is longer than a step would never begin"
    return ""
