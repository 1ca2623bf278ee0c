"""Pauses between the steps of an SGLang: before its scheduler takes requests in, with the overlap off or on.

A pause begins when the last result was processed and nothing is in flight. With the overlap on a step is in flight
all the time: one choice then chooses nothing, so that its result is processed, and the pause begins before the next.
Whatever comes to the scheduler's sockets ends it. Plugin form only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from valve_hook.grants import Asking
from valve_hook.policy.granting import EngineFacts

log = logging.getLogger("valve")
PAUSES = "_valve_pauses"
LOOK_AT_WAITING = 64  # requests that wait, whose arrival is noted at one look
COARSE_S = 0.001  # a socket's own clock


class LoopPauses:
    """One per Scheduler; `hook` is its SglangHook."""

    def __init__(self, scheduler: Any, hook: Any) -> None:
        self.scheduler, self.hook = scheduler, hook
        self.asking = Asking(hook.link, refused=why_not(scheduler, hook.ranks.size))
        self.facts = EngineFacts(max_num_seqs=int(scheduler.max_running_requests))
        self._begun: deque[int] = deque()  # of each step in flight
        self._made: dict[str, int] = {}  # tokens of each request that were delivered
        self._resume_ns = 0  # of a pause that waits for what is in flight
        self._drains = False
        self._poller: Any = None
        if self.asking.refused:
            log.info("valve: this engine never asks for pauses: %s", self.asking.refused)

    def before_ingest(self) -> None:
        """Pause here, or have the next choice choose nothing."""
        asking, now_ns = self.asking, time.monotonic_ns()
        self._drains = False
        if not asking.follows:
            self._made.clear()
            return
        if not asking.readers:
            asking.rested(now_ns)
        resume_ns, self._resume_ns = self._resume_ns, 0
        self._look()
        if not resume_ns:
            resume_ns = asking.wants(now_ns, self.facts)
        elif not asking.still(resume_ns, self.facts) or self.in_flight:
            return  # it was not drained: something came between
        if resume_ns and self.in_flight:
            self._resume_ns, self._drains = resume_ns, True
        elif resume_ns:
            asking.pause(resume_ns, self.wait, is_done=True)

    @property
    def in_flight(self) -> bool:
        """Without overlap there is no such queue."""
        return bool(getattr(self.scheduler, "result_queue", ()))

    @property
    def drains(self) -> bool:
        """Whether this choice is to choose nothing. A prompt's step is followed by a choice that merges it."""
        last = self.scheduler.last_batch
        return self._drains and not self.scheduler.waiting_queue and last is not None and last.forward_mode.is_decode()

    def _look(self) -> None:
        scheduler, facts, hook = self.scheduler, self.facts, self.hook
        last, chunked = scheduler.last_batch, scheduler.chunked_req is not None
        facts.running = sum(not each.finished() for each in scheduler.running_batch.reqs)
        facts.waiting = len(scheduler.waiting_queue)
        is_prompt = self.in_flight and last is not None and last.forward_mode.is_extend()
        facts.prefilling = max(int(chunked or is_prompt), facts.running - self.asking.readers)
        facts.running = max(facts.running, self.asking.readers)  # a prompt's requests are merged with the next choice
        used, _, _, _ = hook.engine.gauges()
        facts.kv_used, facts.kv_pool = used, hook.engine.pages - 1
        free = hook.engine.free_pages
        facts.kv_mapped = facts.kv_pool - free.taken_pages
        session = hook.reconciler.session
        offers = facts.kv_mapped + 1 if free.has_whole else 0  # surplus that the cache keeps is no pending offer
        facts.reclaim_pending = session is not None and session.is_asked(offers)

    def wait(self, seconds: float) -> bool:
        """Until a request or a call comes."""
        if self._poller is None:
            import zmq

            receiver = self.scheduler.request_receiver
            self._poller = zmq.Poller()
            for each in (receiver.recv_from_tokenizer, receiver.recv_from_rpc):
                if each is not None:
                    self._poller.register(each, zmq.POLLIN)
        if seconds >= COARSE_S:
            return bool(self._poller.poll(int(seconds * 1e3)))
        time.sleep(seconds)
        return bool(self._poller.poll(0))

    def ingested(self) -> None:
        if self.asking.policy is not None:
            now_ns = time.monotonic_ns()
            for each in islice(self.scheduler.waiting_queue, LOOK_AT_WAITING):
                self.asking.arrived(each.rid, len(each.origin_input_ids), now_ns, streamed=bool(each.stream))

    def chosen(self, batch: Any) -> None:
        if batch is not None and batch.reqs:
            self._begun.append(time.monotonic_ns())

    def processed(self, batch: Any) -> None:
        """A result was processed."""
        begun_ns = self._begun.popleft() if self._begun else 0
        if not self.in_flight:
            self._begun.clear()
        now_ns, count = time.monotonic_ns(), len(batch.reqs)
        if count:
            self.asking.stepped(begun_ns or now_ns, now_ns, count, prefill=batch.forward_mode.is_extend())
        if self.asking.policy is None or not count:
            return
        rows = []
        for each in batch.reqs:
            made, has_ended = len(each.output_ids), each.finished()
            rows.append((each.rid, made - self._made.get(each.rid, 0), has_ended))
            if has_ended:
                self._made.pop(each.rid, None)
            else:
                self._made[each.rid] = made
        self.asking.delivered(rows, now_ns)

    def guard(self, action: Callable[[], None]) -> None:
        """The engine goes on, and asks no more."""
        if self.asking.refused:
            return
        try:
            action()
        except Exception:
            log.exception("valve: looking for a pause failed; the engine goes on without pauses")
            self._drains = False
            self.asking.refuse("the hook failed")


def pauses_of(scheduler: Any) -> LoopPauses | None:
    """None: its scheduler has no hook, or not yet."""
    hook = scheduler.__dict__.get("_valve")
    if hook is None:
        return None
    if PAUSES not in scheduler.__dict__:
        try:
            scheduler.__dict__[PAUSES] = LoopPauses(scheduler, hook)
        except Exception:
            log.exception("valve: this engine never asks for pauses")
            scheduler.__dict__[PAUSES] = None
    pauses: LoopPauses | None = scheduler.__dict__[PAUSES]
    return pauses


def why_not(scheduler: Any, ranks: int) -> str:
    """Why this engine never asks; empty where it may. What the hook refuses as a whole never comes here."""
    receiver = getattr(scheduler, "request_receiver", None)
    reasons = {
        "several ranks": ranks > 1,
        "answers without tokens": not scheduler.is_generation,
        "requests that come by no socket": not hasattr(getattr(receiver, "recv_from_tokenizer", None), "poll"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
