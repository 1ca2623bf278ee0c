"""Requests that the present memory cannot hold stand aside while a batch is chosen, so that the others go on.

SGLang looks at waiting requests in order and stops at the first that does not fit. With memory that comes and goes one
long request would stop the whole engine for as long as its memory is away. It keeps its place: between two choices it
stands where it stood, and goes first as soon as it fits. One that had begun, chunk by chunk, and cannot end any more
stands aside, too: what it holds would be of use to nobody. What all of the range could not hold SGLang itself ends with
an error when it comes in.
"""

from __future__ import annotations

from typing import Any

from valve_hook.sglang.engine import SglangEngine


class QueueAside:
    """One per Scheduler. Every rank decides alike: by its queue and by what is withheld."""

    def __init__(self, scheduler: Any, engine: SglangEngine) -> None:
        self._scheduler, self._engine = scheduler, engine
        self._aside: list[Any] = []

    def before_choose(self) -> None:
        """Where all pages are there SGLang's own rules hold."""
        scheduler, engine = self._scheduler, self._engine
        self.after_choose()  # should it have failed
        if not engine.free_pages.taken_pages:
            return
        room = scheduler.max_total_num_tokens - engine.free_pages.taken_pages * engine.page_tokens
        chunked = scheduler.chunked_req
        if chunked is not None and engine.room.needed(chunked) >= room:
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

    def after_choose(self) -> None:
        """In front, in their order; whoever was retracted meanwhile comes behind."""
        if self._aside:
            self._scheduler.waiting_queue[:0] = self._aside
            self._aside = []

    def _is_sorted(self) -> bool:
        """By priority or by what is cached: any place may become the first."""
        policy = getattr(getattr(self._scheduler, "policy", None), "policy", None)
        return self._scheduler.enable_priority_scheduling or getattr(policy, "value", "fcfs") != "fcfs"
