"""What SGLang calls: before and after a batch is chosen, around a step's output, and where the last request would be
aborted. The plugin puts these calls around three methods by SGLang's own registry; the source patch names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from valve_hook import VERSION, Refused
from valve_hook.link import Attach, Link, process_link
from valve_hook.reconciler import Reconciler
from valve_hook.sglang.aside import QueueAside
from valve_hook.sglang.check import judge
from valve_hook.sglang.engine import SglangEngine
from valve_hook.sglang.memory import layout_of
from valve_hook.sglang.ranks import Alone, Ranks, ranks_of
from valve_hook.sglang.resumed import cannot_begin_again, put_back
from valve_hook.sglang.step_limit import step_limit
from valve_hook.sglang.steps import Launched
from valve_hook.shim import refuse_blind, shim_call
from valve_hook.wire import Mode

log = logging.getLogger("valve")
ATTACH_WAIT_S = 1.0
MOST_BLIND_STEPS = 3  # then requests end with an error, lest they compute the same for ever
_current: SglangHook | None = None  # one scheduler per process


class SglangHook:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, ranks: Alone | Ranks, mode: Mode) -> None:
        self.ranks, self.link = ranks, ranks.link
        self.engine = engine = SglangEngine(scheduler, ranks.size)
        self.reconciler = Reconciler(
            link=ranks, engine=engine, ledger=engine.ledger, blocks=engine.pages, mode=mode, agree=ranks.agree
        )
        self.useful_tokens = 0
        self._has_looked = False  # since a batch was chosen
        self._is_well = True
        self._blind_steps = 0  # one after another, of which nothing was believed because the hook failed
        self._between_steps = shim_call("valve_kv_step")
        self._step_limit = step_limit(scheduler, ranks.size)
        self.aside = QueueAside(scheduler, engine)
        self._layout = layout_of(engine.allocator.get_kvcache(), engine.pages, engine.page_tokens)

    def attach(self, version: str) -> None:
        """Every rank tells where its pages lie; one asks for the table."""
        self.link.register_layout(self._layout)
        if not self.ranks.is_first:
            return
        mode, pages = self.reconciler.mode, self.engine.pages
        wanted = Attach(
            engine=f"sglang {version}",
            mode=mode,
            blocks=pages,
            block_tokens=self.engine.page_tokens,
            rows=1,  # tables of requests are on the device: told to nobody, read only after a loss
            row_blocks=1,
            ranks=self.ranks.size,
        )
        self.link.told_mode = lambda: self.reconciler.told_mode
        session = self.link.attach(wanted, ATTACH_WAIT_S)
        state = "attached" if session is not None else f"not attached yet ({self.link.said or 'no answer'})"
        log.warning("valve: sglang %s, hook %s, mode %s, %d pages: %s", version, VERSION, mode.name, pages, state)

    def before_choose(self) -> None:
        if self._between_steps is not None:
            self.guard(self._between_steps)  # the shim carries out orders that wait for this place
        if not self._has_looked:
            self.guard(self._look)
        self._has_looked = False
        if not self.guard(self.reconciler.sync) and self.ranks.size == 1:
            self.reconciler.recover()
        self.guard(lambda: self._step_limit.heed(self.reconciler.step_tokens))
        self._settle()
        self.engine.end_steps()
        if self.ranks.is_first:  # before memory is asked for: the first request stops offline work
            self.link.lifecycle.tell(self.engine.open_requests(), self.engine.ledger.ended, self.useful_tokens)
        self.reconciler.publish()

    def after_choose(self, batch: Any) -> None:
        self.reconciler.receipts.lost_tokens += self.engine.launch(batch)
        reasons = map(cannot_begin_again, batch.reqs if batch.forward_mode.is_extend() else ())
        if why := next(filter(None, reasons), ""):
            self.reconciler.give_up(why)

    def put_back(self, batch: Any) -> None:
        """SGLang itself sends back a request that an offline engine leaves without memory; what an online one, with
        all of its memory since it began, does by itself is as without Valve.
        """
        if batch.forward_mode.is_extend() and (self.link.is_offline or self.engine.may_have_sent_back):
            self._surely(lambda: put_back(batch, overlap=self.engine.overlap))

    def before_result(self, batch: Any, result: Any) -> Callable[[], None]:
        """Believe nothing of a step that was hit; returns what is to be called when the output has been processed."""
        is_over = self.guard(lambda: self.engine.wait(result))
        self.guard(self._look)
        try:
            ended, names = self._disbelieved(batch, is_over=is_over)
        except Exception:
            self.reconciler.fail("disbelieving failed")
            self._is_well, ended, names = False, 0, {each.rid for each in batch.reqs}
            self._surely(lambda: self.engine.drop(batch, names))
        if names:
            self._surely(lambda: self.engine.disbelieve(batch, names))
        is_prompt = batch.forward_mode.is_extend()
        before = sum(len(each.output_ids) for each in batch.reqs) if is_prompt else 0

        def after_result() -> None:
            if names:
                self._surely(self.engine.believe_again)
            if is_prompt:
                self.useful_tokens += max(0, sum(len(each.output_ids) for each in batch.reqs) - before)
            else:
                self.useful_tokens += max(0, len(batch.reqs) - ended - len(names))

        return after_result

    def guard(self, action: Callable[[], object]) -> bool:
        is_done = self.reconciler.guard(action)
        self._is_well &= is_done
        return is_done

    def _surely(self, action: Callable[[], object]) -> None:
        """Without it wrong tokens would be delivered: what fails twice stops the engine."""
        if not self.guard(action):
            action()

    def recover(self) -> None:
        """Before a batch is chosen what was told must have been acted on, and what was dropped sent back."""
        if self.ranks.size == 1:
            self.reconciler.recover()
        self._settle()

    def _settle(self) -> None:
        """A request whose output was dropped computes it again. If that fails, all do, or end with an error."""
        ways: list[Callable[[], object]] = [self.engine.retract_dropped, self.engine.reset, self.engine.abandon]
        if self._blind_steps > MOST_BLIND_STEPS and self.ranks.size == 1:
            self._blind_steps, ways = 0, ways[2:]
        elif not self.engine.has_dropped:
            return
        for way in ways:
            if self.ranks.agree(self.guard(way)):
                return
        raise RuntimeError("valve: requests whose output was dropped could neither be sent back nor ended")

    def _look(self) -> None:
        """Once between two choices: all ranks see the same until the next."""
        self._has_looked = True
        if not self.ranks.look(self._is_well and self.reconciler.told_mode is not Mode.NONE):
            self.reconciler.give_up("the hook failed on one of the ranks")
            self.reconciler.mode = Mode.NONE  # what the ranks know may differ by now

    def _disbelieved(self, batch: Any, *, is_over: bool) -> tuple[int, Collection[str]]:
        """How many had ended before this step of theirs, and whose output of it is dropped; mostly nobody's, and then
        nobody is looked at one by one.
        """
        everybody = {each.rid for each in batch.reqs}
        ended, names, hit, has_judged, is_threatened = 0, everybody, everybody, False, False
        steps: list[Launched] = []
        self.guard(lambda: steps.append(self.engine.come_in(batch)))
        try:
            is_for_all = self.engine.drops_all or self.ranks.next_session(self.reconciler.session) is not None
            lost = self.reconciler.peek()
            is_threatened = is_for_all or len(lost) > 0
            step = steps[0]
            ended = step.ended
            if is_over and not (step.dropped or is_threatened):
                self._blind_steps = 0
                return ended, ()
            hit = everybody - step.dropped
            if is_over and not is_for_all and len(lost) == 0:
                hit = set()
            elif is_over and not is_for_all and self.reconciler.is_sure and self.reconciler.mode is Mode.FULL:
                hit = (everybody & self.reconciler.hit(lost)) - step.dropped
            names, has_judged = hit | (step.dropped & everybody), True
            if names and batch.return_logprob and batch.forward_mode.is_extend():
                names = everybody  # a skipped request shifts the prompt's log probabilities of those behind it
                hit = everybody - step.dropped
        except Exception:
            self.reconciler.fail("looking for losses failed")
            self._is_well = False
        is_agreed = has_judged
        if is_threatened:
            is_sure = self.reconciler.is_sure or self.reconciler.mode is not Mode.FULL
            is_agreed = self.ranks.agree(has_judged and is_sure)
        if (
            not is_agreed
        ):  # several ranks must drop alike: what one of them alone does not know is settled at the next look
            hit = names = everybody if is_threatened or self.ranks.size == 1 else set()
        self._blind_steps = 0 if has_judged and is_over else self._blind_steps + 1
        self._surely(lambda: self.engine.drop(batch, hit))
        self.reconciler.receipts.dropped_tokens += len(names)
        return ended, names


def _hook(scheduler: Any) -> SglangHook | None:
    global _current  # noqa: PLW0603 - SGLang runs one scheduler per process
    hook: SglangHook | None = scheduler.__dict__.get("_valve")
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


def _make(scheduler: Any, link: Link, version: str) -> SglangHook:
    """All ranks attach or none."""
    mode, ranks = judge(version, scheduler), ranks_of(scheduler, link)
    hook = None
    try:
        hook = SglangHook(scheduler, ranks, mode)
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
    if not hook.guard(hook.before_choose):
        hook.recover()
    hook.guard(hook.aside.before_choose)  # whatever has failed: memory may be withheld by now
    return scheduler.running_batch, scheduler.last_batch


def after_choose(scheduler: Any, batch: Any) -> None:
    """Last thing in it: note what this step reads and writes."""
    hook = _hook(scheduler)
    if hook is not None:
        hook.guard(hook.aside.after_choose)
    if batch is None or not batch.reqs:
        return
    if hook is None or hook.reconciler.session is None:
        refuse_blind(None, hook.link.said if hook is not None else "")
    if hook is not None:
        hook.put_back(batch)
        ledger = hook.engine.ledger
        begun = ledger.begun
        if not hook.guard(lambda: hook.after_choose(batch)) and ledger.begun == begun:
            hook.guard(lambda: ledger.begin_unread(batch.reqs))


def before_result(scheduler: Any, batch: Any, result: Any) -> Callable[[], None]:
    """First thing in Scheduler.process_batch_result; what it returns is called last."""
    hook = _hook(scheduler)
    if hook is None or not hasattr(result, "copy_done") or not batch.reqs:
        return lambda: None
    return hook.before_result(batch, result)


def sparing(batch: Any) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """Called before ScheduleBatch.retract_decode. What it returns is called with the requests that this retracted and
    aborted. While we withhold pages, a request that finds no memory waits for them. One that was to end anyway, as its
    client has left, ends now and for that reason: SGLang would write its own over it.
    """
    if _current is None or not _current.engine.free_pages.taken_pages:
        return lambda retracted, aborted: (retracted, aborted)
    ending = {each.rid: each.to_finish for each in batch.reqs if each.to_finish is not None}

    def spare(retracted: list[Any], aborted: list[Any]) -> tuple[list[Any], list[Any]]:
        kept, gone = [each for each in retracted if each.rid not in ending], []
        for each in (*(each for each in retracted if each.rid in ending), *aborted):
            if each.rid in ending or each.beam_group is not None:
                each.to_finish = ending.get(each.rid, each.to_finish)
                gone.append(each)
            else:
                each.to_finish = None
                kept.append(each)
        return kept, gone

    return spare
