"""HTTP/1.1 framing on asyncio streams, for the servers and the API client of this package.

Only what Kubernetes speaks: heads up to 64 KiB, bodies by Content-Length or chunked. One message is one
write: header and body in two writes met Nagle and delayed ACK once, and cost kube-scheduler 37 ms a call."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

HEAD_LIMIT = 64 * 1024
# A pod of 1.5 MB (etcd's limit) twice over, or 50,000 node names.
BODY_LIMIT = 8 * 1024 * 1024
_DIGITS, _MOST_DIGITS = b"0123456789abcdef", 16


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1 as we know it; the connection is of no more use."""


class TooLarge(ProtocolError):
    """A body beyond the limit of its reader; what is left of it is still on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """First line and headers; header names in lower case."""

    start: tuple[str, str, str]
    headers: Mapping[str, str]

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next message's head; None when the peer closed between messages."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ProtocolError("connection ended within a head") from error
        return None
    except asyncio.LimitOverrunError as error:
        raise ProtocolError(f"head exceeds {HEAD_LIMIT} bytes") from error
    lines = raw.decode("latin-1").split("\r\n")
    first = lines[0].split(" ", 2)
    if len(first) < 2:
        raise ProtocolError(f"first line is {lines[0][:80]!r}")
    headers = {}
    for line in lines[1:-2]:
        key, colon, value = line.partition(":")
        if not colon:
            raise ProtocolError(f"header is {line[:80]!r}")
        headers[key.strip().lower()] = value.strip()

    return Head(start=(first[0], first[1], first[2] if len(first) > 2 else ""), headers=headers)


async def read_chunks(reader: asyncio.StreamReader, head: Head, most: int = BODY_LIMIT) -> AsyncIterator[bytes]:
    """The body in pieces as they arrive: a watch is a body that does not end for minutes. No piece is larger than
    `most`: the reader would keep all of it, however long it is said to be."""
    if "chunked" not in head.headers.get("transfer-encoding", "").lower():
        length = content_length(head)
        if length:
            yield await reader.readexactly(length)
        return
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            raise ProtocolError("the size of a chunk does not end") from error
        size = _number(line.split(b";")[0].strip(), 16, "chunk size")
        if size > most:
            raise TooLarge(f"a chunk of {size} bytes, at most {most} are taken")
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


async def read_body(reader: asyncio.StreamReader, head: Head, limit: int = BODY_LIMIT) -> bytes:
    parts, total = [], 0
    if "transfer-encoding" not in head.headers and content_length(head) > limit:
        raise TooLarge(f"body of {content_length(head)} bytes, at most {limit} are taken")
    async for part in read_chunks(reader, head, limit):
        total += len(part)
        if total > limit:
            raise TooLarge(f"body exceeds {limit} bytes")
        parts.append(part)

    return b"".join(parts)


def message(start: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A whole message in one buffer, always with Content-Length."""
    lines = [start, *(f"{key}: {value}" for key, value in headers.items()), f"Content-Length: {len(body)}"]

    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def send_at_once(writer: asyncio.StreamWriter) -> None:
    """Never wait for an ACK before a small message."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def content_length(head: Head) -> int:
    """As the head says it; 0 of a body in chunks, too."""
    return _number(head.headers.get("content-length", "0").encode("latin-1"), 10, "Content-Length")


def status(head: Head) -> int:
    """Of an answer."""
    return _number(head.start[1].encode("latin-1"), 10, "status")


def _number(text: bytes, base: int, what: str) -> int:
    """`int` also takes signs, underscores, digits of other scripts, and fails on five thousand digits."""
    if not 0 < len(text) <= _MOST_DIGITS or text.lower().strip(_DIGITS[:base]):
        raise ProtocolError(f"{what} is {text[:20]!r}")

    return int(text, base)
