"""Packets to valved and its answers, on one connection. Only the link's thread waits for an answer."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from valve_hook import wire

ANSWER_S = 5.0  # valved answers within milliseconds, or it is not well
IN_LINE = struct.pack("ll", int(ANSWER_S), 0)  # a struct timeval: for a place in valved's queue, which may be full
MOST_FDS = 64
PART = 1 << 20


class NoDaemon(Exception):
    """No session can be had now; the text says why."""


class NotYet(NoDaemon):
    """The answer is still to come: valved was restarted in the middle of it, or waits for the engine's ranks."""


class Packets:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self.clock_ns = 0
        """What our clock lacks to valved's, since the last answer: this process may have a time namespace, or a preload
        that makes up the time. As follow_clock of the shim (link/link.c) says it."""
        self._seq = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            # By the kernel's time-out: with Python's the kernel would not wait, and would keep no place for us.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, IN_LINE)
            self._socket.connect(str(path))
            self._socket.settimeout(0.0)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: wire.Message, body: bytes) -> int:
        """Never waits: a full socket is an OSError. Any thread may send what has no answer."""
        self._seq = self._seq % 0xFFFFFFFF + 1
        seq = self._seq
        self._socket.send(wire.packet(kind, body, seq, time.monotonic_ns() + self.clock_ns), socket.MSG_DONTWAIT)
        return seq

    def ask(self, kind: wire.Message, body: bytes) -> tuple[int, bytes, list[int]]:
        """The answer: its type, its body, its descriptors."""
        self._wait(select.POLLOUT)
        asked_ns = time.monotonic_ns()
        seq = self.send(kind, body)
        while True:
            self._wait(select.POLLIN)
            raw, fds = self._receive()
            answer, answered, told_ns, rest = wire.split(raw)
            if answered == seq:
                self._follow_clock(asked_ns, told_ns)
                return answer, rest, array.array("i", fds).tolist()
            close(fds)

    def _follow_clock(self, asked_ns: int, told_ns: int) -> None:
        """What valved wrote in between lies in between, by one clock."""
        now_ns = time.monotonic_ns()
        is_ours = not told_ns or asked_ns <= told_ns <= now_ns
        self.clock_ns = 0 if is_ours else told_ns - now_ns

    def drain(self) -> None:
        """What came unasked is of no use here; but it tells a connection that valved closed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                close(self._receive()[1])

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(ANSWER_S * 1000):
            raise TimeoutError("valved does not answer")

    def _receive(self) -> tuple[bytes, list[int]]:
        raw, fds, _, _ = socket.recv_fds(self._socket, wire.LINK_MAX, MOST_FDS)
        if not raw:
            close(fds)
            raise NotYet("valved closed the connection")
        return raw, fds


def bring_table(packets: Packets, body: bytes) -> None:
    """Make the pages of the table that KV_ATTACH asks for: who makes them pays for them. Where that cannot be, the
    answer to KV_ATTACH says why. In parts: other threads of this process run in between."""
    kind, answer, fds = packets.ask(wire.Message.KV_MAKE, body)
    try:
        if kind == wire.Message.KV_TABLE and len(fds) == 1:
            size = wire.KV_TABLE.unpack(answer)[1]
            with mmap.mmap(fds[0], size, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
                for at in range(0, size, PART):
                    pages[at : at + PART : mmap.PAGESIZE]
    finally:
        close(fds)


def refusal(kind: int, body: bytes) -> str:
    """Why a HELLO was not welcome."""
    if kind != wire.Message.REFUSED:
        return f"valved answered HELLO by a message of type {kind}"
    code, low, high, text = wire.REFUSED.unpack(body)
    said = text.split(b"\0", 1)[0].decode("ascii", "replace")
    return f"refused ({code}): {said}; valved speaks abi {low} to {high}, this hook {wire.LINK_ABI}"


def close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
