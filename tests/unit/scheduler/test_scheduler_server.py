"""The HTTP server: one write per answer, and no request that harms the next."""

import asyncio
import contextlib
import json
import logging

import pytest
from ports import free_ports
from valve_kube.access import Access
from valve_kube.client import KubeClient
from valve_scheduler.extender.leadership import Leadership
from valve_scheduler.extender.service import ExtenderService, ExtenderSettings
from valve_scheduler.probes import Probes
from valve_scheduler.server import _MOST_CONNECTIONS, Answer, serve, text_answer


async def handler(method: str, path: str, body: bytes) -> Answer:
    if path == "/raise":
        raise RuntimeError("a bug")
    return text_answer(f"{method} {path} {len(body)}")


def talk(*pieces: bytes) -> bytes:
    """What the server sends until it closes, for pieces that arrive one after another."""

    async def run() -> bytes:
        server = await serve(handler, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        server.close()

        return answer

    return asyncio.run(run())


def test_requests_on_one_connection_are_answered_in_order_with_their_length() -> None:
    answer = talk(b"GET /a HTTP/1.1\r\n\r\nPOST /b?x=1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")

    heads = answer.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [head.split(b"\r\n\r\n")[1] for head in heads] == [b"GET /a 0\n", b"POST /b 3\n"]
    assert all(b"Content-Length: 9\r\n" in head or b"Content-Length: 10\r\n" in head for head in heads)


def test_a_chunked_body_is_put_together() -> None:
    head = b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert b"POST /b 5\n" in talk(head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")


def test_a_failing_handler_costs_its_own_request_only() -> None:
    answer = talk(b"GET /raise HTTP/1.1\r\n\r\nGET /a HTTP/1.1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"GET /a 0\n")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"GET /a HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
        b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc",
        b"GET /" + b"a" * 70_000,
    ],
)
def test_what_is_not_http_closes_the_connection_without_an_answer(garbage: bytes) -> None:
    assert talk(garbage) == b""


def test_a_body_is_never_kept_beyond_its_limit_however_long_a_chunk_is_said_to_be() -> None:
    """Every pod reaches the ports of probes and webhook: one chunk of a terabyte filled the process's memory."""

    async def run() -> bytes:
        probes = await Probes(list).serve("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*probes.sockets[0].getsockname()[:2])
        writer.write(b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n")
        answer = await reader.read()  # to its end: the server waits for no more of it
        writer.close()
        probes.close()
        return answer

    assert asyncio.run(run()) == b""


def test_whoever_connects_and_says_nothing_never_keeps_others_out() -> None:
    async def run() -> tuple[bytes, int]:
        server = await serve(handler, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        silent = [await asyncio.open_connection(*address) for _ in range(_MOST_CONNECTIONS + 20)]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /a HTTP/1.1\r\n\r\n")
        answer = await reader.readuntil(b"GET /a 0\n")
        ended = 0
        for one, _ in silent[:21]:
            with contextlib.suppress(ConnectionError):
                ended += not await one.read()
                continue
            ended += 1
        for _, one in (*silent, (reader, writer)):
            one.close()
        server.close()
        return answer, ended

    answer, ended = asyncio.run(run())

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert ended == 21  # those that had been silent for longest


def test_whoever_opens_many_connections_never_ends_those_of_another_peer() -> None:
    """Any pod could end the kept connections of the API server, with the reviews that were under way on them."""

    async def run() -> bytes:
        server = await serve(handler, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
        writer.write(b"GET /a HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"GET /a 0\n")
        flood = [await asyncio.open_connection(*address) for _ in range(_MOST_CONNECTIONS + 20)]
        await flood[0][0].read()  # the first of them has ended
        writer.write(b"GET /b HTTP/1.1\r\n\r\n")
        answer = await reader.readuntil(b"GET /b 0\n")
        for _, one in (*flood, (reader, writer)):
            one.close()
        server.close()
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")


async def knock(port: int) -> None:
    """OSError while nobody listens there."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


def test_bindings_that_wait_for_the_api_server_never_end_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """kube-scheduler has one connection for each, however many there are."""
    count = _MOST_CONNECTIONS + 40

    async def run() -> list[bytes]:
        extender, arrived, go = service(), [], asyncio.Event()

        async def bind(method: str, path: str, body: bytes) -> Answer:
            arrived.append(path)
            await go.wait()
            return text_answer("bound")

        monkeypatch.setattr(extender, "answer", bind)
        port, probes = free_ports(2)
        monkeypatch.setattr(extender, "_settings", ExtenderSettings(port=port, probe_port=probes))
        running = asyncio.create_task(extender.run())

        async def call() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", extender._settings.port)
            writer.write(b"POST /scheduler/bind HTTP/1.1\r\n\r\n")
            answer = await reader.read(12)
            writer.close()
            return answer

        while await asyncio.gather(knock(extender._settings.port), return_exceptions=True) != [None]:
            await asyncio.sleep(0.01)
        calls = [asyncio.create_task(call()) for _ in range(count)]
        while len(arrived) < count:
            await asyncio.sleep(0.01)
        go.set()
        answers = await asyncio.gather(*calls)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return answers

    assert set(asyncio.run(run())) == {b"HTTP/1.1 200"}


def test_the_end_of_a_process_with_open_connections_never_looks_like_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each kept connection was a traceback in the log of every ordinary stop, and hid those of real failures."""

    async def run() -> None:
        server = await serve(handler, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"GET /a HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"GET /a 0\n")
        kept.append(writer)

    kept: list[asyncio.StreamWriter] = []
    asyncio.run(run())

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def service(hostname: str = "") -> ExtenderService:
    access = Access(host="127.0.0.1", port=1, tls=None, authorization=str)
    return ExtenderService(KubeClient(access), ExtenderSettings(hostname=hostname))


def answer(path: str, body: bytes = b"{}", method: str = "POST") -> Answer:
    return asyncio.run(service().answer(method, path, body))


def test_calls_before_the_first_list_are_503_and_readyz_names_what_is_missing() -> None:
    assert answer("/scheduler/filter").status == 503
    assert json.loads(answer("/scheduler/bind").body)["Error"].startswith("valve: this replica does not lead")

    probe = asyncio.run(service().probes.answer("GET", "/readyz", b""))

    assert probe.status == 503
    assert b"/api/v1/pods" in probe.body


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"null", b"\xff"])
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    ready = service()
    for view in ready.views:
        view._listed.set()

    assert asyncio.run(ready.answer("POST", "/scheduler/filter", body)).status == 400


def test_unknown_calls_are_404() -> None:
    assert answer("/scheduler/preempt").status == 404
    assert answer("/scheduler/filter", method="GET").status == 404


def test_metrics_are_served_with_their_descriptions() -> None:
    probe = asyncio.run(service().probes.answer("GET", "/metrics", b""))

    assert b"# HELP valve_extender_request_seconds Time to answer" in probe.body
    assert b"valve_extender_ready 0.0" in probe.body


def lease(holder: str) -> dict[str, dict[str, str]]:
    return {"spec": {"holderIdentity": holder}}


def test_each_gain_of_the_lease_asks_for_one_new_list() -> None:
    gains: list[str] = []
    leadership = Leadership("pod-a", lambda: gains.append("gain"))

    holders = ["pod-b_1", "pod-a_1", "pod-a_1", "pod-a_2", "pod-b_2"]
    leads = []
    for holder in holders:
        leadership.put(lease(holder))
        leads.append(leadership.leads)

    assert leads == [False, True, True, True, False]
    assert len(gains) == 2  # a restarted scheduler of our own pod is a new leader


@pytest.mark.parametrize("holder", ["", "pod-a", "pod-ab_1", "xpod-a_1"])
def test_a_lease_of_someone_else_never_leads(holder: str) -> None:
    leadership = Leadership("pod-a", lambda: None)

    leadership.put(lease(holder))

    assert not leadership.leads
