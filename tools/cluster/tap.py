"""A tap on the wire between kube-scheduler and its extender: how long each call takes, seen from the caller's
side.

kube-scheduler's own metrics have no latency per extender verb. The tap runs as a process of its own (`python
-m valve_tools.cluster.tap PORT TARGET FILE`), passes bytes on as they come, and appends `verb seconds status` per
call; what it costs is in the figures. The caller sends one request at a time on a connection, as Go's client does."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

_LENGTH = re.compile(rb"\r\nContent-Length: *(\d+)", re.IGNORECASE)


class _Caller(asyncio.Protocol):
    """The side of kube-scheduler: the first bytes of a request start its clock."""

    def __init__(self, target: int, log: TextIO) -> None:
        self._target = target
        self._log = log
        self._verb = ""
        self._started_s = 0.0
        self._upstream: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _at_once(self.transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: _Answerer(self), "127.0.0.1", self._target)
        except OSError:
            self.hang_up()
            return
        self._upstream = transport
        _at_once(transport)
        transport.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        if not self._verb:
            self._started_s = time.perf_counter()  # the head is here; the body is still on its way
            self._verb = data.split(b" ", 2)[1].rpartition(b"/")[2].decode()
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def answered(self, status: bytes) -> None:
        self._log.write(f"{self._verb} {time.perf_counter() - self._started_s:.6f} {status.decode()}\n")
        self._verb = ""

    def connection_lost(self, _: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.close()


class _Answerer(asyncio.Protocol):
    """The side of the extender, whose answers always carry their length."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller
        self._status = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if self._caller.transport is not None:
            self._caller.transport.write(data)
        if not self._status:
            head, _, data = data.partition(b"\r\n\r\n")  # one write of the extender: the head is whole
            found = _LENGTH.search(head)
            self._status, self._left = head.split(b" ", 2)[1], int(found[1]) if found else 0
        self._left -= len(data)
        if self._left <= 0:
            self._caller.answered(self._status)
            self._status = b""

    def connection_lost(self, _: Exception | None) -> None:
        self._caller.hang_up()


def _at_once(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def serve(port: int, target: int, out: Path) -> None:
    with out.open("a", buffering=1, encoding="utf-8") as log:
        server = await asyncio.get_running_loop().create_server(lambda: _Caller(target, log), "127.0.0.1", port)
        async with server:
            await server.serve_forever()


def calls(log: Path) -> Iterator[tuple[str, float, int]]:
    """verb, seconds and status of each call, in the order of their answers."""
    for line in log.read_text(encoding="utf-8").splitlines():
        verb, seconds, status = line.split()
        yield verb, float(seconds), int(status)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
