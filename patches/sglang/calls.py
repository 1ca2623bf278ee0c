"""What SGLang calls: before and after a batch is chosen, around a step's output, and where the last request would be
aborted. The plugin puts these calls around three methods by SGLang's own registry; the source patch names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from valve_hook import VERSION
from valve_hook.keeper import Keeper
from valve_hook.link import Attach, Link, process_link
from valve_hook.sglang.check import Refused, judge
from valve_hook.sglang.engine import SglangEngine
from valve_hook.sglang.memory import layout_of
from valve_hook.shim import shim_call
from valve_hook.wire import Mode

log = logging.getLogger("valve")
ATTACH_WAIT_S = 1.0
_current: SchedulerHook | None = None  # one scheduler per process


class SchedulerHook:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, link: Link, version: str, mode: Mode) -> None:
        self.link = link
        self.engine = SglangEngine(scheduler)
        pages, tokens = self.engine.pages, self.engine.page_tokens
        self.keeper = Keeper(link=link, engine=self.engine, ledger=self.engine.ledger, blocks=pages, mode=mode)
        self.useful_tokens = 0
        self.ended = 0
        self._done: set[int] = set()  # who was done after the last step
        self._between_steps = shim_call("valve_kv_step")
        link.register_layout(layout_of(self.engine.allocator.get_kvcache(), pages, tokens))
        wanted = Attach(
            engine=f"sglang {version}",
            mode=mode,
            blocks=pages,
            block_tokens=tokens,
            rows=1,  # tables of requests are on the device: told to nobody, read only after a loss
            row_blocks=1,
            ranks=1,
        )
        session = link.attach(wanted, ATTACH_WAIT_S)
        state = "attached" if session is not None else f"not attached yet ({link.said or 'no answer'})"
        log.warning("valve: sglang %s, hook %s, mode %s, %d pages: %s", version, VERSION, mode.name, pages, state)

    def before_choose(self) -> None:
        if self._between_steps is not None:
            self._between_steps()  # the shim carries out orders that wait for this place
        dropped = self.engine.retract_dropped()
        self.keeper.sync()
        self.engine.settle(dropped)
        self.engine.look_done()
        self.keeper.publish()
        if self.link.region is not None:
            self.link.region.write(self.engine.open_requests(), self.ended, self.useful_tokens)

    def after_choose(self, batch: Any) -> None:
        if batch.forward_mode.is_extend() and any(each.beam_group is not None for each in batch.reqs):
            self.keeper.give_up("a request asks for beam search")
        self.engine.launch(batch)

    def before_result(self, batch: Any, result: Any) -> Callable[[], None]:
        """Believe nothing of a step that was hit; returns what is to be called when the output has been processed."""
        self.engine.wait(result)
        names = self._disbelieved(batch)
        undo = self.engine.disbelieve(batch, names) if names else None
        is_prompt = batch.forward_mode.is_extend()
        before = sum(len(each.output_ids) for each in batch.reqs) if is_prompt else 0

        def after_result() -> None:
            if undo is not None:
                undo()
            done = {id(each) for each in batch.reqs if each.finished()}
            again = len(done & self._done)  # with overlap a request is in one more step after its last
            self.ended += len(done) - again
            self._done = done
            if is_prompt:
                self.useful_tokens += max(0, sum(len(each.output_ids) for each in batch.reqs) - before)
            else:
                self.useful_tokens += max(0, len(batch.reqs) - again - len(names))

        return after_result

    def _disbelieved(self, batch: Any) -> Collection[str]:
        """Whose output of this step is dropped; mostly nobody's, and then nobody is looked at one by one."""
        try:
            step = self.engine.come_in(batch)
            if not (step.dropped or self._is_threatened()):
                return ()
            everybody = {each.rid for each in batch.reqs}
            hit = (everybody & self._hit(everybody)) - step.dropped
            if hit and batch.return_logprob and batch.forward_mode.is_extend():
                hit = everybody - step.dropped  # a skipped request shifts the prompt's log probabilities of the others
            names = hit | step.dropped
        except Exception:
            self.keeper.fail("looking for losses failed")
            hit = names = {each.rid for each in batch.reqs} if self._is_threatened() else set()
        self.engine.drop(batch, hit)
        self.keeper.receipts.dropped_tokens += len(names)
        return names

    def _is_threatened(self) -> bool:
        return self.engine.drops_all or self.link.session is not self.keeper.session or len(self.keeper.peek()) > 0

    def _hit(self, everybody: set[str]) -> set[str]:
        keeper = self.keeper
        if self.engine.drops_all or self.link.session is not keeper.session:
            return everybody
        lost = keeper.peek()
        if not len(lost):
            return set()
        return set(keeper.hit(lost)) if keeper.mode is Mode.FULL else everybody


def _hook(scheduler: Any) -> SchedulerHook | None:
    global _current  # noqa: PLW0603 - SGLang runs one scheduler per process
    hook: SchedulerHook | None = scheduler.__dict__.get("_valve")
    if "_valve" in scheduler.__dict__:
        return hook
    scheduler._valve = None
    try:
        import sglang

        link = process_link()
        if link is not None:
            mode = judge(sglang.__version__, scheduler)
            hook = scheduler._valve = _current = SchedulerHook(scheduler, link, sglang.__version__, mode)
    except Refused as refused:
        log.warning("valve: not attached, nothing is reclaimed from this engine: %s", refused)
    except Exception:
        log.exception("valve: not attached, nothing is reclaimed from this engine")
    return hook


def before_choose(scheduler: Any, running_batch: Any, last_batch: Any) -> tuple[Any, Any]:
    """First thing in Scheduler.get_next_batch_to_run: heed what valved changed. Returns the batches to go on with."""
    hook = _hook(scheduler)
    if hook is None:
        return running_batch, last_batch
    hook.keeper.guard(hook.before_choose)
    return scheduler.running_batch, scheduler.last_batch


def after_choose(scheduler: Any, batch: Any) -> None:
    """Last thing in it: note what this step reads and writes."""
    hook = _hook(scheduler)
    if hook is not None and batch is not None and batch.reqs:
        hook.keeper.guard(lambda: hook.after_choose(batch))


def before_result(scheduler: Any, batch: Any, result: Any) -> Callable[[], None]:
    """First thing in Scheduler.process_batch_result; what it returns is called last."""
    hook = _hook(scheduler)
    if hook is None or not hasattr(result, "copy_done") or not batch.reqs:
        return lambda: None
    return hook.before_result(batch, result)


def spare(retracted: list[Any], aborted: list[Any]) -> tuple[list[Any], list[Any]]:
    """At the end of ScheduleBatch.retract_decode: while we withhold pages, who finds no memory waits for them."""
    if _current is None or not _current.engine.withheld:
        return retracted, aborted
    kept = [each for each in aborted if each.beam_group is None]
    for request in kept:
        request.to_finish = None
    return [*retracted, *kept], [each for each in aborted if each.beam_group is not None]
