"""What SGLang calls: before and after a batch is chosen, around a step's output, and where the last request would be
aborted. The plugin puts these calls around three methods by SGLang's own registry; the source patch names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from valve_hook import VERSION
from valve_hook.link import Attach, Link, process_link
from valve_hook.reconciler import Keeper
from valve_hook.sglang.check import Refused, judge
from valve_hook.sglang.engine import SglangEngine
from valve_hook.sglang.memory import layout_of
from valve_hook.sglang.ranks import Alone, Ranks, ranks_of
from valve_hook.shim import shim_call
from valve_hook.wire import Mode

log = logging.getLogger("valve")
ATTACH_WAIT_S = 1.0
_current: SchedulerHook | None = None  # one scheduler per process


class SchedulerHook:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, ranks: Alone | Ranks, mode: Mode) -> None:
        self.ranks, self.link = ranks, ranks.link
        self.engine = engine = SglangEngine(scheduler, ranks.size)
        self.keeper = Keeper(
            link=ranks, engine=engine, ledger=engine.ledger, blocks=engine.pages, mode=mode, agree=ranks.agree
        )
        self.useful_tokens = 0
        self._has_looked = False  # since a batch was chosen
        self._is_well = True
        self._between_steps = shim_call("valve_kv_step")
        self._layout = layout_of(engine.allocator.get_kvcache(), engine.pages, engine.page_tokens)

    def attach(self, version: str) -> None:
        """Every rank tells where its pages lie; one asks for the table."""
        self.link.register_layout(self._layout)
        if not self.ranks.is_first:
            return
        mode, pages = self.keeper.mode, self.engine.pages
        wanted = Attach(
            engine=f"sglang {version}",
            mode=mode,
            blocks=pages,
            block_tokens=self.engine.page_tokens,
            rows=1,  # tables of requests are on the device: told to nobody, read only after a loss
            row_blocks=1,
            ranks=self.ranks.size,
        )
        session = self.link.attach(wanted, ATTACH_WAIT_S)
        state = "attached" if session is not None else f"not attached yet ({self.link.said or 'no answer'})"
        log.warning("valve: sglang %s, hook %s, mode %s, %d pages: %s", version, VERSION, mode.name, pages, state)

    def before_choose(self) -> None:
        if self._between_steps is not None:
            self._between_steps()  # the shim carries out orders that wait for this place
        if not self._has_looked:
            self._look()
        self._has_looked = False
        try:
            self.keeper.sync()
        finally:
            self.engine.retract_dropped()
        self.engine.ledger.end_steps()
        self.keeper.publish()
        if self.link.region is not None and self.ranks.is_first:
            self.link.region.write(self.engine.open_requests(), self.engine.ledger.ended, self.useful_tokens)

    def after_choose(self, batch: Any) -> None:
        if batch.forward_mode.is_extend() and any(each.beam_group is not None for each in batch.reqs):
            self.keeper.give_up("a request asks for beam search")
        self.engine.launch(batch)

    def before_result(self, batch: Any, result: Any) -> Callable[[], None]:
        """Believe nothing of a step that was hit; returns what is to be called when the output has been processed."""
        self.engine.wait(result)
        self.guard(self._look)
        ended, names = self._disbelieved(batch)
        undo = self.engine.disbelieve(batch, names) if names else None
        is_prompt = batch.forward_mode.is_extend()
        before = sum(len(each.output_ids) for each in batch.reqs) if is_prompt else 0

        def after_result() -> None:
            if undo is not None:
                undo()
            if is_prompt:
                self.useful_tokens += max(0, sum(len(each.output_ids) for each in batch.reqs) - before)
            else:
                self.useful_tokens += max(0, len(batch.reqs) - ended - len(names))

        return after_result

    def guard(self, action: Callable[[], None]) -> None:
        self._is_well &= self.keeper.guard(action)

    def _look(self) -> None:
        """Once between two choices: all ranks see the same until the next."""
        self._has_looked = True
        if not self.ranks.look(self._is_well and self.keeper.told_mode is not Mode.NONE):
            self.keeper.give_up("the hook failed on one of the ranks")
            self.keeper.mode = Mode.NONE  # what the ranks know may differ by now

    def _disbelieved(self, batch: Any) -> tuple[int, Collection[str]]:
        """How many had ended before this step of theirs, and whose output of it is dropped; mostly nobody's, and then
        nobody is looked at one by one.
        """
        ended, names, hit = 0, set[str](), set[str]()
        is_for_all = self.engine.drops_all or self.ranks.next_session(self.keeper.session) is not None
        lost = self.keeper.peek()
        is_threatened, has_judged = is_for_all or len(lost) > 0, False
        try:
            step = self.engine.come_in(batch)
            ended = step.ended
            if not (step.dropped or is_threatened):
                return ended, ()
            everybody = {each.rid for each in batch.reqs}
            if is_for_all or (len(lost) and self.keeper.mode is not Mode.FULL):
                hit = everybody - step.dropped
            elif len(lost):
                hit = (everybody & self.keeper.hit(lost)) - step.dropped
            if hit and batch.return_logprob and batch.forward_mode.is_extend():
                hit = everybody - step.dropped  # a skipped request shifts the prompt's log probabilities of the others
            names = hit | step.dropped
            has_judged = True
        except Exception:
            self.keeper.fail("looking for losses failed")
            self._is_well = False
        if is_threatened and not self.ranks.agree(has_judged):
            hit = names = {each.rid for each in batch.reqs}
        self.engine.drop(batch, hit)
        self.keeper.receipts.dropped_tokens += len(names)
        return ended, names


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
            hook = scheduler._valve = _current = _make(scheduler, link, sglang.__version__)
    except Refused as refused:
        log.warning("valve: not attached, nothing is reclaimed from this engine: %s", refused)
    except Exception:
        log.exception("valve: not attached, nothing is reclaimed from this engine")
    return hook


def _make(scheduler: Any, link: Link, version: str) -> SchedulerHook:
    """All ranks attach or none."""
    mode, ranks = judge(version, scheduler), ranks_of(scheduler, link)
    hook = None
    try:
        hook = SchedulerHook(scheduler, ranks, mode)
    finally:
        is_well = ranks.agree(hook is not None)
    if not is_well:
        raise Refused("another rank of this engine could not attach")
    hook.attach(version)
    return hook


def before_choose(scheduler: Any, running_batch: Any, last_batch: Any) -> tuple[Any, Any]:
    """First thing in Scheduler.get_next_batch_to_run: heed what valved changed. Returns the batches to go on with."""
    hook = _hook(scheduler)
    if hook is None:
        return running_batch, last_batch
    hook.guard(hook.before_choose)
    return scheduler.running_batch, scheduler.last_batch


def after_choose(scheduler: Any, batch: Any) -> None:
    """Last thing in it: note what this step reads and writes."""
    hook = _hook(scheduler)
    if hook is not None and batch is not None and batch.reqs:
        hook.guard(lambda: hook.after_choose(batch))


def before_result(scheduler: Any, batch: Any, result: Any) -> Callable[[], None]:
    """First thing in Scheduler.process_batch_result; what it returns is called last."""
    hook = _hook(scheduler)
    if hook is None or not hasattr(result, "copy_done") or not batch.reqs:
        return lambda: None
    return hook.before_result(batch, result)


def spare(retracted: list[Any], aborted: list[Any]) -> tuple[list[Any], list[Any]]:
    """At the end of ScheduleBatch.retract_decode: while we withhold pages, who finds no memory waits for them."""
    if _current is None or not _current.engine.taken_pages:
        return retracted, aborted
    kept = [each for each in aborted if each.beam_group is None]
    for request in kept:
        request.to_finish = None
    return [*retracted, *kept], [each for each in aborted if each.beam_group is not None]
