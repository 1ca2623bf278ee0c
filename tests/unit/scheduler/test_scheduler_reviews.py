"""What a tenant writes into one pod never takes the webhook from all others, and is refused with a reason."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import datetime, timezone
from typing import Any

import pytest
from fakeapi import until
from instructions import instructions_of
from valve_kube import names, wire
from valve_kube.access import Access
from valve_kube.client import KubeClient
from valve_kube.injection import Skipped, merge_preload
from valve_scheduler.server import Answer, serve_exchanges, text_answer
from valve_scheduler.webhook import intake
from valve_scheduler.webhook.admission import AdmissionSettings, PodRefused, mutate_offline, mutate_online
from valve_scheduler.webhook.intake import LARGE_AT_ONCE, LARGE_BYTES, REVIEW_BYTES, Intake
from valve_scheduler.webhook.service import Webhook, WebhookSettings

Json = dict[str, Any]
OURS = "/var/lib/valve/shim/current/libvalve.so"
LARGE = b"x" * (LARGE_BYTES + 1)


def offline(containers: int = 1, **more: Any) -> Json:
    work = {"name": "work", "image": "i", "resources": {"limits": {names.RESOURCE: "1"}}, **more}
    others = [{"name": f"c{number}", "image": "i"} for number in range(1, containers)]
    return {"metadata": {"name": "p"}, "spec": {"containers": [work, *others]}}


def review(pod: Json) -> bytes:
    return json.dumps({"request": {"uid": "u", "object": pod}}).encode()


def post(body: bytes, *head: bytes) -> bytes:
    lines = (b"POST /mutate/offline HTTP/1.1", b"Content-Length: %d" % len(body), *head)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def webhook() -> Webhook:
    client = KubeClient(Access(host="127.0.0.1", port=1, tls=None, authorization=str))
    return Webhook(client, WebhookSettings(), lambda: datetime.now(timezone.utc))


def told(*requests: bytes) -> bytes:
    """What the webhook answers on one connection to what is all sent before it is looked at."""

    async def run() -> bytes:
        server = await serve_exchanges(webhook().intake.exchange, "127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"".join(requests))
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        server.close()
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize("over", [1, REVIEW_BYTES])
def test_a_review_beyond_its_size_is_never_read_and_never_refused_without_a_word(over: int) -> None:
    answer = told(post(b"x" * (REVIEW_BYTES + over)), post(review(offline())))

    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 Content Too Large")
    assert b"Connection: close" in head
    message = f"valve: body of {REVIEW_BYTES + over} bytes, at most 3145728 are taken"
    assert json.loads(text) == {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "code": 413,
    }


def test_a_review_in_chunks_is_never_larger_than_others_may_be() -> None:
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    answer = told(b"POST /mutate/offline HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", chunk * 4)

    assert b"valve: body exceeds 3145728 bytes" in answer


def test_small_and_large_reviews_are_answered_on_one_connection() -> None:
    bodies = [review(offline(env=[{"name": "A", "value": "x" * size}])) for size in (10, LARGE_BYTES, 3_000_000, 10)]

    answer = told(*map(post, bodies))

    assert answer.count(b'"allowed":true') == 4


def test_a_call_that_is_no_review_is_never_read() -> None:
    assert told(b"GET /mutate/offline HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")


def test_a_pod_of_more_containers_than_are_looked_at_is_refused_by_their_number() -> None:
    assert len(mutate_offline(offline(containers=256), AdmissionSettings())["spec"]["containers"]) == 256
    with pytest.raises(PodRefused, match="the pod has 257 containers, init containers among them; at most 256"):
        mutate_offline(offline(containers=257), AdmissionSettings())
    with pytest.raises(Skipped, match="too-many-containers"):
        mutate_online(offline(257, resources={"limits": {names.ONLINE_RESOURCE: "1"}}), AdmissionSettings())


class Entry(str):
    """Comparing two of them takes instructions."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


class Entries(str):
    """Falls into them."""

    def replace(self, *arguments: Any) -> Entries:
        return Entries(super().replace(*arguments))

    def split(self, *arguments: Any) -> list[Any]:
        return [Entry(each) for each in super().split(*arguments)]


def merging(entries: int, entry: str) -> int:
    text = Entries(":".join(f"/lib/{entry}{number}" for number in range(entries)))
    return instructions_of(lambda: merge_preload(text, OURS))


@pytest.mark.parametrize("entry", ["libasan.", "lib."])
def test_the_work_for_a_preload_never_grows_faster_than_its_text(entry: str) -> None:
    """Sanitizers' runtimes of a megabyte took minutes: eight times as many, sixty-four times as long."""
    assert merging(800, entry) < 9 * merging(100, entry)


class Desk:
    """An intake with a judge that waits, and requests whose bodies are there already."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.judged: list[bytes] = []
        self.intake = Intake(self._judge)
        self.readers: list[asyncio.StreamReader] = []

    def _judge(self, path: str, body: bytes) -> Answer:
        if len(body) > LARGE_BYTES:
            assert self.go.wait(100)
        self.judged.append(body)
        return text_answer(path)

    def ask(self, body: bytes, missing: int = 0) -> asyncio.Task[Answer]:
        reader = asyncio.StreamReader(limit=wire.HEAD_LIMIT)
        reader.feed_data(body)
        self.readers.append(reader)
        start, length = ("POST", "/mutate/offline", "HTTP/1.1"), str(len(body) + missing)
        head = wire.Head(start=start, headers={"content-length": length})
        return asyncio.create_task(self.intake.exchange(head, reader))

    def read(self) -> int:
        return sum(1 for reader in self.readers if not reader._buffer)  # type: ignore[attr-defined]


def test_no_more_than_four_large_reviews_are_ever_held_and_small_ones_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "REVIEW_S", 100.0)

    async def run() -> None:
        desk = Desk()
        large = [desk.ask(LARGE) for _ in range(7)]
        await until(lambda: desk.read() == LARGE_AT_ONCE)

        assert (await desk.ask(b"small")).status == 200
        assert desk.read() == LARGE_AT_ONCE + 1
        assert desk.judged == [b"small"]

        desk.go.set()
        assert [answer.status for answer in await asyncio.gather(*large)] == [200] * 7

    asyncio.run(run())


@pytest.mark.parametrize("missing", [0, 1])
def test_a_review_never_waits_longer_than_its_time_nor_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """Behind one that is judged for long, or with a body of which the last byte never comes."""
    monkeypatch.setattr(intake, "REVIEW_S", 0.05)

    async def run() -> None:
        desk = Desk()
        refused = await asyncio.gather(*(desk.ask(LARGE, missing) for _ in range(6)))

        assert {answer.status for answer in refused} == {503}
        assert {answer.ends for answer in refused} == {True}
        assert b"not answered within 0.05 s; at most 4 reviews of more than 64 KiB" in refused[0].body
        monkeypatch.setattr(intake, "REVIEW_S", 100.0)
        desk.go.set()
        assert (await desk.ask(LARGE)).status == 200
        assert len(desk.judged) <= 2  # who was refused is not judged afterwards

    asyncio.run(run())
