"""What the hook sends from an engine's own thread never waits for a valved that hangs."""

from __future__ import annotations

import socket

import pytest
from valve_hook import packets, wire


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
