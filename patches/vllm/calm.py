"""A step in which each request takes its next token and nothing else happens: most of them, told in a few stores.

It is known by what held after the step before it. While valved writes nothing, and nobody waits, all that a step
changes for Valve is its number and how many blocks are in use; and where one request ends and another one begins, that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valve_hook.ledger import MOST_WAITING, Ledger, Noted
from valve_hook.link import Link
from valve_hook.reconciler import Reconciler
from valve_hook.sessions import Session
from valve_hook.vllm.progress import Progress, Row


@dataclass(slots=True, kw_only=True)
class Calm:
    """What held after a step that left nothing to do. Made once after a look; from step to step two numbers change.

    The three calls look at it (calls.py). What they need is here and not behind another object, for each object that
    they touch is in no cache.
    """

    words: memoryview  # of valved's table, as they are now
    seen: bytes
    link: Link
    session: Session
    requests: dict[str, Any]  # the scheduler's own
    open_requests: int
    has_waiting: bool = False  # in this step
    reconciler: Reconciler
    in_flight: deque[Any]  # the ledger's own; no loss asks about any of them
    gauges: Any  # of the session's book
    queue: Any  # of free blocks
    most_used: int  # blocks in use when none is free
    noted: deque[Noted]  # the ledger's own
    rows: deque[Row]  # both are the progress's own
    gone: set[str]
    progress: Progress
    ledger: Ledger
    scheduler: Any
    tables: Mapping[str, Sequence[Any]]  # the engine's own lists of blocks
    block_tokens: int
    is_asked: bool  # for blocks: a request that ends may leave a column free

    def fits(self) -> bool:
        """Before a step is scheduled: the request that waits first. One that does not fit has to stand aside."""
        waiting = self.scheduler.waiting
        try:
            first = getattr(waiting, "_heap", waiting)[0]  # a priority queue is copied to be walked
        except IndexError:
            return True
        return bool(first.num_tokens <= self.most_used * self.block_tokens)

    def turns(self, output: Any) -> bool:
        """As many begin as have ended, and nobody waits: noted, as `Ledger.note` does."""
        requests, ended, started = self.requests, output.finished_req_ids, []
        if self.is_asked or not len(requests) == self.open_requests == len(self.scheduler.running):
            return False
        for new in output.scheduled_new_reqs:
            table = self.tables.get(new.req_id)
            if table is None or requests[new.req_id].resumable:
                return False
            started.append((new.req_id, table))
        if len(self.noted) >= MOST_WAITING:
            return False
        self.noted.append((self.ledger.believed + len(self.in_flight), ended, (), started))
        progress = self.progress
        progress.ended += len(ended)
        self.gone |= ended
        if self.link.is_offline:
            progress.ended_beside = progress.ended
        elif ended:
            progress.tell()
        return True


def calm_of(hook: Any, last: Calm | None) -> Calm | None:
    """A step left nothing to do: nor does the next one, where everybody runs and no column is looked for."""
    reconciler, engine, scheduler, ledger = hook.reconciler, hook.engine, hook.scheduler, hook.ledger
    session, open_requests, queue = reconciler.session, len(scheduler.requests), engine.pool.free_block_queue
    is_asked = session is not None and session.is_asked(reconciler.backed)
    if session is None or not 0 < open_requests == len(scheduler.running):
        return None
    if is_asked and not engine.knows_free_columns:
        return None
    if ledger.asked or engine.prefixes.computed:  # a loss asked about steps in flight; somebody was sent back
        return None
    if last is not None and last.session is session and last.seen is hook.seen and last.queue is queue:
        last.open_requests, last.most_used, last.is_asked = open_requests, engine.most_used, is_asked
        return last
    return Calm(
        words=hook.words,
        seen=hook.seen,
        link=hook.link,
        session=session,
        requests=scheduler.requests,
        open_requests=open_requests,
        reconciler=reconciler,
        in_flight=ledger.in_flight,
        gauges=session.book.gauges,
        queue=queue,
        most_used=engine.most_used,
        noted=ledger.noted,
        rows=hook.progress.rows,
        gone=hook.progress.gone,
        progress=hook.progress,
        ledger=ledger,
        scheduler=scheduler,
        tables=engine.tables,
        block_tokens=engine.block_tokens,
        is_asked=is_asked,
    )
