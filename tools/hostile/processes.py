"""Hostile processes for bench hello (tools/bench/hello.py): each does one thing, again and again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable

from valve_tools.hostile.kv_floods import FloodsKv
from valve_tools.hostile.link_ends import (
    NOBODY,
    OFFLINE_HELLO,
    SHORT_S,
    Attack,
    Says,
    connect,
    packet_of,
    welcomed,
)
from valve_tools.hostile.remains import KeepsAnswers, KeepsBells, KeepsRefusals
from valve_tools.hostile.strange_ends import IsOdd, is_another_since, leaves_words
from valve_tools.hostile.threads import KeepsDeadThreads, die_with_parent

from valved.abi import link
from valved.abi.link import LinkType

DEPTH = 60
WATCHES, EPOLLS = 200_000, 20
STORM = 100
NESTED = 400  # sockets in each other
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x80


def _says_hello(path: str) -> None:
    with connect(path) as sock:
        sock.send(OFFLINE_HELLO)
        sock.recv(link.MAX_PACKET)


def _goes_at_once(path: str) -> None:
    connect(path).close()


def _speaks_and_goes(path: str) -> None:
    with connect(path) as sock:
        sock.send(OFFLINE_HELLO)


def _says_half(path: str) -> None:
    with connect(path) as sock:
        sock.send(OFFLINE_HELLO[:-1])
        sock.recv(1)


def _says_much(path: str) -> None:
    with connect(path) as sock:
        while True:
            sock.send(bytes(100_000))


def _sends_files(path: str) -> None:
    with connect(path) as sock:
        socket.send_fds(sock, [OFFLINE_HELLO], [0] * 253)
        sock.recv(1)


def _forks(path: str) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            _says_hello(path)
        os._exit(0)
    os.waitpid(pid, 0)


class _Holds:
    """Keeps what it opened, up to a bound, and then begins anew."""

    def __init__(self, most: int, packet: bytes = b"") -> None:
        self._most = most
        self.packet_of = packet
        self._held: list[socket.socket] = []

    def __call__(self, path: str) -> None:
        if len(self._held) >= self._most:
            self._held.pop(0).close()
        self._held.append(connect(path))
        if self.packet_of:
            self._held[-1].send(self.packet_of)


# Welcomed ones


def _asks(sock: socket.socket) -> None:
    """And never reads the answer."""
    sock.send(packet_of(LinkType.SCHEDULE_WAIT))


def _peeks(sock: socket.socket) -> None:
    sock.send(packet_of(LinkType.SCHEDULE_WAIT))
    sock.recv(link.MAX_PACKET, socket.MSG_PEEK)


def _sends_odd_files(sock: socket.socket) -> None:
    odd: list[Callable[[], int]] = [
        select.epoll().fileno,
        sock.fileno,
        lambda: os.pidfd_open(os.getpid()),
        lambda: os.memfd_create("x"),
    ]
    mine = [os.dup(kind()) for kind in odd]
    try:
        socket.send_fds(sock, [packet_of(LinkType.KV_HELD)], mine * 16)
    finally:
        for fd in mine:
            os.close(fd)


def _sends_sockets_in_sockets(sock: socket.socket) -> None:
    """Their last close is valved's, and the kernel looks for cycles among them then."""
    last, spare = socket.socketpair()
    for _ in range(NESTED):
        one, other = socket.socketpair()
        socket.send_fds(one, [b"x"], [last.fileno(), other.fileno()])
        last.close()
        other.close()
        last = one
    spare.close()
    try:
        socket.send_fds(sock, [packet_of(LinkType.RM_CLIENT)], [last.fileno()])
    finally:
        last.close()


def _lends(numbers: int, first: int) -> Callable[[socket.socket], object]:
    kind = LinkType.KV_HELD if numbers > 1 else LinkType.RM_CLIENT

    def lend(sock: socket.socket) -> None:
        lent = struct.pack(f"<{numbers}iII", *([first] * numbers), 0, numbers)
        sock.send(packet_of(kind, lent=lent))
        sock.recv(link.MAX_PACKET)

    return lend


class _IsWatched:
    """Whoever reads what it says wakes 200,000 watches."""

    def __init__(self) -> None:
        self._epolls: list[select.epoll] = []
        self._says = Says(self._say)
        self._watched: socket.socket | None = None

    def _say(self, sock: socket.socket) -> None:
        if self._watched is not sock:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            self._epolls = [select.epoll() for _ in range(EPOLLS)]
            copies = [os.dup(sock.fileno()) for _ in range(WATCHES // EPOLLS)]
            for epoll in self._epolls:
                for fd in copies:
                    epoll.register(fd, select.EPOLLOUT | select.EPOLLET)
            for fd in copies:  # the watches stay for as long as the file is open
                os.close(fd)
            self._watched = sock
        sock.send(packet_of(LinkType.SCHEDULE_DONE))

    def __call__(self, path: str) -> None:
        self._says(path)


def _lends_and(then: Callable[[], object]) -> Attack:
    """What is lent is fetched from a process that is gone, is another program, or stands still by then."""

    def attack(path: str) -> None:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent)
            with contextlib.suppress(OSError):
                sock = welcomed(path)
                os.set_inheritable(sock.fileno(), True)
                sock.send(packet_of(LinkType.RM_CLIENT, lent=struct.pack("<iII", sock.fileno(), 0, 1)))
                then()
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    return attack


# Others


def _hands_on(path: str) -> None:
    """A connection of this user's says HELLO by a process of another."""
    with connect(path) as sock:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.setuid(NOBODY)
                sock.send(OFFLINE_HELLO)
            os._exit(0)
        os.waitpid(pid, 0)
        sock.settimeout(SHORT_S)
        sock.recv(1)


def _says_who_it_is_not(path: str) -> None:
    """The kernel lets root say any number."""
    with connect(path) as sock:
        who = struct.pack("3i", 1, 0, 0)
        sock.sendmsg([OFFLINE_HELLO], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
        sock.recv(1)


def _shuts_half(path: str) -> None:
    for how in (socket.SHUT_RD, socket.SHUT_WR):
        with connect(path) as sock:
            sock.send(OFFLINE_HELLO)
            sock.shutdown(how)
            sock.settimeout(SHORT_S)
            sock.recv(1)


def _stands_still(path: str) -> None:
    """Welcomed, and stopped for as long as it lives."""
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(parent)  # also while it is stopped
        with contextlib.suppress(OSError):
            _asks(welcomed(path))
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _lives_elsewhere(path: str) -> None:
    """In namespaces of its own."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            _unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWTIME)
            _forks(path)
        os._exit(0)
    os.waitpid(pid, 0)


def _unshare(what: int) -> None:
    ctypes.CDLL(None).unshare(what)


def _storms(path: str) -> None:
    """Many new processes connect at once, speak and end."""
    begin, go = os.pipe()
    born = []
    for _ in range(STORM):
        if (pid := os.fork()) == 0:
            os.close(go)
            os.read(begin, 1)
            with contextlib.suppress(OSError):
                _speaks_and_goes(path)
            os._exit(0)
        born.append(pid)
    os.close(begin)
    os.close(go)
    for pid in born:
        os.waitpid(pid, 0)


def _nests_sockets(_path: str) -> None:
    """Has many sockets under way that nobody can reach: the kernel looks for them, under a lock that all share."""
    first = last = socket.socketpair()
    for _number in range(NESTED):
        pair = socket.socketpair()
        socket.send_fds(last[0], [b"x"], [pair[1].fileno()])
        last = pair
    socket.send_fds(last[0], [b"x"], [first[1].fileno()])


# Name: what one of them does, how many processes, of which user, below how many ancestors
ATTACKS: dict[str, tuple[Attack, int, int, int]] = {
    "nobody": (_says_hello, 0, 0, 0),
    "a flooder": (_says_hello, 1, 0, 0),
    "a flooder with 60 ancestors": (_says_hello, 1, 0, DEPTH),
    "50 processes of root": (_says_hello, 50, 0, 0),
    "50 processes of a user": (_says_hello, 50, NOBODY, 0),
    "new processes without end": (_forks, 2, 0, 0),
    "fast reconnects": (_goes_at_once, 1, 0, 0),
    "HELLO without waiting": (_speaks_and_goes, 1, 0, 0),
    "HELLO and then nothing": (_Holds(32, OFFLINE_HELLO), 4, 0, 0),
    "silent connections": (_Holds(200), 4, 0, 0),
    "half a HELLO": (_says_half, 2, 0, 0),
    "huge packets": (_says_much, 2, 0, 0),
    "many descriptors": (_sends_files, 2, 0, 0),
    "answers that nobody reads": (Says(_asks), 4, 0, 0),
    "answers that are peeked at": (Says(_peeks), 4, 0, 0),
    "descriptors of odd kinds": (Says(_sends_odd_files), 2, 0, 0),
    "sockets in sockets, sent to valved": (Says(_sends_sockets_in_sockets), 2, 0, 0),
    "sockets in sockets": (_nests_sockets, 4, 0, 0),
    "KV ranges without end": (FloodsKv(ranges=True), 1, 0, 0),
    "needs of a hook without end": (FloodsKv(needs=True), 1, 0, 0),
    "three processes with both": (FloodsKv(ranges=True, needs=True), 3, 0, 0),
    "numbers that are not open": (Says(_lends(1, 1 << 20)), 4, 0, 0),
    "64 numbers at once": (Says(_lends(link.MAX_FDS, 0)), 4, 0, 0),
    "200,000 epoll watches": (_IsWatched(), 1, 0, 0),
    "another's credentials": (_says_who_it_is_not, 2, 0, 0),
    "halves that are shut": (_shuts_half, 2, 0, 0),
    "processes that are stopped": (_stands_still, 2, 0, 0),
    "processes of other namespaces": (_lives_elsewhere, 2, 0, 0),
    "numbers of a process that ends": (_lends_and(lambda: None), 2, 0, 0),
    "numbers of a process that execs": (_lends_and(lambda: os.execv("/bin/true", ["true"])), 2, 0, 0),
    "numbers of a process that is stopped": (_lends_and(lambda: os.kill(os.getpid(), signal.SIGSTOP)), 2, 0, 0),
    "links of another user": (_hands_on, 2, 0, 0),
    "odd options of a socket": (IsOdd(), 4, 0, 0),
    "processes that change their user": (is_another_since, 2, 0, 0),
    "words of a process that has ended": (leaves_words, 2, 0, 0),
    "2,000 dead threads": (KeepsDeadThreads(_says_hello), 1, 0, 0),
    "100 processes at once": (_storms, 1, 0, 0),
    "bells of links that have ended": (KeepsBells(), 2, 0, 0),
    "answers of links that have ended": (KeepsAnswers(), 2, 0, 0),
    "refusals that nobody reads": (KeepsRefusals(), 2, 0, 0),
}
