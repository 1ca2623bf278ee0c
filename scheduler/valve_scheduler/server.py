"""The HTTP server of the extender and the webhook.

Standard library asyncio, keep-alive, one write per answer.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from valve_kube import wire

log = logging.getLogger(__name__)

_PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Unavailable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"


Handler = Callable[[str, str, bytes], Awaitable[Answer]]


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status=status, body=msgspec.json.encode(value))


def text_answer(text: str, status: int = 200) -> Answer:
    return Answer(status=status, body=text.encode() + b"\n", content_type="text/plain; charset=utf-8")


async def serve(handler: Handler, host: str, port: int, tls: ssl.SSLContext | None = None) -> asyncio.Server:
    """Listen.

    Every connection is served in order, an exception of the handler is a 500 of that request only.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.send_at_once(writer)
        try:
            while await _one(handler, reader, writer):
                pass
        except (wire.ProtocolError, ConnectionError, asyncio.IncompleteReadError, ssl.SSLError) as error:
            log.info("connection dropped", extra={"error": str(error)})
        finally:
            writer.close()

    return await asyncio.start_server(connected, host, port, ssl=tls, limit=wire.HEAD_LIMIT)


async def _one(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Serve one request; False when the connection ends."""
    head = await wire.read_head(reader)
    if head is None:
        return False
    method, target, _ = head.start
    body = await wire.read_body(reader, head)
    try:
        answer = await handler(method, target.partition("?")[0], body)
    except Exception:
        log.exception("request failed", extra={"method": method, "target": target})
        answer = text_answer("internal error, see the log", 500)
    headers = {"Content-Type": answer.content_type}
    phrase = _PHRASES.get(answer.status, "Status")
    writer.write(wire.message(f"HTTP/1.1 {answer.status} {phrase}", headers, answer.body))
    await writer.drain()

    return head.keeps_alive
