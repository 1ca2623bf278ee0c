"""containerd's side of NRI: a unix socket, the mux and ttRPC framing written once more, from the description alone."""

from __future__ import annotations

import asyncio
import struct

from valve.kube import nri_pb2 as pb

PATIENCE_S = 200.0  # ends only a hung test
PLUGIN, RUNTIME = 1, 2


class FakeRuntime:
    """Accepts one plugin at a time; `request` calls it as containerd does."""

    def __init__(self, path, chunk=4096):
        self.path = path
        self.registered = []
        self.mute = False  # accept and say nothing
        self.largest = 0  # mux frame of the plugin
        self._chunk = chunk
        self._server = None
        self._writer = None
        self._answers = {}
        self._stream = 1

    async def start(self):
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, str(self.path))

    async def stop(self):
        self._server.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def request(self, method, message):
        """The answer's bytes; raises RuntimeError for an error status, as it would fail the container."""
        stream, self._stream = self._stream, self._stream + 2
        self._answers[stream] = asyncio.get_running_loop().create_future()
        payload = message if isinstance(message, bytes) else message.SerializeToString()
        envelope = pb.Request(service="nri.pkg.api.v1alpha1.Plugin", method=method, payload=payload)
        self._send(PLUGIN, stream, 1, envelope.SerializeToString())
        response = await asyncio.wait_for(self._answers[stream], PATIENCE_S)
        if response.status.code:
            raise RuntimeError(response.status.message)
        return response.payload

    async def create(self, pod, container):
        answer = await self.request("CreateContainer", pb.CreateContainerRequest(pod=pod, container=container))
        return pb.CreateContainerResponse.FromString(answer).adjust

    async def _connected(self, reader, writer):
        self._writer = writer
        buffers = {PLUGIN: b"", RUNTIME: b""}
        try:
            while True:
                connection, length = struct.unpack(">II", await reader.readexactly(8))
                self.largest = max(self.largest, length)
                buffers[connection] += await reader.readexactly(length)
                buffers[connection] = self._take(connection, buffers[connection])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _take(self, connection, buffer):
        while len(buffer) >= 10:
            length, stream, _, _ = struct.unpack(">IIBB", buffer[:10])
            if len(buffer) < 10 + length:
                break
            envelope, buffer = buffer[10 : 10 + length], buffer[10 + length :]
            if connection == RUNTIME and not self.mute:
                request = pb.Request.FromString(envelope)
                self.registered.append(pb.RegisterPluginRequest.FromString(request.payload))
                self._send(RUNTIME, stream, 2, pb.Response().SerializeToString())
            elif connection == PLUGIN:
                self._answers[stream].set_result(pb.Response.FromString(envelope))
        return buffer

    def _send(self, connection, stream, kind, envelope):
        message = struct.pack(">IIBB", len(envelope), stream, kind, 0) + envelope
        for at in range(0, len(message), self._chunk):
            part = message[at : at + self._chunk]
            self._writer.write(struct.pack(">II", connection, len(part)) + part)
