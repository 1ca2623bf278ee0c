"""A tap on the wire between kube-scheduler and its extender: how long each call takes, seen from the caller's
side.

kube-scheduler's own metrics have no latency per extender verb. The tap runs as a process of its own (`python
-m valve_tools.cluster.tap PORT TARGET FILE`), passes bytes on as they come, and appends `verb seconds status` per
call; what it costs is in the figures. The caller sends one request at a time on a connection, as Go's client does."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from pathlib import Path

_LENGTH = re.compile(rb"\r\nContent-Length: *(\d+)", re.IGNORECASE)


async def _passed(source: StreamReader, to: StreamWriter) -> tuple[str, float]:
    """One message, passed on as it comes: the second word of its head, and when that was here."""
    head = await source.readuntil(b"\r\n\r\n")
    began_s = time.perf_counter()  # the body is still on its way
    to.write(head)
    found = _LENGTH.search(head)
    left = int(found[1]) if found else 0
    while left:
        data = await source.read(left)
        if not data:
            raise EOFError
        to.write(data)
        left -= len(data)
    return head.split(b" ", 2)[1].decode(), began_s


async def serve(port: int, target: int, out: Path) -> None:
    async def connected(caller: StreamReader, back: StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.closing(back):
            extender, ahead = await asyncio.open_connection("127.0.0.1", target)
            with contextlib.closing(ahead):
                while True:
                    path, began_s = await _passed(caller, ahead)
                    status, _ = await _passed(extender, back)
                    log.write(f"{path.rpartition('/')[2]} {time.perf_counter() - began_s:.6f} {status}\n")

    with out.open("a", buffering=1, encoding="utf-8") as log:
        server = await asyncio.start_server(connected, "127.0.0.1", port)
        await server.serve_forever()


def calls(log: Path) -> Iterator[tuple[str, float, int]]:
    """verb, seconds and status of each call, in the order of their answers."""
    for line in log.read_text(encoding="utf-8").splitlines():
        verb, seconds, status = line.split()
        yield verb, float(seconds), int(status)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
