"""ttRPC over NRI's multiplexed stream: containerd's way to speak with a plugin, on asyncio and nothing else.

Two framings, one in the other, all numbers big-endian:

    mux     u32 connection (1: calls to us, 2: calls by us), u32 length, payload
    ttRPC   u32 length, u32 stream (odd, rising per caller), u8 type (1 request, 2 response), u8 flags, envelope

A ttRPC message may be cut over several mux frames at any byte, so each connection is read as a stream of bytes. No mux
frame of ours exceeds 4,096 bytes of payload: the peer reads through a buffer of that size and drops the connection.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable

from valve.kube import nri_pb2 as pb

log = logging.getLogger("valved.kube")

PLUGIN, RUNTIME = 1, 2
REQUEST, RESPONSE = 1, 2
MAX_MESSAGE = 4 << 20
MAX_CHUNK = 4096
_MUX = struct.Struct(">II")
_HEAD = struct.Struct(">IIBB")

# (service, method, payload) -> payload of the answer. It must not raise: see nri.py.
Handler = Callable[[str, str, bytes], bytes]


class Broken(Exception):
    """The peer closed, or does not speak what we do."""


class TtrpcSession:
    """One connection to the runtime, both directions. `run` reads until the end; `call` needs it running."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._pending = {PLUGIN: bytearray(), RUNTIME: bytearray()}
        self._calls: dict[int, asyncio.Future[pb.Response]] = {}
        self._next_stream = 1

    async def run(self) -> None:
        """Raises Broken at the end, always."""
        try:
            while True:
                connection, length = _MUX.unpack(await self._reader.readexactly(_MUX.size))
                if length > MAX_MESSAGE + _HEAD.size:
                    raise Broken(f"mux frame of {length} bytes")
                payload = await self._reader.readexactly(length)
                if connection in self._pending:
                    self._pending[connection] += payload
                    self._take_messages(connection)
                await self._writer.drain()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken("the runtime closed the connection") from error
        finally:
            for call in self._calls.values():
                call.cancel()

    async def call(self, service: str, method: str, payload: bytes, timeout_s: float) -> bytes:
        stream = self._next_stream
        self._next_stream += 2
        answer: asyncio.Future[pb.Response] = asyncio.get_running_loop().create_future()
        self._calls[stream] = answer
        request = pb.Request(service=service, method=method, payload=payload, timeout_nano=int(timeout_s * 1e9))
        self._send(RUNTIME, stream, REQUEST, request.SerializeToString())
        try:
            response = await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise Broken(f"{method}: no answer within {timeout_s} s") from None
        finally:
            self._calls.pop(stream, None)
        if response.status.code:
            raise Broken(f"{method}: {response.status.message}")
        return response.payload

    def close(self) -> None:
        self._writer.close()

    def _take_messages(self, connection: int) -> None:
        pending = self._pending[connection]
        while len(pending) >= _HEAD.size:
            length, stream, kind, _ = _HEAD.unpack_from(pending)
            if length > MAX_MESSAGE:
                raise Broken(f"ttRPC message of {length} bytes")
            end = _HEAD.size + length
            if len(pending) < end:
                return
            envelope = bytes(pending[_HEAD.size : end])
            del pending[:end]
            if connection == PLUGIN and kind == REQUEST:
                self._answer(stream, envelope)
            elif connection == RUNTIME and kind == RESPONSE:
                self._answered(stream, envelope)

    def _answer(self, stream: int, envelope: bytes) -> None:
        request = pb.Request.FromString(envelope)
        payload = self._handler(request.service, request.method, request.payload)
        response = pb.Response(status=pb.Status(), payload=payload)
        self._send(PLUGIN, stream, RESPONSE, response.SerializeToString())

    def _answered(self, stream: int, envelope: bytes) -> None:
        call = self._calls.get(stream)
        if call is not None and not call.done():
            call.set_result(pb.Response.FromString(envelope))

    def _send(self, connection: int, stream: int, kind: int, envelope: bytes) -> None:
        message = _HEAD.pack(len(envelope), stream, kind, 0) + envelope
        chunks = [message[at : at + MAX_CHUNK] for at in range(0, len(message), MAX_CHUNK)]
        self._writer.write(b"".join(_MUX.pack(connection, len(chunk)) + chunk for chunk in chunks))
