"""What the hook sends from an engine's own thread never waits for a valved that hangs; and by whose clock it speaks."""

from __future__ import annotations

import socket
import struct
import time
from types import SimpleNamespace

import pytest
from kv_node import wait_for
from valve_hook import packets, shared, wire
from valve_hook.link import Link

S = 1_000_000_000


def fill(link):
    for _ in range(100_000):
        link.send(wire.Message.KV_NEED, wire.KV_NEED.pack(1))


def test_a_valved_that_reads_nothing_never_keeps_an_engine_waiting(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "link.sock"))
        listener.listen()
        link = packets.Packets(tmp_path / "link.sock")
        try:
            with pytest.raises(BlockingIOError):  # one with a time-out waits, and says TimeoutError
                fill(link)
        finally:
            link.close()


def test_an_answer_that_never_comes_never_keeps_the_link_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(packets, "ANSWER_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "link.sock"))
        listener.listen()
        link = packets.Packets(tmp_path / "link.sock")
        try:
            with pytest.raises(TimeoutError):
                link.ask(wire.Message.HELLO, b"")
        finally:
            link.close()


@pytest.mark.parametrize("share", [1.0, -0.5, 0.0], ids=["ahead", "behind", "the same"])
def test_an_engine_with_another_clock_never_speaks_to_valved_by_it(node, monkeypatch, share):
    """As in a time namespace. Its open requests would never be believed, or for ever; granted time would never end."""
    began_ns, ask_ns = time.monotonic_ns(), 60 * S
    shift_ns = int(share * began_ns)  # no clock shows less than 0, however short this machine is up
    clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + shift_ns)
    for module in (packets, shared):
        monkeypatch.setattr(module, "time", clock)
    link = Link(build="test", path=node.path)
    link.start()
    try:
        wait_for(lambda: link._packets is not None, "the hook is connected")  # after that it says what it needs
        link.lifecycle.tell(1, 0, 0)
        assert began_ns <= node.region()["hint_ns"] <= time.monotonic_ns()

        now_ns = clock.monotonic_ns()
        link.grant.ask(now_ns + ask_ns)
        link.grant.stepped(now_ns, now_ns)
        until_ns, *step = struct.unpack_from("<QQQ", node._region, wire.REGION_GRANT_UNTIL_NS)
        assert began_ns <= until_ns - ask_ns <= time.monotonic_ns()
        assert all(began_ns <= one_ns <= time.monotonic_ns() for one_ns in step)
        link.grant.ask(0)
        assert struct.unpack_from("<Q", node._region, wire.REGION_GRANT_UNTIL_NS) == (0,), "at once"

        link.need(1)
        wait_for(lambda: node.needs, "it has rung")
        assert began_ns <= node.sent_ns <= time.monotonic_ns()
    finally:
        link.close()
