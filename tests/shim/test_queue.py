"""The kernel's queue before valved: while others keep it full, a shim keeps its place."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

from fake_daemon import LONG_S, until

CONNECT = "42"  # of x86-64


def calls_that_wait(pid):
    """The system calls in which threads of a process wait."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add((thread / "syscall").read_text().split()[0])
    return found


def peer_of(sock):
    return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def test_a_shim_that_finds_the_queue_full_never_gives_up_its_place(world):
    """The kernel wakes those that wait in connect() in their order. Who only asks finds the queue full again."""
    path = world.folder / "link.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen(0)
        while True:  # until there is no room
            other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            if other.connect_ex(str(path)):
                break
        puppet = world.puppet(role="offline")
        puppet.load()
        puppet.cu("cuInit", 0)  # the thread that registers gives up after a while; the session goes on

        until(lambda: CONNECT in calls_that_wait(puppet.process.pid), "a thread waits in connect()")

        listener.settimeout(LONG_S)
        while True:
            taken = stack.enter_context(listener.accept()[0])
            taken.settimeout(LONG_S)
            if peer_of(taken) == puppet.process.pid:
                assert taken.recv(4096)
                break
