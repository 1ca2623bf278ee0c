"""Requests that the present memory cannot hold stand aside while a batch is chosen, so that the others go on.

SGLang looks at waiting requests in order and stops at the first that does not fit. Without this file, while memory is
taken, one long request would stop the whole engine. The request keeps its place: between two choices it
stands where it stood, and goes first as soon as it fits. A request that has begun chunk by chunk and cannot end any
more stands aside, too, because the pages that it holds would be of no use: the memory that there is does not hold it,
or what is free of it does not hold its next chunk, for which SGLang would end itself. If the whole range could not hold
a request, SGLang itself ends it with an error when it comes in.

A request that SGLang sends back while it chooses, for want of memory or for a request that goes first, is no newcomer:
the queue's limit is lifted for so long.
"""

from __future__ import annotations

from typing import Any

from valve_hook.sglang.endings import ends
from valve_hook.sglang.engine import SglangEngine


class QueueAside:
    """One per Scheduler. Every rank decides alike: by its queue and by what is withheld."""

    def __init__(self, scheduler: Any, engine: SglangEngine) -> None:
        self._scheduler, self._engine = scheduler, engine
        self._aside: list[Any] = []
        self._lifted: list[Any] = []  # the queue's limit, while it is lifted

    def before_choose(self) -> None:
        """Takes requests that do not fit out of the queue. While no page is taken, SGLang's own rules hold."""
        scheduler, engine = self._scheduler, self._engine
        self.after_choose()  # in case the last one failed
        if not engine.free_pages.taken_pages:
            return
        self._lifted, scheduler.max_queued_requests = [scheduler.max_queued_requests], None
        room = scheduler.max_total_num_tokens - engine.free_pages.taken_pages * engine.page_tokens
        chunked = scheduler.chunked_req
        if chunked is not None and not (engine.room.needed(chunked) < room and engine.room.finds_next_chunk(chunked)):
            engine.discard({chunked.rid: 0}, ())
            scheduler.waiting_queue.sort(key=lambda each: each is not chunked)
        queue = scheduler.waiting_queue
        places = range(len(queue))
        if not self._is_sorted():
            places = range(next((at for at in places if engine.room.needed(queue[at]) < room), len(queue)))
        aside = {at for at in places if engine.room.needed(queue[at]) >= room}
        if aside:
            rest = [each for at, each in enumerate(queue) if at not in aside]
            self._aside, scheduler.waiting_queue = [queue[at] for at in sorted(aside)], rest
            self._aside = [each for each in self._aside if not ends(scheduler, each)]

    def after_choose(self) -> None:
        """Puts them back in front, in their order; requests that were retracted meanwhile come behind them."""
        if self._lifted:
            self._scheduler.max_queued_requests = self._lifted.pop()
        if self._aside:
            self._scheduler.waiting_queue[:0] = self._aside
            self._aside = []

    def _is_sorted(self) -> bool:
        """Whether SGLang sorts the queue, by priority or by what is cached: then any place may become the first."""
        policy = getattr(getattr(self._scheduler, "policy", None), "policy", None)
        return self._scheduler.enable_priority_scheduling or getattr(policy, "value", "fcfs") != "fcfs"
