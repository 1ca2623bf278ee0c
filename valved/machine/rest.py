"""The selector of the daemon's loop: says when the loop is about to sleep, and first of all when it is awake."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Ended = TypeVar("Ended")


def nothing() -> None: ...


class RestingSelector(selectors.EpollSelector):
    def __init__(self) -> None:
        super().__init__()
        self.tell(nothing, nothing)

    def tell(self, rests: Callable[[], None], wakes: Callable[[], None]) -> None:
        """From here on these hear of it. They must not raise."""
        self._sleeps, self._wakes = rests, wakes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._sleeps()
        try:
            return super().select(timeout)
        finally:
            self._wakes()


def run_in_loop(main: Coroutine[Any, Any, Ended], selector: RestingSelector) -> Ended:
    """As asyncio.run(), which takes no selector on every Python that we support."""
    loop = asyncio.SelectorEventLoop(selector)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
