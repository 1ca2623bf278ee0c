"""An event loop in a thread of its own, for what strangers can make slow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

LEAVE_S = 2.0  # whoever leaves waits for so long, twice


class LoopAside:
    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def begin(self) -> None:
        """A daemon: what strangers hold up must not keep valved from leaving. OSError: no descriptor for a loop."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        await asyncio.wrap_future(self._begun)

    def _run(self) -> None:
        life = self._live()
        try:
            asyncio.run(life)
        except Exception as error:
            life.close()  # no loop has taken it
            if self._begun.done():
                raise
            self._begun.set_exception(error)

    async def _live(self) -> None:
        end = asyncio.Event()
        self._begun.set_result((asyncio.get_running_loop(), end))
        await end.wait()

    async def do(self, work: Coroutine[Any, Any, None]) -> None:
        """There; whoever waits here does not hold up this loop."""
        loop, _ = self._begun.result()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def do_in_time(self, work: Coroutine[Any, Any, None]) -> None:
        """The same for one who leaves: not done if strangers hold up that loop for long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.do(work), LEAVE_S)

    def end(self) -> None:
        loop, end = self._begun.result()
        loop.call_soon_threadsafe(end.set)
