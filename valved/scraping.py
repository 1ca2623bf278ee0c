"""Answers Prometheus through a few lines of HTTP on the one asyncio loop; the port is off unless configured."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from valved.machine.helpers import heard
from valved.metrics import More, NodeCollector, text_of
from valved.model.states import NodeState

REQUEST_BYTES = 8192
MOST_OPEN = 64  # connections; each takes a descriptor, which an online process may need
BACKLOG = 16  # accepted in one turn of the loop
ANSWER_S = 5.0  # for a whole conversation
SHARE = 0.1  # of the loop, at most, for making the page
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTED = ("counter", "histogram")
Save = Callable[[Callable[[bool], None]], None]  # tells whether all that was collected is saved, or not in time


async def serve_metrics(
    host: str,
    port: int,
    look: Callable[[], NodeState],
    more: More = None,
    missing: Callable[[], str] | None = None,
    save: Save | None = None,
) -> asyncio.Server:
    """GET /metrics, /healthz and /readyz; anything else is 404. `missing`: what keeps the daemon from being ready. One
    request per connection."""

    made = Scraped(look, more, save)

    async def page(path: bytes) -> tuple[str, bytes]:
        if path == b"/metrics":
            return "200 OK", await made.body()
        if path == b"/healthz":
            return "200 OK", b"ok\n"
        if path == b"/readyz":
            text = missing() if missing else ""
            return ("503 Service Unavailable", f"not ready: {text}\n".encode()) if text else ("200 OK", b"ok\n")
        return "404 Not Found", b"not here; try /metrics, /healthz or /readyz\n"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        verb, target, _ = head.split(b" ", 2)
        status, body = await page(target.partition(b"?")[0] if verb == b"GET" else b"")
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    waiting: dict[asyncio.StreamWriter, None] = {}  # oldest first

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting[writer] = None
        if len(waiting) > MOST_OPEN:  # whoever asks at once is answered at once: the oldest does not mean to ask
            _leave(next(iter(waiting)), waiting)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            try:
                await asyncio.wait_for(talk(reader, writer), ANSWER_S)
            except asyncio.TimeoutError:  # it may not even read
                _leave(writer, waiting)
        waiting.pop(writer, None)
        writer.close()

    return await asyncio.start_server(answer, host, port, limit=REQUEST_BYTES, backlog=BACKLOG)


def _leave(writer: asyncio.StreamWriter, waiting: dict[asyncio.StreamWriter, None]) -> None:
    waiting.pop(writer, None)
    writer.transport.abort()


class Scraped:
    """The rendered metrics, made anew as often as a share of the loop allows: anybody who reaches the port may ask.

    To Prometheus a counter that falls began anew, and all of it counts again. So what it reads of a counter is in the
    state file, and no valved that is started after a kill says less: while that file cannot be written, counters stand.
    """

    def __init__(self, look: Callable[[], NodeState], more: More = None, save: Save | None = None) -> None:
        self._collector = NodeCollector(look, more)
        self._save = save
        self._body = b""
        self._lasting: list[bytes] = []  # the counters that were saved last
        self._next_s = 0.0
        self._turn = asyncio.Lock()

    async def body(self) -> bytes:
        async with self._turn:
            if time.monotonic() >= self._next_s:
                await self._make()
            return self._body

    async def _make(self) -> None:
        """One family in a turn of the loop: a HELLO or a reclaim never waits for more."""
        took_s, counters, others = 0.0, list[bytes](), list[bytes]()
        began_s = time.monotonic()
        for family in self._collector.collect():
            (counters if family.type in COUNTED else others).append(text_of(family))
            took_s += time.monotonic() - began_s
            await asyncio.sleep(0)
            began_s = time.monotonic()
        if self._save is None or await heard(self._save):
            self._lasting = counters
        self._body = b"".join([*others, *self._lasting])
        self._next_s = time.monotonic() + took_s / SHARE
