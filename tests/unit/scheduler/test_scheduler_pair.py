"""The liveness of kube-scheduler: no leader stays without its extender."""

import asyncio
import ssl
from datetime import datetime, timezone
from pathlib import Path

import pytest
from valve_scheduler.extender.pair import PAIR_PATH, Pair
from valve_scheduler.probes import Probes
from valve_scheduler.server import Answer, serve, text_answer
from valve_scheduler.webhook.certificates import renew


def ask(tls: ssl.SSLContext | None, status: int, missing: list[str], waited_s: float) -> Answer:
    """The probe's answer; without `tls` no kube-scheduler listens."""

    async def answer(method: str, path: str, body: bytes) -> Answer:
        assert (method, path) == ("GET", "/healthz")
        return text_answer("", status)

    async def run() -> Answer:
        server = await serve(answer, "127.0.0.1", 0, tls)
        port = server.sockets[0].getsockname()[1]
        if tls is None:
            server.close()
            await server.wait_closed()
        clock = [0.0]
        pair = Pair(lambda: missing, port, lambda: clock[0])
        clock[0] = waited_s
        try:
            return await Probes(lambda: missing, checks={PAIR_PATH: pair.failure}).answer("GET", PAIR_PATH, b"")
        finally:
            server.close()

    return asyncio.run(run())


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """A certificate that nobody knows, as kube-scheduler makes one."""
    made = renew(None, b"", ["localhost"], datetime.now(timezone.utc))
    (tmp_path / "crt").write_bytes(made.certificate)
    (tmp_path / "key").write_bytes(made.key)
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    return found


def test_a_pair_that_is_well_lives(tls: ssl.SSLContext) -> None:
    assert ask(tls, 200, [], 0.0).status == 200


def test_a_scheduler_never_leads_on_without_an_extender_that_sees_the_cluster(tls: ssl.SSLContext) -> None:
    """The first list may take a minute; after that the other replica is the better leader."""
    assert ask(tls, 200, ["/api/v1/pods"], 59.0).status == 200

    late = ask(tls, 200, ["/api/v1/pods"], 61.0)
    assert (late.status, b"/api/v1/pods" in late.body) == (503, True)


@pytest.mark.parametrize("status", [500, None])
def test_a_scheduler_that_fails_itself_is_never_called_alive(tls: ssl.SSLContext, status: int | None) -> None:
    assert ask(tls if status else None, status or 0, [], 0.0).status == 503
