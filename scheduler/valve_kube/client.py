"""A small Kubernetes API client: requests over a pool of kept connections, watches as streams of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from valve_kube import wire
from valve_kube.access import Access
from valve_kube.errors import SchedulerError, in_words
from valve_kube.shapes import Shape

Json = dict[str, Any]
T = TypeVar("T")
WHOLE = Shape()

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML
# Objects of a page. One may be two megabytes, so a page beyond PAGE_BYTES is asked for anew with a tenth of them; each
# page that fits lets the next one have more again, as far as objects of that size would fit.
PAGE = 500
PAGE_GROWTH = 50
PAGE_BYTES = 16 << 20
MOST_RETRY_S = 60.0


class ApiError(SchedulerError):
    """The API server answered, and said no."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class Unreachable(SchedulerError):
    """No answer: what was asked for may or may not have happened."""


class KubeClient:
    """One per process. At most `connections` requests are under way; watches use connections of their own."""

    def __init__(self, access: Access, *, connections: int = 32, timeout_s: float = 10.0) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._slots = asyncio.Semaphore(connections)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        """One call; raises ApiError for an answer of 400 or more, Unreachable when there is none in time."""
        raw = await self._raw(method, path, query=query, body=body, content_type=content_type, accept=accept)
        return _decoded(f"{method} {path}", msgspec.json.decode, raw)

    async def _raw(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        limit: int = 1 << 30,
    ) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": content_type, "Accept": accept}
        try:
            async with self._slots:
                call = self._exchange(method, _target(path, query), headers, data, limit)
                status, head, raw = await asyncio.wait_for(call, self._timeout_s)
        except wire.TooLarge:
            raise
        except (OSError, asyncio.IncompleteReadError, wire.ProtocolError, asyncio.TimeoutError) as error:
            raise Unreachable(f"{method} {path}: {in_words(error)}") from error
        if status >= 400:
            raise _api_error(status, head, raw)

        return raw

    async def list(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
        shape: Shape = WHOLE,
    ) -> tuple[list[Json], str]:
        """All items and the resourceVersion of one consistent (quorum) read, page by page. Of each page only what
        `shape` keeps outlives it."""
        items: list[Json] = []
        token, size = "", PAGE
        while True:
            page = {**(query or {}), "limit": str(size)}
            if token:
                page["continue"] = token
            try:
                raw = await self._raw("GET", path, query=page, accept=accept, limit=PAGE_BYTES)
            except wire.TooLarge as error:
                if size == 1:
                    raise Unreachable(f"GET {path}: {_after(items)} alone: {error}") from error
                size = max(1, size // 10)
                continue
            answer = _decoded(f"GET {path}", shape.page, raw)
            items += answer.items
            token = answer.next_token
            if not token:
                return items, answer.version
            fitting = PAGE_BYTES * len(answer.items) // len(raw) or 1
            size = min(PAGE, size + PAGE_GROWTH, fitting)

    async def watch(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        silence_s: float,
        shape: Shape = WHOLE,
    ) -> AsyncIterator[Json]:
        """Events from `resourceVersion` in the query until the server ends the stream."""
        try:
            reader, writer = await asyncio.wait_for(self._connect(), self._timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise Unreachable(f"watch {path}: {in_words(error)}") from error
        # No wait_for from here on: it makes a task per event.
        fuse = _Fuse(writer, self._timeout_s)
        try:
            target = _target(path, {**query, "watch": "1"})
            writer.write(self._message("GET", target, {"Accept": "application/json"}, b""))
            head = await wire.read_head(reader)
            if head is None:
                raise Unreachable(f"watch {path}: connection closed")
            if wire.status(head) >= 400:
                raise _api_error(wire.status(head), head, await wire.read_body(reader, head))
            fuse.lengthen(silence_s)
            pending = b""
            async for chunk in wire.read_chunks(reader, head):
                fuse.renew()
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield shape.event(line)
        except (OSError, asyncio.IncompleteReadError, wire.ProtocolError, msgspec.DecodeError) as error:
            why = "silent for too long" if fuse.blown else in_words(error)
            raise Unreachable(f"watch {path}: {why}") from error
        finally:
            fuse.remove()
            writer.close()

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _exchange(
        self, method: str, target: str, headers: Mapping[str, str], data: bytes, limit: int
    ) -> tuple[int, wire.Head, bytes]:
        found = self._kept()
        kept = found is not None
        reader, writer = found or await self._connect()
        try:
            writer.write(self._message(method, target, headers, data))
            head = await wire.read_head(reader)
            if head is None:
                raise ConnectionResetError("connection closed without an answer")
            raw, status = await wire.read_body(reader, head, limit), wire.status(head)
        except BaseException as error:
            writer.close()
            # The server may have closed a kept connection just as we took it. Only reads are safe to repeat.
            if kept and method == "GET" and isinstance(error, ConnectionError):
                return await self._exchange(method, target, headers, data, limit)
            raise
        if head.keeps_alive:
            self._idle.append((reader, writer))
        else:
            writer.close()

        return status, head, raw

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection that the server has not closed. The server closes one after a minute or two without a request.
        What is written to a closed connection is lost, and the caller would not learn that a Binding was lost."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()

        return None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        access = self._access
        access.renew()
        reader, writer = await asyncio.open_connection(access.host, access.port, ssl=access.tls, limit=1 << 20)
        wire.send_at_once(writer)

        return reader, writer

    def _message(self, method: str, target: str, headers: Mapping[str, str], data: bytes) -> bytes:
        authorization = self._access.authorization()
        extra = {"Authorization": authorization} if authorization else {}
        host = f"{self._access.host}:{self._access.port}"

        return wire.message(f"{method} {target} HTTP/1.1", {"Host": host, **extra, **headers}, data)


async def create(client: KubeClient, path: str, body: Any, query: Mapping[str, str] | None = None) -> bool:
    """False: an object of that name is there already."""
    try:
        await client.request("POST", path, query=query, body=body)
    except ApiError as error:
        if error.status == 409:
            return False
        raise
    return True


class _Fuse:
    """Ends a connection on which nothing arrives for too long; its reader gets an error."""

    def __init__(self, writer: asyncio.StreamWriter, after_s: float) -> None:
        self._writer = writer
        self._after_s = after_s
        self._loop = asyncio.get_running_loop()
        self._seen_s = self._loop.time()
        self.blown = False
        self._timer = self._loop.call_later(after_s, self._look)

    def lengthen(self, after_s: float) -> None:
        self._after_s = after_s
        self.renew()

    def renew(self) -> None:
        """Something arrived. The timer itself is set again only when it has run out."""
        self._seen_s = self._loop.time()

    def remove(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._seen_s + self._after_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.blown = True
        self._writer.transport.abort()


def _decoded(call: str, decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.DecodeError as error:
        raise Unreachable(f"{call}: the answer cannot be read: {error}") from error


def _after(items: list[Json]) -> str:
    """The next object of a list by the one before it, as lists are in the order of namespace and name."""
    if not items:
        return "the first object"
    metadata = items[-1]["metadata"]

    return f"the object after {metadata.get('namespace', '')}/{metadata['name']}"


def _target(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _api_error(status: int, head: wire.Head, raw: bytes) -> ApiError:
    try:
        answer = json.loads(raw)
        reason, text = str(answer.get("reason", "")), str(answer.get("message", ""))
    except (ValueError, AttributeError):
        reason, text = "", raw[:200].decode(errors="replace")
    return ApiError(status, reason, text, _retry_after_s(head.headers.get("retry-after", "")))


def _retry_after_s(text: str) -> float:
    """As many seconds as the header says; a proxy that means hours is asked again sooner."""
    return min(float(text), MOST_RETRY_S) if text.isascii() and text.isdigit() else 0.0
