"""What TensorRT-LLM's executor calls: how many requests it has open, so that an online service is gated exactly.

Memory is left alone: the block manager, in C++, offers no way to withhold chosen blocks, and an engine that has not
attached is never reclaimed from. Experimental: written from the sources, run against stand-ins, never with a GPU.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from valve_hook import VERSION
from valve_hook.link import Link, process_link
from valve_hook.sessions import weakly

log = logging.getLogger("valve")
_has_failed = False
_counted: weakref.WeakKeyDictionary[Any, Counter] = weakref.WeakKeyDictionary()


class Counter:
    """One per executor; the link's thread looks, too, because an executor that runs dry blocks before it would call."""

    def __init__(self, executor: Any, link: Link) -> None:
        self._executor = weakref.ref(executor)
        self._link = link
        self._known: set[int] = set()
        self._ended = 0
        link.on_tick = weakly(self.write)
        log.warning("valve: tensorrt_llm, hook %s: open requests are reported, memory is left alone", VERSION)

    def write(self) -> None:
        executor = self._executor()
        if executor is None:
            return
        now = {id(request) for request in list(executor.active_requests)}
        self._ended += len(self._known - now)
        self._known = now
        self._link.lifecycle.tell(len(now) + queued(executor), self._ended, 0, executor)


def queued(executor: Any) -> int:
    """Requests that no step has taken up. Three shapes of three releases: the queue stands in the executor (to 1.0), in
    an object of its own beside what waits (to 1.2), or there with what waits in the executor (since).
    """
    queue = getattr(executor, "executor_request_queue", None)
    if queue is None:
        return int(executor.request_queue.qsize())
    waiting = queue if hasattr(queue, "waiting_queue") else executor
    return int(queue.get_request_queue_size()) + len(waiting.waiting_queue)


def count(executor: Any) -> None:
    """First thing in PyExecutor._schedule. Without a daemon, and after any failure, nothing."""
    global _has_failed  # noqa: PLW0603 - said once, not in every step
    if _has_failed:
        return
    try:
        counter = _counted.get(executor)
        if counter is None:
            link = process_link()
            if link is None:
                return
            queued(executor)
            counter = _counted[executor] = Counter(executor, link)
        counter.write()
    except Exception:
        _has_failed = True
        log.exception("valve: requests are not counted in this release; the engine goes on")
