"""Where an SGLang scheduler keeps the size of its prefill chunks, and when they cannot be cut.

Several ranks must cut alike, and each reads valved's word at a moment of its own: there steps stay as they are.
"""

from __future__ import annotations

from typing import Any

from valve_hook.step_limit import StepLimit


def step_limit(scheduler: Any, ranks: int) -> StepLimit:
    told = getattr(scheduler, "chunked_prefill_size", None)
    own = told if isinstance(told, int) and told > 0 else 0

    def set_limit(tokens: int) -> None:
        scheduler.chunked_prefill_size = tokens

    return StepLimit(
        set_limit=set_limit,
        own=own,
        why_not="chunked prefill is off" if not own else "" if ranks == 1 else f"it has {ranks} ranks",
        unit=max(1, int(getattr(scheduler, "page_size", 1) or 1)),
    )
