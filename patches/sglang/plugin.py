"""SGLang loads `register` through the entry point `sglang.srt.plugins` in each of its processes.

Three hooks on its own registry, no line changed: before a result is believed, before the next batch is chosen, and
where a batch that lacks memory is retracted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from valve_hook import VERSION
from valve_hook.keeper import Keeper
from valve_hook.ledger import Ledger
from valve_hook.link import Attach, Link, process_link, socket_path
from valve_hook.sglang.engine import SglangEngine
from valve_hook.wire import Mode

log = logging.getLogger("valve")
SUPPORTED = ("0.5.23",)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RETRACT = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"
ATTACH_WAIT_S = 1.0
_current: SchedulerHook | None = None  # one scheduler per process


class Refused(Exception):
    """Valve stays away; the text says why."""


def judge(version: str, scheduler: Any) -> None:
    if version not in SUPPORTED:
        raise Refused(f"SGLang {version}, and valve_hook {VERSION} knows {', '.join(SUPPORTED)}")
    config = scheduler.server_args
    reasons = {
        "tensor parallelism (every rank schedules for itself)": config.tp_size > 1,
        "pipeline parallelism": config.pp_size > 1,
        "data parallelism": config.dp_size > 1,
        "hierarchical cache": bool(getattr(scheduler, "enable_hierarchical_cache", False)),
        "prefill and decode in different processes": config.disaggregation_mode != "null",
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "hybrid attention": any(getattr(scheduler, name, False) for name in ("is_hybrid_swa", "is_hybrid_ssm")),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise Refused(f"{found[0]} is not supported with Valve's memory")
    lacks = [
        name
        for name in ("pause_generation", "continue_generation", "flush_cache", "batch_result_processor", "result_queue")
        if not hasattr(scheduler, name) and not (name == "result_queue" and not scheduler.enable_overlap)
    ]
    if lacks:
        raise Refused(f"SGLang {version} lacks {', '.join(lacks)}")


class SchedulerHook:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, link: Link, version: str) -> None:
        self.link = link
        self.engine = SglangEngine(scheduler)
        pages, tokens = self.engine.pages, self.engine.page_tokens
        ledger = Ledger(block_tokens=tokens)
        self.keeper = Keeper(link=link, engine=self.engine, ledger=ledger, blocks=pages, mode=Mode.COARSE)
        self.useful_tokens = 0
        self.ended = 0
        wanted = Attach(
            engine=f"sglang {version}",
            mode=Mode.COARSE,
            blocks=pages,
            block_tokens=tokens,
            rows=1,
            row_blocks=1,
            ranks=1,
        )
        session = link.attach(wanted, ATTACH_WAIT_S)
        state = "attached" if session is not None else f"not attached yet ({link.said or 'no answer'})"
        log.warning("valve: sglang %s, hook %s, mode COARSE, %d pages: %s", version, VERSION, pages, state)

    def process(self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
        """Believe nothing of a step in which something was lost; its requests are put back at the next choice."""
        if result.copy_done is not None:
            result.copy_done.synchronize()
        undo = self._disbelieve(batch)
        if undo is not None:
            try:
                return original(scheduler, batch, result)
            finally:
                undo()
        before = sum(len(each.output_ids) for each in batch.reqs)
        alive = sum(not each.finished() for each in batch.reqs)
        answer = original(scheduler, batch, result)
        self.useful_tokens += max(0, sum(len(each.output_ids) for each in batch.reqs) - before)
        self.ended += alive - sum(not each.finished() for each in batch.reqs)
        return answer

    def _disbelieve(self, batch: Any) -> Callable[[], None] | None:
        try:
            if self.engine.is_dropping or self.keeper.is_threatened():
                self.keeper.receipts.dropped_tokens += len(batch.reqs)
                return self.engine.disbelieve(batch)
        except Exception:
            self.keeper.fail("looking for losses failed")
        return None

    def choose(self) -> bool:
        """Whether everybody was retracted: then the caller's batches are stale."""
        events = self.keeper.receipts.hit_requests, self.keeper.events
        self.keeper.sync()
        self.keeper.publish()
        if self.link.region is not None:
            self.link.region.write(self.engine.open_requests(), self.ended, self.useful_tokens)
        return events != (self.keeper.receipts.hit_requests, self.keeper.events)


def hook_of(scheduler: Any) -> SchedulerHook | None:
    global _current  # noqa: PLW0603 - SGLang runs one scheduler per process
    hook: SchedulerHook | None = scheduler.__dict__.get("_valve")
    if "_valve" in scheduler.__dict__:
        return hook
    scheduler._valve = None
    try:
        import sglang

        link = process_link()
        if link is not None:
            judge(sglang.__version__, scheduler)
            hook = scheduler._valve = _current = SchedulerHook(scheduler, link, sglang.__version__)
    except Refused as refused:
        log.warning("valve: not attached, nothing is reclaimed from this engine: %s", refused)
    except Exception:
        log.exception("valve: not attached, nothing is reclaimed from this engine")
    return hook


def around_process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    hook = hook_of(scheduler)
    if hook is None or not hasattr(result, "copy_done"):
        return original(scheduler, batch, result)
    return hook.process(original, scheduler, batch, result)


def around_choose(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    hook = hook_of(scheduler)
    if hook is not None:
        try:
            if hook.choose():
                running_batch, last_batch = scheduler.running_batch, scheduler.last_batch
        except Exception:
            hook.keeper.fail("choosing a batch failed")
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def around_retract(original: Callable[..., Any], batch: Any) -> Any:
    """The last request that finds no memory is not aborted while we withhold some: it waits."""
    retracted, ratio, aborted = original(batch)
    if _current is None or not _current.engine.withheld:
        return retracted, ratio, aborted
    kept = [each for each in aborted if each.beam_group is None]
    for request in kept:
        request.to_finish = None
    return [*retracted, *kept], ratio, [each for each in aborted if each.beam_group is not None]


def register() -> None:
    if socket_path() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.process_batch_result", around_process, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.get_next_batch_to_run", around_choose, HookType.AROUND)
    HookRegistry.register(RETRACT, around_retract, HookType.AROUND)
