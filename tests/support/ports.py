"""Free ports of this machine, and a router that serves on one or says why not."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from valve_router.server import serve


def free_ports(count: int) -> list[int]:
    """All held at one time: two that are asked for one after the other may be the same."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


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
