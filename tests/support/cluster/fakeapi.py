"""An API server of a few dozen lines: lists in pages, watches from a script, and every way to hang up on a client."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from valve_kube import wire
from valve_kube.access import Access

Json = dict[str, Any]
HANG_UP = "hang up"  # in a watch script: close without the last chunk
GONE = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}


def item(name: str, version: int) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int) -> Json:
    return {"type": kind, "object": item(name, version)}


def bookmark(version: int) -> Json:
    """As an API server sends it: without a name."""
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


class FakeApi:
    """`items` are listed; each watch takes the next script of `watches`, then stays open and silent."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.version = 1
        self.is_obedient = False  # pages are as long as was asked for
        self.watches: list[list[Any]] = []
        self.answers: list[tuple[int, Json, dict[str, str]]] = []  # for any request, before all else
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.writes: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Access:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]

        return Access(host="127.0.0.1", port=port, tls=None, authorization=lambda: "Bearer t")

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while head := await wire.read_head(reader):
                body = await wire.read_body(reader, head)
                if not await self._answer(head, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: wire.Head, body: bytes, writer: asyncio.StreamWriter) -> bool:
        url = urlsplit(head.start[1])
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.seen.append((f"{head.start[0]} {url.path}", query))
        self.writes.append(body)
        if self.answers:
            status, answer, headers = self.answers.pop(0)
            if status == 0:  # no answer at all
                return False
            writer.write(wire.message(f"HTTP/1.1 {status} X", headers, json.dumps(answer).encode()))
        elif query.get("watch"):
            return await self._watch(writer)
        else:
            writer.write(wire.message("HTTP/1.1 200 OK", {}, json.dumps(self._page(query)).encode()))
        await writer.drain()

        return True

    def _page(self, query: dict[str, str]) -> Json:
        start = int(query.get("continue", "0"))
        end = start + (int(query["limit"]) if self.is_obedient else 2)  # small pages, whatever limit was asked for
        metadata = {"resourceVersion": str(self.version)}
        if end < len(self.items):
            metadata["continue"] = str(end)

        return {"metadata": metadata, "items": self.items[start:end]}

    async def _watch(self, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        script = self.watches.pop(0) if self.watches else [None]
        for step in script:
            if step is None:
                await asyncio.Event().wait()
            if step == HANG_UP:
                return False
            line = json.dumps(step).encode() + b"\n"
            for part in (line[:7], line[7:]):  # events may be cut anywhere
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

        return True


async def until(check: Callable[[], bool], deadline_s: float = 200.0) -> None:
    """Wait on a condition; the deadline only ends a hung test."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not check():
        assert asyncio.get_running_loop().time() < end, "the condition never came true"
        await asyncio.sleep(0.005)
