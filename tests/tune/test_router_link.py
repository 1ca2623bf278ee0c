"""What stands between a fleet job's trainer and its router, and answers in its place."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from test_fleet import Adds, Router
from valve_tune.serve import link
from valve_tune.serve.fleet import FleetWorker
from valve_tune.serve.folder import FolderError
from valve_tune.serve.link import RouterAway, RouterLink

PAGE = b"<html>gateway</html>"
BATCHES = 6


class Between(BaseHTTPRequestHandler):
    """A proxy. Of each kind of question it answers the first itself, and the second in place of the router's answer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass()

    def do_POST(self) -> None:
        self._pass()

    def _pass(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.path.split("/")[3]
        server.seen[kind] += 1
        turn = server.seen[kind]
        server.heads.append(dict(self.headers))
        status, answer = (0, b"") if turn == 1 else self._routed(body)
        if turn <= 2 and kind != "seen":
            server.act(self, answer)
            self.close_connection = True
            return
        self.say(status, answer)

    def _routed(self, body: bytes) -> tuple[int, bytes]:
        there = http.client.HTTPConnection("127.0.0.1", self.server.router, timeout=60)
        there.request(self.command, self.path, body or None, {"Content-Type": self.headers.get("Content-Type", "")})
        answer = there.getresponse()
        return answer.status, answer.read()

    def say(self, status: int, body: bytes, length: int | None = None, **heads: str) -> None:
        self.send_response(status)
        for name, value in heads.items():
            self.send_header(name.replace("_", "-"), value)
        if length != 0:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def dribble(self, head: bytes) -> None:
        """A byte now and then, until the other side has enough."""
        self.wfile.write(head)
        while not self.server.over.wait(0.02):
            self.wfile.write(b"a")

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the other side has hung up
            super().handle()


ACTS = {
    "a page": lambda it, answer: it.say(200, PAGE),
    "a page that is no error": lambda it, answer: it.say(404, PAGE),
    "a login": lambda it, answer: it.say(401, PAGE),
    "a limit": lambda it, answer: it.say(429, b'{"error": "slow down"}'),
    "a gone page": lambda it, answer: it.say(410, PAGE),
    "a bad gateway": lambda it, answer: it.say(502, PAGE),
    "an empty object": lambda it, answer: it.say(200, b"{}"),
    "a list": lambda it, answer: it.say(200, b"[]"),
    "another object": lambda it, answer: it.say(200, b'{"status": "ok", "version": null, "number": "1"}'),
    "nothing": lambda it, answer: it.say(200, b""),
    "no content": lambda it, answer: it.say(204, b"", 0),
    "gzip": lambda it, answer: it.say(200, gzip.compress(answer), Content_Encoding="gzip"),
    "a redirect": lambda it, answer: it.say(302, PAGE, Location=f"http://127.0.0.1:{it.server.elsewhere}/"),
    "a redirect of a post": lambda it, answer: it.say(307, PAGE, Location=f"http://127.0.0.1:{it.server.elsewhere}/"),
    "cut short": lambda it, answer: it.say(200, answer[:-1], len(answer) + 1),
    "cut short without a length": lambda it, answer: it.say(200, answer[:-1], 0),
    "another blob": lambda it, answer: it.say(200, answer + b" "),
    "hung up": lambda it, answer: None,
    "no answer": lambda it, answer: it.server.over.wait(),
    "a slow head": lambda it, answer: it.dribble(b"HTTP/1.1 200 OK\r\nX: "),
    "a slow body": lambda it, answer: it.dribble(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"),
    "a slow error": lambda it, answer: it.dribble(b"HTTP/1.1 502 Bad\r\nContent-Length: 1000000\r\n\r\n"),
}
SLOW = ("no answer", "a slow head", "a slow body", "a slow error")


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, router: int, act) -> None:
        super().__init__(("127.0.0.1", 0), Between)
        self.router, self.act = router, act
        self.seen: Counter[str] = Counter()
        self.heads: list[dict[str, str]] = []
        self.over = threading.Event()
        self.elsewhere = 9
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def end(self) -> None:
        self.over.set()
        self.shutdown()


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Iterator[Router]:
    one = Router(tmp_path_factory.mktemp("queue"))
    yield one
    one.kill()


@pytest.mark.parametrize("name", ACTS)
def test_whatever_answers_in_place_of_a_router_never_ends_a_trainer_nor_costs_a_micro_batch(name, router, monkeypatch):
    """Of each kind of question: one that the router never saw, and one whose answer was lost."""
    monkeypatch.setattr("valve_tune.serve.patience.FIRST_S", 0.0)
    monkeypatch.setattr("valve_tune.serve.fleet.WAIT_S", 0.0)
    if name in SLOW:
        monkeypatch.setattr(link, "SILENT_S", 0.5)
    proxy, job = Proxy(urlsplit(router.url).port, ACTS[name]), name.replace(" ", "-")

    class Reads(Adds):
        def averaged(self, parts):
            versions.append(json.loads(parts[0][0]))
            return super().averaged(parts)

    versions: list[list[int]] = []
    try:
        offer = {"job": job, "rounds": 1, "round_batches": BATCHES, "tokens": 1, "digest": "d"}
        worker = FleetWorker(
            RouterLink(proxy.url, "key"), Reads(), job=job, name="a", push_steps=2, say=lambda text: None, offer=offer
        )
        assert worker.run() == 1
    finally:
        proxy.end()
    assert sorted(versions[-1]) == list(range(BATCHES))
    for kind in ("job", "join", "take", "push", "publish", "blob"):
        assert proxy.seen[kind] >= 2, kind
    assert all(heads["Authorization"] == "Bearer key" for heads in proxy.heads)


def test_a_token_is_never_sent_on_to_where_an_answer_points():
    there = Proxy(9, ACTS["a page"])
    proxy = Proxy(9, ACTS["a redirect"])
    proxy.elsewhere = there.server_port
    try:
        with pytest.raises(RouterAway, match=f"points to http://127.0.0.1:{there.server_port}/.*name that URL"):
            RouterLink(proxy.url, "key").ask("join", {})
        assert there.heads == []
    finally:
        proxy.end()
        there.end()


@pytest.mark.parametrize("status", [400, 401, 403, 409])
def test_what_the_router_itself_refuses_still_ends_the_trainer_at_once(status):
    refused = json.dumps({"error": {"message": "no", "type": "valve_router", "code": "x"}}).encode()
    proxy = Proxy(9, lambda it, answer: it.say(status, refused))
    try:
        with pytest.raises(FolderError, match=str(status)):
            RouterLink(proxy.url).ask("join", {})
    finally:
        proxy.end()


def test_an_answer_without_an_end_never_fills_the_memory(monkeypatch):
    monkeypatch.setattr(link, "MOST_BYTES", 1 << 20)

    def pour(it, answer) -> None:
        it.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            it.wfile.write(bytes(1 << 16))

    proxy = Proxy(9, pour)
    try:
        with pytest.raises(RouterAway, match="more than 1,048,576 bytes"):
            RouterLink(proxy.url).blob("a" * 64)
    finally:
        proxy.end()
