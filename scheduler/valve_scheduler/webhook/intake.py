"""How much of the webhook one review may take: its bytes, its time, and the places of large ones.

What a tenant writes into a pod is read here before any quota counts it, in a process that all tenants need.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from valve_kube import wire

from valve_scheduler.server import Answer, json_answer, text_answer

# The API server takes requests of 3 MiB; a review is larger only where its texts have to be escaped.
REVIEW_BYTES = 3 << 20
# An ordinary pod is of 4 to 20 KB. Larger ones are judged by a thread: a megabyte takes some tens of milliseconds.
LARGE_BYTES = 64 << 10
LARGE_AT_ONCE = 4
# The API server waits for 2 s (the chart's shortest time-out); a refusal shall reach it before.
REVIEW_S = 1.5
# Objects between two collections of cycles. A review is a tree without any: looked through each 700 objects as it grew,
# one of 3 MB took half as long again.
COLLECT_AFTER = 200_000

Judge = Callable[[str, bytes], Answer]


class Intake:
    """Reads reviews within their bounds and has them judged; what it refuses is told why."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._places = asyncio.Semaphore(LARGE_AT_ONCE)
        self._worker = ThreadPoolExecutor(1, "large-reviews")

    async def exchange(self, head: wire.Head, reader: asyncio.StreamReader) -> Answer:
        try:
            return await asyncio.wait_for(self._answer(head, reader), REVIEW_S)
        except wire.TooLarge as error:
            return _refusal(413, str(error))
        except asyncio.TimeoutError:
            large = f"at most {LARGE_AT_ONCE} reviews of more than {LARGE_BYTES >> 10} KiB are looked at together"
            return _refusal(503, f"not answered within {REVIEW_S:g} s; {large}. Try again")

    async def _answer(self, head: wire.Head, reader: asyncio.StreamReader) -> Answer:
        method, target, _ = head.start
        path = target.partition("?")[0]
        if method != "POST":
            return text_answer(f"no such call: {method} {path}", 404, ends=True)
        is_small = "transfer-encoding" not in head.headers and wire.content_length(head) <= LARGE_BYTES
        if is_small:
            return self._judge(path, await wire.read_body(reader, head))
        async with self._places:
            body = await wire.read_body(reader, head, REVIEW_BYTES)
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._judge, path, body)


def _refusal(status: int, why: str) -> Answer:
    """A Status: of a text the API server passes nothing on to the creator of the pod."""
    value = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": f"valve: {why}", "code": status}
    return json_answer(value, status, ends=True)
