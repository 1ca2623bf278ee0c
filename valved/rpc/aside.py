"""An event loop in a thread of its own, for what strangers can make slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class LoopAside:
    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def begin(self) -> None:
        """A daemon: what strangers hold up must not keep valved from leaving."""
        threading.Thread(target=lambda: asyncio.run(self._live()), name=self._name, daemon=True).start()

    async def _live(self) -> None:
        end = asyncio.Event()
        self._begun.set_result((asyncio.get_running_loop(), end))
        await end.wait()

    async def do(self, work: Coroutine[Any, Any, None]) -> None:
        """There; whoever waits here does not hold up this loop."""
        loop, _ = await asyncio.wrap_future(self._begun)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def end(self) -> None:
        loop, end = await asyncio.wrap_future(self._begun)
        loop.call_soon_threadsafe(end.set)
