"""What vLLM calls: one function when a Scheduler is built, three once per step each. The plugin wraps three methods of
Scheduler around them, the source patch calls the three by name.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

from valve_hook import VERSION, Refused
from valve_hook.ledger import MOST_STEPS, Ledger
from valve_hook.link import Attach, Link, process_link
from valve_hook.reconciler import Reconciler
from valve_hook.sessions import weakly
from valve_hook.shim import refuse_blind, shim_call
from valve_hook.vllm import check
from valve_hook.vllm.aside import Aside
from valve_hook.vllm.calm import Calm, calm_of
from valve_hook.vllm.engine import VllmEngine, facts_of, has_waiting
from valve_hook.vllm.progress import MOST_ROWS, Progress
from valve_hook.vllm.step_limit import step_limit
from valve_hook.wire import MAX_BOOK, MAX_ROW, MAX_ROWS, Mode

log = logging.getLogger("valve")
ATTACH_WAIT_S = 1.0  # once, before the first step: so that an elastic engine starts with what it may use
IDLE_ROUNDS = 8  # of offers in one look at an idle engine: a request that comes meanwhile waits for them
TENDED_BESIDE = 12  # rounds of the book in one look of the link's thread beside an engine that takes steps
MOST_TENDED = 128  # and beside one that takes none
BREATH_S = 0.0005  # between two rounds: the engine's thread goes first
NEVER = object()  # no session
UNHEEDED = "_valve_unheeded"  # on a step's output (after_schedule): why nobody heeds valved's table for it, or nothing


class VllmHook:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, link: Link, mode: Mode, engine: str) -> None:
        self.scheduler = scheduler
        self.link = link
        self.engine = VllmEngine(scheduler, is_offline=link.is_offline)
        blocks = int(self.engine.pool.num_gpu_blocks)
        self.ledger = Ledger(
            block_tokens=self.engine.block_tokens,
            slack_tokens=2 * int(getattr(scheduler, "num_spec_tokens", 0) or 0),
            current=self.engine.tables.get,
            read=facts_of,
            grown=self.engine.grown,
        )
        self.reconciler = Reconciler(link=link, engine=self.engine, ledger=self.ledger, blocks=blocks, mode=mode)
        self.progress = Progress(scheduler, link)
        self.aside = Aside(scheduler, self.engine)
        self.step_limit = step_limit(scheduler)
        self._between_steps = shim_call("valve_kv_step")
        self._is_idle = False  # written under the engine's lock: while it is True the link's thread may act
        self._has_waited = self._has_said = False
        self._looked: object = NEVER  # the session in which a look left nothing to do, and what valved had written
        self.words, self.seen = memoryview(b""), b""
        self._name = engine
        self.calm = None  # what held after the last step, where it left nothing to do
        self._calm: Calm | None = None  # the one that was made last
        self._is_aside = False  # somebody may stand aside in this step
        self._dropping = 0  # steps in flight whose output may have to be dropped in part
        rows = min(MAX_ROWS, 2 * int(scheduler.max_num_running_reqs))
        row_blocks = min(MAX_ROW, blocks, -(-int(scheduler.max_model_len) // self.engine.block_tokens) + 1)
        room = (MAX_BOOK - 4096 - blocks - 16 * rows) // (4 * rows)
        wanted = Attach(
            engine=engine,
            mode=mode,
            blocks=blocks,
            block_tokens=self.engine.block_tokens,
            rows=rows,
            row_blocks=max(1, min(row_blocks, room)),
            ranks=int(scheduler.vllm_config.parallel_config.world_size),
        )
        link.owner = weakref.ref(scheduler)
        link.on_tick, link.told_mode = weakly(self.on_tick), weakly(self.told_mode)
        link.propose(wanted)

    def told_mode(self) -> Mode:
        return self.reconciler.told_mode

    @property
    def calm(self) -> Calm | None:
        found: Calm | None = self.scheduler._valve_calm
        return found

    @calm.setter
    def calm(self, calm: Calm | None) -> None:
        self.scheduler._valve_calm = calm

    def begin_idle(self) -> None:
        """The scheduler stands and has no work yet: until it has, the link's thread attaches and gives back."""
        self._note_idle()

    def settle(self) -> None:
        """Before the first step: what has memory must be known, or the wait for it must be over."""
        self._has_waited = True
        if self.link.session is None:
            self.link.answer(ATTACH_WAIT_S)
        self._say()

    def _say(self) -> None:
        link, blocks = self.link, self.reconciler.blocks
        state = "attached" if link.session is not None else f"not attached yet ({link.said or 'no answer'})"
        log.warning(
            "valve: %s, hook %s, mode %s, %d blocks: %s", self._name, VERSION, self.reconciler.mode.name, blocks, state
        )
        self._has_said = link.session is not None

    @property
    def unheeded(self) -> str:
        """Why a step may read and write blocks without memory; empty where the table is heeded."""
        if self.reconciler.session is not None:
            return ""
        return f"not attached: {self.link.said or 'valved does not answer'}"

    def is_quiet(self) -> bool:
        """valved has written nothing since a look that left nothing to do, and no other thread may act."""
        return self.link.session is self._looked and self.words == self.seen and not self._is_idle

    def before_schedule(self) -> bool:
        """Whether the table is heeded."""
        self.calm = None
        if not self.is_quiet():
            self._look_whole()
        if has_waiting(self.scheduler):
            self._is_aside = True  # before it: a request that was moved is moved back whatever happens in there
            self.aside.before_schedule()
        return self.reconciler.session is not None

    def _look_whole(self) -> None:
        self._looked = NEVER
        self.progress.begin()
        if not self._has_waited:
            self.settle()
        if self._is_idle:  # written by this thread alone
            with self.engine.lock:
                self._is_idle = False
        if self.reconciler.sync():
            self._dropping = len(self.ledger.in_flight)
        session = self.reconciler.session
        words = bytes(session.table.words) if session is not None else b""
        self.step_limit.heed(self.reconciler.step_tokens)
        if session is not None and not session.table.has_news:
            self._looked, self.words, self.seen = session, session.table.words, words

    def on_tick(self) -> None:
        """On the link's thread, a few times a second."""
        self.progress.tell_tokens()  # first, for what comes after it may fail
        self.while_idle()
        self._tend()

    def _tend(self) -> None:
        """The book's rows, a few at a time, so that a step never waits for more. Where the engine takes no steps,
        all of them: it is idle, or stopped, and valved may be about to choose.
        """
        steps = self.reconciler.steps
        for done in range(MOST_TENDED):
            try:
                has_more = self.ledger.tend()
            except Exception:
                self.reconciler.fail("bringing the book up to date failed")
                return
            if not has_more or (done >= TENDED_BESIDE and self.reconciler.steps != steps):
                return
            time.sleep(BREATH_S)

    def while_idle(self) -> None:
        """On the link's thread: an engine without requests takes no step, but gives back what valved asks for. Where
        the worker lives in this process, what waits for the place between two of its steps need not wait either.
        """
        with self.engine.lock:
            if self._is_idle and not self.scheduler.requests:
                self.reconciler.guard(self._look)

    def _look(self) -> None:
        if self.link.session is not None and not self._has_said:
            self._say()
        self.reconciler.sync()
        for _ in range(IDLE_ROUNDS):
            if not self.reconciler.publish():
                break
        if self._between_steps is not None and self.reconciler.session is not None:  # before, it would wait for one
            self._between_steps()

    def after_schedule(self, output: Any) -> str:
        """Why no hook reads the table for this step; empty where one does."""
        self.calm = None
        if self._is_aside:
            self.reconciler.guard(self.aside.after_schedule)
            self._is_aside = bool(self.aside.requests)
        new, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        if new or resumed or output.finished_req_ids or output.preempted_req_ids:
            self.reconciler.receipts.lost_tokens += self.engine.record(self.ledger, output)
            if any(self.scheduler.requests[each.req_id].resumable for each in new):
                self.reconciler.give_up("a streaming-input session keeps its blocks while it waits for input")
        launched = self.ledger.launched  # no step after these touches what is free now ...
        if output.num_scheduled_tokens:
            self.ledger.launch(output)
        if output.kv_cache_block_copies:
            launched = self.ledger.launched  # ... but one that copies a block
        has_offered = self.reconciler.publish(launched)
        if self._is_idle or not self.scheduler.requests:
            self._note_idle()
        if output.finished_req_ids or len(self.scheduler.requests) != self.progress.told_open:
            self.progress.after_schedule(output)
        if not has_offered and not self._dropping and self.is_quiet():
            self.calm = calm_of(self, self._calm)
            self._calm = self.calm or self._calm
        return self.unheeded

    def note_launch(self, output: Any) -> None:
        """The hook failed, perhaps before it noted this step. It runs all the same, and one that is not in flight
        counts as over: what it touches would be offered."""
        if output.num_scheduled_tokens and not any(record is output for record in self.ledger.in_flight):
            self.reconciler.guard(lambda: self.ledger.launch(output))

    def _note_idle(self) -> None:
        """Nothing runs, nothing is in flight: the engine's thread touches no block until it schedules again."""
        with self.engine.lock:
            self._is_idle = not self.scheduler.requests and not self.ledger.in_flight

    def before_update(self, output: Any, result: Any) -> None:
        self.calm = None
        try:
            if not self.is_quiet():
                with self.engine.lock:  # an empty step is believed while the engine counts as idle
                    if self.reconciler.sync():
                        self._dropping = len(self.ledger.in_flight)
        finally:  # else it stays in flight, and the engine is never idle
            self.ledger.believe(output)
        if self._is_idle or not self.scheduler.requests:
            self._note_idle()
        dropped: Sequence[str] = ()
        if self._dropping:
            self._dropping -= 1
            dropped = self._dropped(output)
        self.reconciler.receipts.dropped_tokens += self.progress.count(output, result, dropped)

    def fail(self, what: str, *, is_look: bool = False) -> None:
        """Before a step's output is believed, or another step is scheduled, what was told must have been acted on."""
        self._looked, self.calm = NEVER, None
        self.reconciler.fail(what)
        if is_look:
            with self.engine.lock:
                self._is_idle = False
                self.reconciler.recover()
                self.reconciler.guard(self._note_idle)  # this may have been the last output

    def _dropped(self, output: Any) -> list[str]:
        """Requests whose output in this step vLLM will not believe."""
        requests = self.scheduler.requests
        return [
            name
            for name in output.num_scheduled_tokens
            if (request := requests.get(name)) is None
            or (request.num_stale_output_tokens > 0 and request.drop_stale_output)
        ]


def _hook(scheduler: Any) -> VllmHook | Progress | None:
    hook: VllmHook | Progress | None = scheduler.__dict__.get("_valve")
    if "_valve" in scheduler.__dict__:
        return hook
    scheduler._valve, scheduler._valve_calm, scheduler._valve_why = None, None, "no valved was found"
    try:
        link = process_link()
        if link is not None:
            hook = scheduler._valve = _make_hook(scheduler, link)
    except Refused as refused:
        scheduler._valve_why = str(refused)
        log.warning("valve: not attached, nothing is reclaimed from this engine: %s", refused)
    except Exception as error:
        scheduler._valve_why = f"{type(error).__name__}: {error}"
        log.exception("valve: not attached, nothing is reclaimed from this engine")
    return hook


def _make_hook(scheduler: Any, link: Link) -> VllmHook | Progress:
    from vllm.v1.core.sched.scheduler import Scheduler

    try:
        engine = check.judge(scheduler.vllm_config, scheduler.kv_cache_manager.kv_cache_config)
        check.refuse_scheduler_class(type(scheduler), Scheduler)
        check.refuse_second(link)
    except check.MemoryRefused as refused:
        scheduler._valve_why = str(refused)
        log.warning("valve: requests and tokens are reported, nothing is reclaimed from this engine: %s", refused)
        progress = Progress(scheduler, link)
        if link.owner is None:
            link.on_tick = weakly(progress.tell_tokens)
        return progress
    return VllmHook(scheduler, link, Mode.FULL, engine)


def built(scheduler: Any) -> None:
    """A Scheduler stands: attach now, not at its first request, which may be hours away."""
    hook = _hook(scheduler)
    if isinstance(hook, VllmHook) and type(scheduler).__module__.startswith("vllm."):
        try:  # another class may go on building itself, and take blocks for it
            hook.begin_idle()
        except Exception:
            hook.fail("begin_idle failed", is_look=True)


# In each of the next three the first lines are those of a calm step (calm.py). They call no function of the hook:
# between two steps a function costs more than what it does.


def before_schedule(scheduler: Any) -> None:
    """First thing in Scheduler.schedule: heed what valved has changed, so that no work is wasted on it."""
    try:
        calm = scheduler._valve_calm
        if calm is not None and calm.words == calm.seen and calm.link.session is calm.session:
            calm.has_waiting = not len(calm.requests) == calm.open_requests == len(scheduler.running)
            if not calm.has_waiting or calm.fits():
                return
    except Exception:  # of the first step; what else fails, fails in the long way, too
        scheduler._valve_calm = None
    _before_schedule(scheduler)


def _before_schedule(scheduler: Any) -> None:
    hook = getattr(scheduler, "_valve", None) or _hook(scheduler)
    is_heeded = False
    if hook is not None:
        try:
            is_heeded = hook.before_schedule()
        except Exception:
            hook.fail("before_schedule failed", is_look=True)
            is_heeded = not hook.unheeded
    if not is_heeded:
        refuse_blind(None, getattr(getattr(hook, "link", None), "said", ""))


def after_schedule(scheduler: Any, output: Any) -> None:
    """Last thing in Scheduler.schedule: note what this step reads and writes, and tell the workers whether the table
    is read.

    The note travels with the step: a worker whose cache is elastic computes no step that has none (worker.py).
    """
    why = ""
    try:
        calm = scheduler._valve_calm
        if (
            calm is None
            or output.preempted_req_ids
            or output.scheduled_cached_reqs.resumed_req_ids
            or not output.num_scheduled_tokens
            or not calm.reconciler.is_sure  # the link's thread may have failed
            or len(calm.in_flight) >= MOST_STEPS
            or ((output.scheduled_new_reqs or output.finished_req_ids or calm.has_waiting) and not calm.turns(output))
        ):
            hook = scheduler._valve
            why = hook.after_schedule(output) if hook is not None else scheduler._valve_why
        else:
            calm.in_flight.append(output)
            gauges, reconciler = calm.gauges, calm.reconciler
            gauges[1] = gauges[2] = calm.most_used - calm.queue.num_free_blocks
            gauges[3] = reconciler.steps = reconciler.steps + 1
    except Exception:
        why = _failed(scheduler, "after_schedule failed")
        if isinstance(hook := getattr(scheduler, "_valve", None), VllmHook):
            hook.note_launch(output)
    output._valve_unheeded = why


def before_update(scheduler: Any, output: Any, result: Any) -> None:
    """First thing in Scheduler.update_from_output: before this step's output is believed."""
    try:
        calm = scheduler._valve_calm
        if (
            calm is not None
            and calm.words == calm.seen
            and calm.link.session is calm.session
            and not output.scheduled_spec_decode_tokens
            and not result.pooler_output
            and len(rows := calm.rows) < MOST_ROWS  # else the link's thread, which counts them, has no connection
            and (records := calm.in_flight)
            and records[0] is output
        ):  # each row of it is one token or none
            records.popleft()
            calm.ledger.believed += 1  # first: what fails after it leaves no step in flight
            rows.append(calm.progress.row(output, result) if calm.gone else (result.sampled_token_ids, ()))
        elif (hook := scheduler._valve) is not None:
            hook.before_update(output, result)
    except Exception:
        _failed(scheduler, "before_update failed", is_look=True)


def _failed(scheduler: Any, what: str, *, is_look: bool = False) -> str:
    """Why nobody heeds the table for this step."""
    hook = getattr(scheduler, "_valve", None)
    if hook is None:
        return str(getattr(scheduler, "_valve_why", "no hook"))
    hook.fail(what, is_look=is_look)
    return str(hook.unheeded)
