"""Protections of the SGLang adapter, each taken out of a live engine: for the toy's tests and for a real SGLang's.

Standard library and the hook only: it runs inside the engine's environment, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from valve_hook.sglang import calls
from valve_hook.sglang.steps import NOTHING_WRITTEN, StepLedger


def forgetting(engine: Any) -> None:
    """With the check that would notice: what is lost must be free when it is withheld."""
    withhold = engine.withhold

    def what_is_free(blocks: Any) -> None:
        free = set(engine.free_pages.numbers().tolist())
        withhold(blocks[[int(block) in free for block in blocks]])

    engine.forget, engine.withhold = lambda blocks: 0, what_is_free


def withholding(engine: Any) -> None:
    engine.withhold = engine.release = lambda blocks: None


def taint(engine: Any) -> None:
    """What a hit step wrote counts as sound."""
    nothing = {"__slots__": (), "_first_written": lambda _, step: np.full(len(step.rows), NOTHING_WRITTEN)}
    engine.ledger.__class__ = type("NoTaint", (StepLedger,), nothing)


def row_copies(engine: Any) -> None:
    """The page table as it is when a loss is noticed, not as it was when the step was launched."""
    engine.ledger.__class__ = type("NoCopies", (StepLedger,), {"__slots__": (), "_keep": lambda *_: None})


def waiting_for_the_step(engine: Any) -> None:
    engine.wait = lambda result: None


def settling(engine: Any) -> None:
    """Output of a step is believed of a request that was retracted after the step's launch and runs again."""
    engine.ledger.__class__ = type("NoSettling", (StepLedger,), {"__slots__": (), "settle": lambda *_: None})


def skipping_without_overlap(engine: Any) -> None:
    disbelieve = engine.disbelieve

    def half(batch: Any, names: Any) -> None:
        disbelieve(batch, names)
        processor = engine.scheduler.batch_result_processor
        object.__setattr__(processor, "enable_overlap", engine.scheduler.enable_overlap)

    engine.disbelieve = half


def retracting_the_dropped(engine: Any) -> None:
    engine.drop = lambda batch, names: None


def putting_back(engine: Any) -> None:
    """Penalties begin anew with a request that was sent back, as SGLang has it."""
    calls.put_back = lambda batch, overlap: None


def telling_the_leak_check(engine: Any) -> None:
    """It goes on comparing with the constant."""
    free_pages, checker = engine.free_pages, engine.scheduler.invariant_checker
    hand_out = free_pages._hand_out

    def in_silence(pages: Any) -> None:
        hand_out(pages)
        checker.max_total_num_tokens = engine.scheduler.max_total_num_tokens

    free_pages._hand_out = in_silence


def sparing_the_last(engine: Any) -> None:
    calls.sparing = lambda batch: lambda *both: both


def acting_on_losses(engine: Any) -> None:
    """One way after the other fails, and the hook gives up."""
    engine.discard = engine.reset = lambda *_: 1 // 0


def emptying_the_cache(engine: Any) -> None:
    """When the hook gives up."""
    engine._empty_cache = lambda: None


def catching_what_comes_back(engine: Any) -> None:
    """When the hook gives up: pages that somebody unknown held."""
    engine.free_pages.free = engine.allocator.free


def filtering_after_a_flush(engine: Any) -> None:
    engine.allocator.clear = engine.free_pages._clear


def lifting_the_queue_limit(engine: Any) -> None:
    """A property that does not let itself be set to None."""
    kind = type(engine.scheduler)
    limit = engine.scheduler.max_queued_requests
    engine.scheduler.__class__ = type(
        "Limited", (kind,), {"max_queued_requests": property(lambda _: limit, lambda *_: None)}
    )
