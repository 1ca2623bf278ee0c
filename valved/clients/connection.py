"""One peer of the link socket: its packets, and the descriptors on them. Never waits for it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from valved.abi.link import MAX_FDS, MAX_PACKET, Body, LinkType, Malformed, Packet, build, parse
from valved.clients.accounts import LinkAccount
from valved.clients.arrivals import LinkCaller
from valved.clients.deaf import Unheard
from valved.clients.dear import LinkLane
from valved.clients.fetching import Lent, is_dead, pidfd_of, split
from valved.clients.outbox import Arrived, Outbox, Unsent, send_on, widen
from valved.machine.callers import CREDENTIALS, has_left
from valved.machine.helpers import Closer
from valved.model.ids import ClientId

if TYPE_CHECKING:
    from valved.clients.server import LinkServer

SCM_MAX_FD = 253  # the kernel's bound: what does not fit into our room it would close itself, on our loop
RECEIVE = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)  # plain numbers: each packet is tested for these
LOST_FDS, CUT_SHORT = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC)
ANCILLARY = socket.CMSG_SPACE(SCM_MAX_FD * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
SO_PASSRIGHTS = 83  # Linux 6.16: off, nobody can send us descriptors


# What a client leaves unread valved pays for, also when the link has ended. The 32 requests of a shim that can wait at
# once have answers of 768 bytes; an order takes 4.4 KiB at most.
UNREAD_BYTES, ORDER_BYTES = 32 << 10, 5 << 10
UNREAD_OF_ALL, UNREAD_LEAST = 16 << 20, 4 << 10  # where there are more than 512 links, and where thousands
FULL_NS, FULL_MOST_NS = 1_000_000, 512_000_000
YOUNG_NS = 10_000_000_000  # all who come back after a restart have told what they hold by then
ORDERS = frozenset({LinkType.KV_ORDER, LinkType.KV_RUNS})  # each has one KV_DONE


class Received(msgspec.Struct, frozen=True, gc=False):
    packet: Packet
    fds: list[int]
    sender: int  # the process that sent it, as the kernel says; 0: it does not
    lent: Lent | None = None  # descriptors that are to be fetched first


class LinkConnection:
    def __init__(self, server: LinkServer, fd: int, caller: LinkCaller) -> None:
        self._server = server
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
        self.caller = caller
        self.pid, self.uid = caller.pid, caller.uid
        self.client: ClientId | None = None
        self.is_open = True
        self.is_online = False
        self.is_fetching = False  # what it lent last: nothing is read meanwhile
        self._ordered, self._answered = 0, 0  # packets that have one answer each, and how many of these have come
        self.was_awaited = False  # as it was let in last
        self.wanted = 0  # packets that cost it nothing
        self._full_ns = FULL_NS  # for which it rested last as it reads nothing
        self._rests_until: asyncio.TimerHandle | None = None
        self.sender = self.pid  # the sender of the last packet: a socket can be passed on, or inherited
        self.belong(caller.lane_account)
        self.lane = LinkLane(server.dear, caller.lane_account, is_awaited=caller.root != 0)
        self.outbox = Outbox(server.loop, sock, lambda why: server.drop_later(self, why), self.lane)

    def belong(self, account: LinkAccount) -> None:
        self.account = account
        self.closer = self._server.closer.of(account)

    @property
    def turn(self) -> tuple[LinkAccount, int]:
        """Whose turn is its own: its account's, and its process's within it."""
        return self.account, self.pid

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = (), arrived: Arrived | None = None
    ) -> bool:
        """As of an outbox. Never waits."""
        if kind in ORDERS:
            self._ordered += 1
            if self._rests_until is not None:
                self._server.go_on(self)
        return self.is_open and self.outbox.send(build(kind, body, seq=seq, sent_ns=time.monotonic_ns()), fds, arrived)

    @property
    def is_awaited(self) -> bool:
        """It owes valved an answer."""
        return self._answered < self._ordered

    @property
    def pays_as_awaited(self) -> bool:
        """Also for what it says behind its answer: that was let in with it."""
        return self.was_awaited or self.is_awaited

    @property
    def is_behind(self) -> bool:
        """Its account has sent descriptors that take long to close. Online work is read all the same."""
        return not self.is_online and self.closer.is_behind

    @property
    def is_readable(self) -> bool:
        """Now, for one more packet."""
        return self.is_open and not (self.is_fetching or self.is_behind or self._is_full())

    def unread(self) -> int:
        """Bytes of the kernel's that lie in its socket."""
        return int(struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)))[0])

    def _is_full(self) -> bool:
        """It asks and does not read. Online work is read all the same; orders it did not ask for."""
        if self.is_online or (unread := self.unread()) <= UNREAD_LEAST:
            return False
        orders = max(0, self._ordered - self._answered)
        most = max(UNREAD_LEAST, min(UNREAD_BYTES, UNREAD_OF_ALL // max(1, self._server.peers)))
        return unread > most + ORDER_BYTES * orders

    def full_ns(self) -> int:
        """How long it rests until it may have read: twice as long each time, as there may be thousands."""
        is_full = self._is_full()
        self._full_ns = min(2 * self._full_ns, FULL_MOST_NS) if is_full else FULL_NS
        return self._full_ns if is_full else 0

    def heard(self, kind: LinkType) -> None:
        """A packet of it is handled next. Answers are free: one that answers nothing ends its link. So is what those
        whom a predecessor knew have to tell again."""
        self._answered += kind is LinkType.KV_DONE
        is_told_again = kind is LinkType.KV_HELD and time.monotonic_ns() - self._server.born_ns < YOUNG_NS
        self.wanted += kind is LinkType.KV_DONE or is_told_again

    def rest(self, seconds: float) -> None:
        """Not read for a while, or until it gets an order; the end of its process is noticed all the same."""
        self._server.loop.remove_reader(self.fileno())
        self._rests_until = self._server.loop.call_later(seconds, self._server.go_on, self)

    def end_rest(self) -> None:
        if self._rests_until is not None:
            self._rests_until.cancel()
            self._rests_until = None

    def receive(self) -> Received | None:
        """One packet and the descriptors on it; None when nothing waits. EOFError at the end."""
        began_ns = time.thread_time_ns()
        try:
            return _receive(self._sock, self.closer)
        finally:
            self.lane.took(began_ns)

    def receive_aside(self) -> Received | None:
        """The same, by a thread of the lane."""
        return _receive(self._sock, self.closer)

    def pidfd(self) -> int:
        """Of the process that connected."""
        return pidfd_of(self._sock)

    def is_dead(self) -> bool:
        """The process that connected has ended: its number may be another's, and a copy of its end is somebody's still.
        Where the kernel cannot tell (before Linux 6.5) it counts as alive."""
        return is_dead(self._sock)

    def has_left(self) -> bool:
        return has_left(self.fileno())

    def open_up(self) -> None:
        """It has said HELLO: room for answers, and it may pass descriptors."""
        widen(self._sock)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)

    def close(self) -> None:
        """The server forgets the peer; its client, if any, is the register's business. The peer hears the end at once;
        the socket itself is closed elsewhere, with what is still queued in it."""
        if not self.is_open:
            return
        self.is_open = False
        self.end_rest()
        self._server.forget(self)
        if self.client is not None and not self.is_online:
            self._server.left_unread(self.account, self.unread())
        unsent = self.outbox.close()
        fds = [fd for _, fds in unsent for fd in fds]
        if self.lane.is_aside:
            last_words = unsent if self.client is None else []  # that it is refused
            self.lane.do(partial(end, self._sock, last_words, fds, self.closer), lambda *_: None)
            return
        began_ns = time.thread_time_ns()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.lane.took(began_ns)
        self.closer.close([*fds, self._sock.detach()])


def end(sock: socket.socket, last_words: list[Unsent], fds: list[int], closer: Closer) -> None:
    """Not on the loop: what waits for it at the other end is for the client to choose. It closes nothing itself: what a
    stranger sent may lie in the socket."""
    try:
        with contextlib.suppress(OSError):
            for packet, passed in last_words:
                send_on(sock, packet, passed)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    finally:
        closer.close([*fds, sock.detach()])


def _receive(sock: socket.socket, closer: Closer) -> Received | None:
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET + 1, ANCILLARY, RECEIVE)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as error:
        raise EOFError from error
    fds, sender = passed(ancillary)
    if flags & LOST_FDS:  # all that can be sent fits: valved itself was out of them
        closer.close(fds)
        if len(fds) > MAX_FDS:
            raise Malformed(f"more than {MAX_FDS} descriptors")  # for which there was room
        raise Unheard
    if flags & CUT_SHORT:
        closer.close(fds)
        raise Malformed("a packet was cut short")
    if not data:
        closer.close(fds)
        raise EOFError
    try:
        plain, lent = split(data)
        if lent is not None and fds:
            raise Malformed("descriptors, and numbers of others")
        packet = parse(plain)
    except Malformed:
        closer.close(fds)
        raise
    return Received(packet, fds, sender, lent)


def passed(ancillary: list[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    """The descriptors on a packet, and who sent it; 0: the kernel does not say."""
    fds: list[int] = []
    sender = 0
    for _, kind, data in ancillary:  # on this kind of socket each is of SOL_SOCKET
        if kind == socket.SCM_CREDENTIALS and len(data) >= CREDENTIALS.size:
            sender = CREDENTIALS.unpack_from(data)[0]
        elif kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds.extend(numbers)
    return fds, sender
