"""Free ports of this machine, and a router that serves on one or says why not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from pathlib import Path

from valve_router.server import serve

LOWEST, HIGHEST = 15_000, 65_536
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # by Linux to whoever names none


def _never_given() -> list[int]:
    first, last = map(int, GIVEN.read_text().split())
    return [*range(LOWEST, min(first, HIGHEST)), *range(max(last + 1, LOWEST), HIGHEST)]


PORTS = _never_given() or list(range(LOWEST, HIGHEST))
_ports = itertools.count(1009 * os.getpid())  # each process of a test run begins elsewhere


def free_ports(count: int) -> list[int]:
    """Nobody else takes one before the test does: neither who names no port nor another process of this run."""
    return [next(filter(_is_free, (PORTS[number % len(PORTS)] for number in _ports))) for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as one, contextlib.suppress(OSError):
        one.bind(("127.0.0.1", port))
        return True
    return False


@contextlib.asynccontextmanager
async def serving(settings, serve=serve, **more):
    """A router, or with its `serve` a picker, that is ready. One that cannot start raises, and nobody waits for it."""
    stop, ready = asyncio.Event(), asyncio.Event()
    router = asyncio.create_task(serve(settings, stop=stop, ready=ready, **more))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((router, waiting), return_when=asyncio.FIRST_COMPLETED)
    if router.done():
        waiting.cancel()
        await router
    assert ready.is_set()
    yield
    stop.set()
    await router
