"""The port of the metrics: whoever reaches it takes neither the descriptors nor the time of valved."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
from types import SimpleNamespace

import pytest
from node_world import World
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from valve.v1 import node_pb2

from valved import daemon, scraping
from valved.cli import doctor
from valved.cli.findings import Grade
from valved.cli.status import notes
from valved.config import Config
from valved.metrics import text_of
from valved.rpc.convert import fill
from valved.scraping import MOST_OPEN, Scraped, serve_metrics

PATIENCE_S = 100.0  # ends only a hung test


@pytest.fixture
def served(tmp_path):
    """Runs a story beside the port of a node."""

    def run(story):
        async def body():
            server = await serve_metrics("127.0.0.1", 0, World(tmp_path).node.status)
            try:
                return await asyncio.wait_for(story(server.sockets[0].getsockname()[1]), PATIENCE_S)
            finally:
                server.close()

        return asyncio.run(body())

    return run


async def fetched(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_connections_that_ask_nothing_never_take_the_descriptors_of_valved(served):
    async def story(port):
        before = len(os.listdir("/proc/self/fd"))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_OPEN)]
        answer = await fetched(port)
        for reader, _ in silent[:MOST_OPEN]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        taken = len(os.listdir("/proc/self/fd")) - before - len(silent)
        for _, writer in silent:
            writer.close()
        return answer, taken

    answer, taken = served(story)

    assert answer.startswith(b"HTTP/1.1 200")
    assert taken <= MOST_OPEN + 2


def test_a_caller_that_does_not_read_is_never_waited_for_without_end(served, monkeypatch):
    monkeypatch.setattr(scraping, "ANSWER_S", 0.05)
    monkeypatch.setattr(scraping, "text_of", lambda family: bytes(50_000_000) * (family.name == "valve_mode"))

    async def story(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        while not any(task.get_coro().__name__ == "answer" for task in asyncio.all_tasks()):
            await asyncio.sleep(0)
        while any(task.get_coro().__name__ == "answer" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
        writer.transport.resume_reading()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(50_000_000)
        return True

    assert served(story)


def test_a_flood_of_scrapes_never_takes_more_than_a_share_of_the_loop(monkeypatch):
    now_s, made = [100.0], []

    def slow(*_):
        made.append(now_s[0])
        now_s[0] += 0.03  # with 164 clients
        return b"page"

    family = SimpleNamespace(type="gauge")
    monkeypatch.setattr(scraping, "text_of", slow)
    monkeypatch.setattr(scraping, "NodeCollector", lambda *_: SimpleNamespace(collect=lambda: [family]))
    monkeypatch.setattr(scraping.time, "monotonic", lambda: now_s[0])
    page = Scraped(lambda: None)

    for _ in range(1000):
        assert asyncio.run(page.body()) == b"page"
        now_s[0] += 0.001

    assert len(made) * 0.03 <= 0.11 * (now_s[0] - 100.0)


def test_a_scrape_never_keeps_the_loop_for_more_than_one_family(tmp_path, monkeypatch):
    """A HELLO or a reclaim of a node of many processes would wait for the whole page."""
    written, most = [], 0
    monkeypatch.setattr(scraping, "text_of", lambda family: written.append(family.name) or b"text")

    async def story():
        nonlocal most
        page = asyncio.ensure_future(Scraped(World(tmp_path).node.status).body())
        while not page.done():
            before = len(written)
            await asyncio.sleep(0)
            most = max(most, len(written) - before)

    asyncio.run(story())

    assert len(written) > 30
    assert most == 1


class Families:
    def __init__(self, families):
        self.families = families

    def collect(self):
        return self.families


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -1.5, 0.1, 1e-9, 12345678.0, 1e300, math.inf, -math.inf, math.nan, True, 7]
)
@pytest.mark.parametrize("name", ["chat", 'a "b" \\n \\ \n c', "é 語", ""])
def test_a_family_is_never_written_otherwise_than_by_the_library_of_prometheus(name, value):
    labels = ["service", "name"]
    gauge, counter = (
        kind("valve_x", 'Its "words"', labels=labels) for kind in (GaugeMetricFamily, CounterMetricFamily)
    )
    histogram = HistogramMetricFamily("valve_h", "Words", labels=labels)
    plain = GaugeMetricFamily("valve_plain", "Words", value=value)
    for family in (gauge, counter):
        family.add_metric(["3", name], value)
    histogram.add_metric(["3", name], [("0.1", 1.0), ("+Inf", 2.0)], value)
    families = [gauge, counter, histogram, plain, GaugeMetricFamily("valve_none", "Words", labels=labels)]

    ours = b"".join(map(text_of, families))

    def kept(page):
        return [sorted(re.split("[{,}]", line)) for line in page.decode().splitlines()]  # labels in any order

    assert kept(ours) == kept(generate_latest(Families(families)))


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "no such host", "256.0.0.1"])
def test_a_host_that_is_none_never_costs_more_than_the_metrics(tmp_path, host):
    notes = []
    node = World(tmp_path).node

    async def body():
        config = Config(metrics_host=host, metrics_port=9)
        return await daemon._start_metrics(config, SimpleNamespace(node=node, note=notes.append), None)

    assert asyncio.run(body()) is None
    assert f"no metrics on {host}:9" in notes[0]


def test_metrics_that_nobody_serves_are_never_silent_in_status_and_doctor(tmp_path, monkeypatch):
    """Regression: only the log and `valve events` named the port that another process has."""
    world = World(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        around = SimpleNamespace(node=world.node, note=lambda text: None)
        assert asyncio.run(daemon._start_metrics(Config(metrics_port=port), around, None)) is None
    answer = fill(node_pb2.Status(), world.node.status())
    monkeypatch.setattr(doctor, "ask", lambda folder: answer)

    (said,) = (text.plain for text in notes(answer))
    (found,) = (finding for finding in doctor.check_valved() if finding.verdict is Grade.BROKEN)
    assert f"no metrics on 127.0.0.1:{port}" in said
    assert f"no metrics on 127.0.0.1:{port}" in found.what
