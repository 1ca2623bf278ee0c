"""A step in which each request takes its next token and nothing else happens: most of them, told in a few stores.

It is known by what held after the step before it. While valved writes nothing, and nobody waits, all that a step
changes for Valve is its number and how many blocks are in use; and where one request ends and another one begins, that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from valve_hook.ledger import MOST_STEPS, Ledger
from valve_hook.link import Link
from valve_hook.reconciler import Reconciler
from valve_hook.sessions import Session
from valve_hook.vllm.engine import VllmEngine
from valve_hook.vllm.progress import Progress


@dataclass(slots=True, kw_only=True)
class Calm:
    """What held after a step that left nothing to do. Each answer False means: by the long way. Made once after a look;
    from step to step two numbers change.
    """

    scheduler: Any
    requests: dict[str, Any]  # the scheduler's own
    open_requests: int
    queue: Any  # of free blocks
    most_used: int  # blocks in use when none is free
    link: Link
    session: Session
    gauges: Any  # of its book
    words: Callable[[], bytes]  # of valved's table, as they are now
    seen: bytes
    reconciler: Reconciler
    ledger: Ledger
    in_flight: deque[Any]  # both are the ledger's own
    asked: Sized
    engine: VllmEngine
    progress: Progress
    is_asked: bool = False  # for blocks: who ends may leave a column free
    has_waiting: bool = False  # in this step

    def holds(self) -> bool:
        """Before a step is scheduled."""
        if self.words() != self.seen or self.link.session is not self.session:
            return False
        if len(self.requests) == self.open_requests == len(self.scheduler.running):
            self.has_waiting = False
            return True
        self.has_waiting = True
        waiting = self.scheduler.waiting
        try:  # who does not fit has to stand aside; a priority queue is copied to be walked
            first = getattr(waiting, "_heap", waiting)[0]
        except IndexError:
            return True
        return bool(first.num_tokens <= self.most_used * self.engine.block_tokens)

    def launch(self, output: Any) -> bool:
        """The step was scheduled: note it, if that is all that happened."""
        reconciler, records = self.reconciler, self.in_flight
        new, ended = output.scheduled_new_reqs, output.finished_req_ids
        if (
            output.preempted_req_ids
            or output.scheduled_cached_reqs.resumed_req_ids
            or not output.num_scheduled_tokens
            or not reconciler.is_sure  # the link's thread may have failed
            or len(records) >= MOST_STEPS
        ):
            return False
        if (new or ended or self.has_waiting) and not self._turns(output):
            return False
        records.append(output)
        gauges, reconciler.steps = self.gauges, reconciler.steps + 1
        gauges[1] = gauges[2] = self.most_used - self.queue.num_free_blocks
        gauges[3] = reconciler.steps & 0xFFFFFFFF
        return True

    def _turns(self, output: Any) -> bool:
        """As many begin as have ended, and no request waits."""
        requests = self.requests
        if self.is_asked or not len(requests) == self.open_requests == len(self.scheduler.running):
            return False
        for new in output.scheduled_new_reqs:
            if requests[new.req_id].resumable:
                return False
        self.engine.record(self.ledger, output)
        self.progress.note_ended(output.finished_req_ids)
        return True

    def believe(self, output: Any, result: Any) -> bool:
        """Its output is in: take it in, if every token of it counts."""
        records = self.in_flight
        if (
            self.words() != self.seen
            or self.link.session is not self.session
            or not records
            or records[0] is not output
            or self.asked
            or not self.progress.count_plain(output, result)
        ):
            return False
        records.popleft()
        self.ledger.believed += 1
        return True
