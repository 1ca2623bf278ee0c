"""The HTTP server of the extender and the webhook.

Standard library asyncio, keep-alive, one write per answer.
"""

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from valve_kube import wire

log = logging.getLogger(__name__)

_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Unavailable",
}
_SPILL_BYTES, _SPILL_S = 64 << 20, 1.0
# Of a server: as many calls as two API servers have under way at once. Descriptors are shared with the API client.
_MOST_CONNECTIONS = 512
_HANDSHAKE_S = 5.0  # no API server waits longer for the answer behind it (the chart's longest time-out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    ends: bool = False  # with it the connection: the request was not read to its end


Exchange = Callable[[wire.Head, asyncio.StreamReader], Awaitable[Answer]]
"""Reads the body itself, as much of it as it wants."""
Handler = Callable[[str, str, bytes], Awaitable[Answer]]


def json_answer(value: Any, status: int = 200, *, ends: bool = False) -> Answer:
    return Answer(status=status, body=msgspec.json.encode(value), ends=ends)


def text_answer(text: str, status: int = 200, *, ends: bool = False) -> Answer:
    return Answer(status=status, body=text.encode() + b"\n", content_type="text/plain; charset=utf-8", ends=ends)


async def serve(
    handler: Handler,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    most: int = wire.BODY_LIMIT,
    connections: float = _MOST_CONNECTIONS,
) -> asyncio.Server:
    """Listen, and read each body, of at most so many bytes, before it is handled."""

    async def exchange(head: wire.Head, reader: asyncio.StreamReader) -> Answer:
        return await handler(head.start[0], head.start[1].partition("?")[0], await wire.read_body(reader, head, most))

    return await serve_exchanges(exchange, host, port, tls, connections)


async def serve_exchanges(
    exchange: Exchange, host: str, port: int, tls: ssl.SSLContext | None, connections: float = _MOST_CONNECTIONS
) -> asyncio.Server:
    """Listen.

    Every connection is served in order, an exception of the handler is a 500 of that request only. With too many of
    them, of the peer that has the most, the one ends that was answered longest ago: whoever opens them and says nothing
    keeps nobody out, and ends nobody else's.
    """
    answered: dict[asyncio.StreamWriter, str] = {}  # whose each is, the last one that was answered last

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        if len(answered) >= connections:
            ((greediest, _),) = Counter(answered.values()).most_common(1)
            oldest = next(one for one, its_peer in answered.items() if its_peer == greediest)
            del answered[oldest]
            oldest.transport.abort()
        answered[writer] = peer
        wire.send_at_once(writer)
        try:
            while await _one(exchange, reader, writer) and writer in answered:
                del answered[writer]
                answered[writer] = peer  # the last one now
        except (wire.ProtocolError, OSError, asyncio.IncompleteReadError) as error:
            log.info("connection dropped", extra={"error": str(error)})
        except asyncio.CancelledError:  # the process ends; before Python 3.12 each connection would tell of it
            log.debug("connection ended with the process")
        finally:
            answered.pop(writer, None)
            writer.close()

    # A connection counts once its handshake is done: one that never ends it shall not stay for the minute of asyncio.
    patience = {} if tls is None else {"ssl_handshake_timeout": _HANDSHAKE_S}
    return await asyncio.start_server(connected, host, port, ssl=tls, limit=wire.HEAD_LIMIT, **patience)


async def _one(exchange: Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Serve one request; False when the connection ends."""
    head = await wire.read_head(reader)
    if head is None:
        return False
    try:
        answer = await exchange(head, reader)
    except (wire.ProtocolError, ConnectionError, asyncio.IncompleteReadError):
        raise
    except Exception:
        log.exception("request failed", extra={"method": head.start[0], "target": head.start[1]})
        answer = text_answer("internal error, see the log", 500)
    headers = {"Content-Type": answer.content_type} | ({"Connection": "close"} if answer.ends else {})
    phrase = _PHRASES.get(answer.status, "Status")
    writer.write(wire.message(f"HTTP/1.1 {answer.status} {phrase}", headers, answer.body))
    await writer.drain()
    if answer.ends:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_spill(reader), _SPILL_S)

    return head.keeps_alive and not answer.ends


async def _spill(reader: asyncio.StreamReader) -> None:
    """Read what still comes of a refused body: if it is closed with unread bytes, TCP takes the answer back."""
    left = _SPILL_BYTES
    while left > 0 and (part := await reader.read(wire.HEAD_LIMIT)):
        left -= len(part)
