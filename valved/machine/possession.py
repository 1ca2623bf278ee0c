"""ProverPort: is an RM client the sender's own? Asked of the driver, on the descriptor that the sender passed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable

from valved.machine.helpers import Closer, Helpers
from valved.machine.ports import GpuInfo
from valved.native._gate import lib

THREADS = 16  # each client has one question under way at most


class RmProver:
    """The ProverPort of a real node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, closer: Closer) -> None:
        self._loop = loop
        self._closer = closer
        self._helpers = Helpers("valved-prove", THREADS)

    def check(
        self,
        fd: int,
        gpu: GpuInfo,
        h_client: int,
        h_subdevice: int,
        keep: bool,
        then: Callable[[bool, int], None],
        account: Hashable,
    ) -> None:
        def look() -> None:
            is_own = lib.valve_rm_owns(fd, h_client, h_subdevice, gpu.gpu_id, gpu.uuid) == 0
            kept = fd if is_own and keep else -1
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(then, is_own, kept)
            if kept < 0:  # a stranger's close may hang for ever: never on a thread that proves
                self.drop(fd, account)

        self._helpers.do(look)

    def drop(self, fd: int, account: Hashable) -> None:
        self._closer.of(account).close([fd])
