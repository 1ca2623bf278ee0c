"""Takes requests that the present memory cannot hold out of the queue while a step is scheduled, so that others go on.

vLLM looks at waiting requests in order and stops at the first that does not fit. With memory that comes and goes one
long request would stop the whole engine for as long as its memory is away. Such a request keeps its place: between two
steps it is in the queue where it was, and it goes first as soon as it fits. If the whole range could not hold it, it
ends with an error.
"""

from __future__ import annotations

import logging
from typing import Any

from valve_hook.vllm.engine import VllmEngine

log = logging.getLogger("valve")


class Aside:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, engine: VllmEngine) -> None:
        self._scheduler, self._engine = scheduler, engine
        self.requests: list[Any] = []  # those that stand aside in this step
        self._told: set[str] = set()

    def before_schedule(self) -> None:
        """Costs a look at the first waiting request, and at those that stand aside."""
        waiting, engine = self._scheduler.waiting, self._engine
        ever = int(engine.pool.num_gpu_blocks) - 1
        now = ever - len(engine.withheld)
        while waiting:
            request = waiting.peek_request()
            need = -(-request.num_tokens // engine.block_tokens)
            if need <= now:
                return
            if need > ever:
                self._end(request, need, ever)
            self.requests.append(waiting.pop_request())

    def after_schedule(self) -> None:
        """Puts them back in front, in their order. Requests that were preempted in this step come behind them."""
        while self.requests:
            self._scheduler.waiting.prepend_request(self.requests.pop())

    def _end(self, request: Any, need: int, ever: int) -> None:
        """As vLLM ends a request whose grammar does not compile: its client hears of it with the next output."""
        name = request.request_id
        if name not in self._told:
            log.warning(
                "valve: request %s ends with an error: it needs %d KV blocks, this cache has %d", name, need, ever
            )
        self._told = {name} | (self._told & self._scheduler.requests.keys())
        self._scheduler.grammar_compile_error_reqs.add(name)
