"""A way through which everything said to and by the extender passes, and on which it can be killed at a chosen step."""

import asyncio
import enum
import ssl
import threading
from collections.abc import Callable
from types import TracebackType

from valve_kube import wire


class Step(enum.Enum):
    """Where a bind stands when the extender dies."""

    ASKED = "kube-scheduler has asked, the extender does not know yet"
    CHOSEN = "the extender has sent its Binding, the API server does not have it"
    WRITTEN = "the API server has stored the Binding, the extender does not know"
    TOLD = "the extender has answered, kube-scheduler does not know"


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Gauntlet:
    """Two listeners on a thread of their own: the way of kube-scheduler to the extender, and its way to the API."""

    def __init__(self, extender: int, api: int, kill: Callable[[], None]) -> None:
        self._extender = extender
        self._api = api
        self._kill = kill
        self._armed: Step | None = None
        self.killed = threading.Event()
        self._ready = threading.Event()
        self.to_extender = self.to_api = self.probes = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Gauntlet":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def arm(self, step: Step) -> None:
        """The next bind that reaches this step kills the extender."""
        self.killed.clear()
        self._armed = step

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self.to_extender = self._listen(self._from_scheduler)
        self.to_api = self._listen(self._from_extender)
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _listen(self, serve: Callable[[Streams], object]) -> int:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire.send_at_once(writer)
            try:
                await serve((reader, writer))  # type: ignore[misc]
            except (OSError, asyncio.IncompleteReadError, wire.ProtocolError):
                pass  # one side is gone: so is the way
            finally:
                writer.close()

        server = self._loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20))
        port: int = server.sockets[0].getsockname()[1]

        return port

    async def _from_scheduler(self, caller: Streams) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", self._extender, limit=1 << 20)
        while (head := await wire.read_head(caller[0])) is not None:
            body = await wire.read_body(caller[0], head)
            binds = head.start[1].endswith("/bind")
            self._step(Step.ASKED, binds)
            answer, raw = await _exchange(upstream, head, body)
            self._step(Step.TOLD, binds)
            caller[1].write(_again(answer, raw))

    async def _from_extender(self, caller: Streams) -> None:
        context = ssl._create_unverified_context()
        upstream = await asyncio.open_connection("127.0.0.1", self._api, ssl=context, limit=1 << 20)
        while (head := await wire.read_head(caller[0])) is not None:
            body = await wire.read_body(caller[0], head)
            if "watch=1" in head.start[1]:
                upstream[1].write(_again(head, body))
                await _pipe(upstream[0], caller[1])
                return
            binds = head.start[0] == "POST" and head.start[1].endswith("/binding")
            self._step(Step.CHOSEN, binds)
            answer, raw = await _exchange(upstream, head, body)
            self._step(Step.WRITTEN, binds)
            caller[1].write(_again(answer, raw))

    def _step(self, step: Step, binds: bool) -> None:
        if binds and self._armed is step:
            self._armed = None
            self._kill()
            self.killed.set()
            raise ConnectionResetError("killed here")


async def _exchange(upstream: Streams, head: wire.Head, body: bytes) -> tuple[wire.Head, bytes]:
    upstream[1].write(_again(head, body))
    answer = await wire.read_head(upstream[0])
    if answer is None:
        raise ConnectionResetError("no answer")

    return answer, await wire.read_body(upstream[0], answer, limit=1 << 30)


def _again(head: wire.Head, body: bytes) -> bytes:
    left_out = ("content-length", "transfer-encoding")
    headers = {key: value for key, value in head.headers.items() if key not in left_out}

    return wire.message(" ".join(head.start), headers, body)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
