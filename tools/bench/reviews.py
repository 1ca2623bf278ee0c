"""What a pod of megabytes costs the webhook: its processor time, its memory, and the wait of other pods.

No control plane takes part: reviews as an API server sends them, of pods that a tenant may write. `webhook-review`
judges them one after another; for the other rows a webhook of its own process listens, without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timezone
from typing import Any

from valve_kube import names, wire
from valve_kube.access import Access
from valve_kube.client import KubeClient
from valve_scheduler.server import serve_exchanges
from valve_scheduler.webhook.admission import AdmissionSettings
from valve_scheduler.webhook.intake import COLLECT_AFTER
from valve_scheduler.webhook.service import Webhook, WebhookSettings
from valve_tools.bench.clustersize import peak_mib
from valve_tools.bench.row import Row, row_of

Json = dict[str, Any]
REVIEWS = 20
REVIEW_MS = 150.0
"""Of a megabyte: four such in line are answered in less than a second."""
LIMIT_MIB = 192.0
"""Of the webhook in the chart's values."""
AT_ONCE = 8
BESIDE_S, BESIDE_MS = 20.0, 200.0
SMALL_EVERY_S = 0.02
ENGINE = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400"}


def _variables(total: int) -> list[Json]:
    return [{"name": f"NAME_{number}", "value": "v" * 20} for number in range(total // 53)]


def _pod(role: str, resource: str, containers: int, total: int) -> Json:
    """Of so many bytes as JSON, nearly all of them small variables."""
    each = [
        {
            "name": f"c{number}",
            "image": "registry.example.com/engine:1",
            "resources": {"limits": {resource: "1"} if number == 0 else {}},
            "env": _variables(total // containers),
        }
        for number in range(containers)
    ]
    labels = {names.ROLE: role}
    return {"metadata": {"name": "p", "namespace": "a", "labels": labels}, "spec": {"containers": each}}


def review(role: str, containers: int, total: int) -> bytes:
    pod = _pod(role, names.RESOURCE if role == names.OFFLINE else names.ONLINE_RESOURCE, containers, total)
    request = {"uid": "u", "operation": "CREATE", "userInfo": {"username": "t"}, "object": pod, "oldObject": None}
    return json.dumps({"kind": "AdmissionReview", "request": request}, separators=(",", ":")).encode()


MEGABYTE, MOST = 1_000_000, 3_000_000
SHAPES = {
    f"{role}, {size // MEGABYTE} MB in {containers} container{'s' * (containers > 1)}": (role, containers, size)
    for role in (names.OFFLINE, names.ONLINE)
    for containers, size in ((1, MEGABYTE), (256, MEGABYTE), (1, MOST))
}


def _webhook() -> Webhook:
    """As its process has it."""
    gc.set_threshold(COLLECT_AFTER)
    client = KubeClient(Access(host="", port=0, tls=None, authorization=str))
    settings = WebhookSettings(admission=AdmissionSettings(offline_env=ENGINE))
    return Webhook(client, settings, lambda: datetime.now(timezone.utc))


def _review() -> Iterable[Row]:
    webhook = _webhook()
    for shape, (role, containers, size) in SHAPES.items():
        raw, took = review(role, containers, size), []
        for _ in range(REVIEWS):
            begun_s = time.thread_time()
            answer = webhook.judge(f"/mutate/{role}", raw)
            took.append((time.thread_time() - begun_s) * 1e3)
        if b'"allowed":true' not in answer.body:
            raise AssertionError(answer.body[:200])
        note = f"CPU time; {len(raw):,} bytes asked, {len(answer.body):,} answered"
        yield row_of("webhook-review", shape, "ms", took, REVIEW_MS * size / MEGABYTE, note=note)


async def listen() -> None:
    """A webhook that says its port and goes on until it is ended."""
    server = await serve_exchanges(_webhook().intake.exchange, "127.0.0.1", 0, None)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[tuple[int, int]]:
    """(pid, port) of a webhook in a process of its own."""
    code = "import asyncio; from valve_tools.bench.reviews import listen; asyncio.run(listen())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.sep)
    try:
        assert process.stdout is not None
        yield process.pid, int(await asyncio.to_thread(process.stdout.readline))
    finally:
        process.kill()
        process.wait()


async def _asked(port: int, role: str, raw: bytes) -> tuple[int, float]:
    """Status and milliseconds of one review on a connection of its own."""
    begun_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(wire.message(f"POST /mutate/{role} HTTP/1.1", {"Host": "webhook"}, raw))
        head = await wire.read_head(reader)
        assert head is not None
        await wire.read_body(reader, head)
        return int(head.start[1]), (time.perf_counter() - begun_s) * 1e3
    finally:
        writer.close()


async def _peaks() -> tuple[float, float, list[int]]:
    """Of the process before any review, and after eight reviews of three megabytes at once; their answers."""
    async with _listening() as (pid, port):
        before = peak_mib(pid)
        raw = review(names.OFFLINE, 1, MOST)
        answers = await asyncio.gather(*(_asked(port, names.OFFLINE, raw) for _ in range(AT_ONCE)))
        return before, peak_mib(pid), [status for status, _ in answers]


def _memory() -> Iterable[Row]:
    before, peak, statuses = asyncio.run(_peaks())
    note = f"{before:.0f} before; {AT_ONCE} of 3 MB at once, {statuses.count(200)} answered, the others refused in time"
    yield row_of("webhook-memory", "peak", "MiB", [peak], LIMIT_MIB, judged="max", note=note)


async def _beside() -> tuple[list[float], list[float], int]:
    """Milliseconds of small reviews while four clients send a megabyte each without a pause; of the large ones those
    that were answered, and how many were refused."""
    small_raw, large_raw = review(names.ONLINE, 1, 4_000), review(names.OFFLINE, 1, MEGABYTE)
    small: list[float] = []
    large: list[tuple[int, float]] = []
    async with _listening() as (_, port):
        end_s = time.perf_counter() + BESIDE_S

        async def crowd() -> None:
            while time.perf_counter() < end_s:
                large.append(await _asked(port, names.OFFLINE, large_raw))

        crowds = [asyncio.create_task(crowd()) for _ in range(4)]
        while time.perf_counter() < end_s:
            small.append((await _asked(port, names.ONLINE, small_raw))[1])
            await asyncio.sleep(SMALL_EVERY_S)
        await asyncio.gather(*crowds)
    answered = [took for status, took in large if status == 200]
    return small, answered, len(large) - len(answered)


def _beside_rows() -> Iterable[Row]:
    small, answered, refused = asyncio.run(_beside())
    note = f"beside {len(answered)} of 1 MB that were answered and {refused} that were refused in {BESIDE_S:g} s"
    yield row_of("webhook-beside", "a review of 4 KB", "ms", small, BESIDE_MS, note=note)
    yield row_of("webhook-beside", "a review of 1 MB, four at once", "ms", answered, None)


BENCHES = {"webhook-review": _review, "webhook-memory": _memory, "webhook-beside": _beside_rows}
