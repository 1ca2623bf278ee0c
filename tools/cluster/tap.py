"""A tap on the wire between kube-scheduler and its extender: how long each call takes, seen from the caller's
side.

kube-scheduler's own metrics have no latency per extender verb. The tap runs as a process of its own (`python
-m valve_tools.cluster.tap PORT TARGET FILE`) and appends `verb seconds status` per call; what it costs is in
the figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from valve_scheduler import wire


async def serve(port: int, target: int, out: Path) -> None:
    with out.open("a", buffering=1, encoding="utf-8") as log:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire.send_at_once(writer)
            upstream = await asyncio.open_connection("127.0.0.1", target, limit=1 << 20)
            wire.send_at_once(upstream[1])
            try:
                while (head := await wire.read_head(reader)) is not None:
                    started = time.perf_counter()  # the head is here; the body is still on its way
                    await _pass_on(head, reader, upstream[1])
                    answer = await wire.read_head(upstream[0])
                    if answer is None:
                        break
                    await _pass_on(answer, upstream[0], writer)
                    verb = head.start[1].rpartition("/")[2]
                    log.write(f"{verb} {time.perf_counter() - started:.6f} {answer.start[1]}\n")
            except (ConnectionError, wire.ProtocolError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()
                upstream[1].close()

        async with await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20) as server:
            await server.serve_forever()


async def _pass_on(head: wire.Head, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    body = await wire.read_body(source, head)
    drop = ("content-length", "transfer-encoding")
    headers = {key: value for key, value in head.headers.items() if key not in drop}
    sink.write(wire.message(" ".join(head.start), headers, body))
    await sink.drain()


def calls(log: Path) -> Iterator[tuple[str, float, int]]:
    """verb, seconds and status of each call, in the order of their answers."""
    for line in log.read_text(encoding="utf-8").splitlines():
        verb, seconds, status = line.split()
        yield verb, float(seconds), int(status)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
