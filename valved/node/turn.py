"""Lets a new valved wait until the old one has ended, as when a DaemonSet is updated with a surge.

The new one answers as ready while it waits, so Kubernetes ends the old one. The old one sees that a successor waits,
and hands over instead of draining.
"""

from __future__ import annotations

import asyncio
import contextlib

from valved.state.saved import RunFolder

LOOK_S = 0.02  # the gap in which nobody gates
TEXT = b"# waiting for the valved before this one\n"


async def wait_for_turn(folder: RunFolder, host: str, port: int) -> None:
    """Returns with the folder's lock held. Until then `port` (0: none) answers as the metrics would, unless it is the
    other valved's."""
    server = None
    try:
        with contextlib.suppress(OSError, ValueError):
            server = await asyncio.start_server(_answer, host, port) if port else None
        while not folder.queue():
            await asyncio.sleep(LOOK_S)
    finally:
        if server is not None:
            server.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(TEXT)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + TEXT)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()
