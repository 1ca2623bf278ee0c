"""The link socket: accept, read, write, close; nothing here knows what a message means.

Everything is non-blocking and bounded: a peer is read a few packets at a time, and no longer than its share of the loop
(turns.py); one that does not read is dropped after a while (outbox.py), one that says nothing likewise, and one
malformed packet ends its connection. What strangers sent is never closed here: close() may take as long as they like.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import resource
import socket
import struct
import time
from pathlib import Path

from valved.abi.link import (
    MAX_FDS,
    MAX_PACKET,
    Body,
    Hello,
    LinkType,
    Malformed,
    Packet,
    Refusal,
    RefusedMessage,
    build,
    parse,
)
from valved.clients.outbox import Arrived, Outbox, widen
from valved.clients.register import Register
from valved.clients.turns import Knocks, Turns
from valved.fds import Fds
from valved.machine.helpers import Closer
from valved.model.ids import ClientId
from valved.paths import CLIENT_FOLDER

BACKLOG = 512
PACKETS_AT_ONCE = 32  # per readiness of one peer
TURN_NS = 5_000_000  # and no longer than this, if each of them takes its time
ACCEPTS_AT_ONCE = 64
PENDING_PER_PROCESS = 8  # connections that have not said HELLO yet; the oldest makes room
PENDING = 512
KEPT_FDS = 0.2  # share of the descriptors that only online processes get; the kernel gives out the lowest number first
BEHIND_S = (
    0.05  # while descriptors pile up that nobody can close, only connections with a HELLO of an online role speak
)
SCM_MAX_FD = 253  # the kernel's bound: what does not fit into our room it would close itself, on our loop
CREDENTIALS = struct.Struct("3i")
RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
ANCILLARY = socket.CMSG_SPACE(SCM_MAX_FD * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
_SO_PASSRIGHTS = 83  # Linux 6.16: off, nobody can send us descriptors
FDS_MOST = {
    LinkType.RM_CLIENT: 1,
    LinkType.KV_HELD: MAX_FDS,
    LinkType.KV_DONE: MAX_FDS,
    LinkType.KV_SCRATCH: 1,
}  # else none
FROM_CLIENT = frozenset(
    {
        LinkType.RM_CLIENT,
        LinkType.CHANNEL_ADD,
        LinkType.CHANNEL_DEL,
        LinkType.SCHEDULE_WAIT,
        LinkType.SCHEDULE_DONE,
        LinkType.NOTE,
        LinkType.KV_RANGE,
        LinkType.KV_RANGE_DEL,
        LinkType.KV_HELD,
        LinkType.KV_PIN,
        LinkType.KV_DONE,
        LinkType.KV_LAYOUT,
        LinkType.KV_ATTACH,
        LinkType.KV_NEED,
        LinkType.KV_STEP,
        LinkType.KV_SCRATCH,
    }
)


class LinkConnection:
    """One accepted peer."""

    def __init__(self, server: LinkServer, sock: socket.socket, pid: int, uid: int) -> None:
        self._server = server
        self._sock = sock
        self.pid, self.uid = pid, uid
        self.client: ClientId | None = None
        self.is_open = True
        self.is_online = False
        self.sender = self.pid  # the sender of the last packet: a socket can be passed on, or inherited
        self.outbox = Outbox(server.loop, sock, lambda why: server.drop_later(self, why))
        widen(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = (), arrived: Arrived | None = None
    ) -> bool:
        """As of an outbox. Never waits."""
        return self.is_open and self.outbox.send(build(kind, body, seq=seq, sent_ns=time.monotonic_ns()), fds, arrived)

    def idle_fd(self) -> int:
        """The socket, while nothing waits to be sent; else -1. The caller duplicates it."""
        return self._sock.fileno() if self.is_open and self.outbox.is_empty else -1

    def receive(self) -> tuple[bytes, list[int]] | None:
        """One packet and the descriptors on it; None when nothing waits. EOFError at the end."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(MAX_PACKET + 1, ANCILLARY, RECEIVE)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise EOFError from error
        fds = _descriptors(ancillary)
        self.sender = _sender(ancillary, self.sender)
        if flags & socket.MSG_CTRUNC:  # all that can be sent fits: valved itself was out of them
            self._server.closer.close(fds)
            raise EOFError("valved is out of descriptors")
        if flags & socket.MSG_TRUNC:
            self._server.closer.close(fds)
            raise Malformed("a packet was cut short")
        if not data:
            self._server.closer.close(fds)
            raise EOFError
        return data, fds

    def may_pass_descriptors(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 1)

    def close(self) -> None:
        """The server forgets the peer; its client, if any, is the register's business. The peer hears the end at once;
        the socket itself is closed elsewhere, with what is still queued in it."""
        if self.is_open:
            self.is_open = False
            self._server.forget(self)
            left = self.outbox.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._server.closer.close([*left, self._sock.detach()])


class LinkServer:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, register: Register, path: Path, hello_s: float, closer: Closer
    ) -> None:
        self.loop = self._loop = loop
        self.closer = closer
        self._turns, self._knocks = Turns(), Knocks()
        self._scarce_from = float("inf")
        self._spare = -1  # a descriptor kept for the moment when there is none
        self._register = register
        self._path = path
        self._hello_s = hello_s
        self._listener: socket.socket | None = None
        self._peers: set[LinkConnection] = set()
        self._pending: dict[LinkConnection, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Bind under another name and rename: a client never meets a half-made socket or the predecessor's."""
        with Fds() as fds:
            kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            listener = fds.enter_context(socket.socket(socket.AF_UNIX, kind))
            self._bind(listener)
            self._loop.add_reader(listener, self._accept)
            fds.keep()
        self._listener = listener
        self._scarce_from = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * (1 - KEPT_FDS)
        self._keep_spare()

    def _bind(self, listener: socket.socket) -> None:
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # of each packet, not only of the connection
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)  # until HELLO; connections inherit both
        listener.bind(str(fresh))
        fresh.chmod(0o666)  # anybody may knock; quotas and identity come after
        listener.listen(BACKLOG)
        for_clients = self._for_clients()
        for_clients.parent.mkdir(mode=0o755, exist_ok=True)
        for_clients.unlink(missing_ok=True)
        for_clients.hardlink_to(fresh)
        fresh.replace(self._path)

    def stop(self) -> None:
        """End every conversation. Clients see the end of the file and look for a successor."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
            self._for_clients().unlink(missing_ok=True)
        for peer in list(self._peers):
            peer.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _for_clients(self) -> Path:
        """The same socket in a folder of its own: what containers may see of the run folder, without the API."""
        return self._path.parent / CLIENT_FOLDER / self._path.name

    def drop_later(self, peer: LinkConnection, why: str) -> None:
        self._loop.call_soon(self._drop, peer, why)

    def forget(self, peer: LinkConnection) -> None:
        self._loop.remove_reader(peer.fileno())
        self._peers.discard(peer)
        timer = self._pending.pop(peer, None)
        if timer is not None:
            timer.cancel()

    @property
    def peers(self) -> int:
        return len(self._peers)

    def _accept(self) -> None:
        assert self._listener is not None
        until_ns = time.monotonic_ns() + TURN_NS
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: say so, and do not turn in a circle
                self._turn_away()
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.1, self._resume_accept)
                return
            self._admit(sock)
            if time.monotonic_ns() > until_ns:
                return  # the others after what else waits

    def _turn_away(self) -> None:
        """Every connection gets an answer: the spare descriptor is lent for it."""
        assert self._listener is not None
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            refused = RefusedMessage(code=Refusal.QUOTA, text="valved is out of descriptors")
            with contextlib.suppress(OSError):
                sock.send(build(LinkType.REFUSED, refused, seq=0, sent_ns=time.monotonic_ns()), socket.MSG_DONTWAIT)
            self._register.admission.count_refusal(Refusal.QUOTA)
            self.closer.close([sock.detach()])
        self._keep_spare()

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            if self._spare < 0:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _resume_accept(self) -> None:
        self._keep_spare()
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, sock: socket.socket) -> None:
        pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if len(self._silent(pid)) >= PENDING_PER_PROCESS and self._must_wait_ns(pid, uid):  # the cheapest answer
            self._register.malformed(pid, uid, "too many connections at once")
            self.closer.close([sock.detach()])
            return
        sock.setblocking(False)
        peer = LinkConnection(self, sock, pid, uid)
        self._peers.add(peer)
        self._pending[peer] = self._loop.call_later(self._hello_s, self._drop, peer, "no HELLO")
        self._loop.add_reader(sock, self._read, peer)
        self._read(peer)  # an honest HELLO is here already: it never competes with those that say nothing
        self._thin_out(peer.pid)

    def _thin_out(self, pid: int) -> None:
        silent = self._silent(pid)
        if len(silent) <= PENDING_PER_PROCESS:
            silent = list(self._pending) if len(self._pending) > PENDING else []
        if silent:
            self._register.malformed(silent[0].pid, silent[0].uid, "too many silent connections")
            self._drop(silent[0], "too many silent connections")

    def _silent(self, pid: int) -> list[LinkConnection]:
        return [peer for peer in self._pending if peer.pid == pid]

    def _read(self, peer: LinkConnection) -> None:
        if peer.client is None:
            if wait_ns := self._must_wait_ns(peer.pid, peer.uid):
                self._rest(peer, wait_ns / 1e9)
                return
        elif not peer.is_online:
            wait_ns = self._turns.wait_ns(peer.pid, time.monotonic_ns())
            if wait_ns or self.closer.is_behind:
                self._rest(peer, max(wait_ns / 1e9, BEHIND_S if self.closer.is_behind else 0.0))
                return
        self._read_some(peer)

    def _must_wait_ns(self, pid: int, uid: int) -> int:
        """Before its HELLO is read."""
        return self._knocks.wait_ns(pid, uid, time.monotonic_ns(), self._register.is_awaited)

    def _rest(self, peer: LinkConnection, seconds: float) -> None:
        """Not read for a while; the end of its process is noticed all the same."""
        self._loop.remove_reader(peer.fileno())
        self._loop.call_later(seconds, self._go_on, peer)

    def _go_on(self, peer: LinkConnection) -> None:
        if peer.is_open:
            self._loop.add_reader(peer.fileno(), self._read, peer)

    def _read_some(self, peer: LinkConnection) -> None:
        until_ns = time.monotonic_ns() + TURN_NS
        for _ in range(PACKETS_AT_ONCE):
            if not peer.is_open:
                return
            try:
                received = peer.receive()
                if received is None:
                    return
                self._take(peer, *received)
            except EOFError as end:
                self._drop(peer, str(end) or "link closed")
                return
            except Malformed as error:
                self._register.malformed(peer.pid, peer.uid, str(error))
                self._drop(peer, "malformed")
                return
            if time.monotonic_ns() > until_ns:
                return  # it is still readable: after the others

    def _take(self, peer: LinkConnection, data: bytes, fds: list[int]) -> None:
        try:
            self._dispatch(peer, parse(data), fds)
        finally:
            self.closer.close(fds)  # all that nobody took

    def _dispatch(self, peer: LinkConnection, packet: Packet, fds: list[int]) -> None:
        if len(fds) > FDS_MOST.get(packet.type, 0):
            raise Malformed(f"{len(fds)} descriptors on {packet.type.name}")
        if peer.client is None:
            if not isinstance(packet.body, Hello):
                raise Malformed(f"{packet.type.name} before HELLO")
            if peer.sender != peer.pid:
                raise Malformed(f"HELLO of process {peer.sender} on a connection of process {peer.pid}")
            self._hello(peer, packet)
            return
        if packet.type not in FROM_CLIENT:
            raise Malformed(f"{packet.type.name} from a client")
        began_ns = time.monotonic_ns()
        self._register.handle(peer.client, packet, fds)
        if packet.type < LinkType.KV_RANGE and not peer.is_online:  # online work may wait for what KV messages say
            now_ns = time.monotonic_ns()
            self._turns.took(peer.pid, now_ns - began_ns, now_ns)

    def _hello(self, peer: LinkConnection, packet: Packet) -> None:
        self._pending.pop(peer).cancel()
        peer.may_pass_descriptors()  # before the answer that invites them
        began_ns = time.monotonic_ns()
        try:
            peer.client = self._register.hello(peer, packet, is_scarce=peer.fileno() >= self._scarce_from)
            peer.is_online = peer.client is not None and self._register.is_online(peer.client)
        finally:  # also if that failed: no timer ends a connection without a client
            self._took(peer, began_ns)
            if peer.client is None:
                peer.close()

    def _drop(self, peer: LinkConnection, reason: str) -> None:
        began_ns = time.monotonic_ns()
        peer.close()
        if peer.client is not None:
            self._register.leave(peer.client, reason)
        self._took(peer, began_ns)

    def _took(self, peer: LinkConnection, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        if not peer.is_online:
            self._knocks.took(peer.pid, peer.uid, now_ns - began_ns, now_ns)


def _sender(ancillary: list[tuple[int, int, bytes]], before: int) -> int:
    """The process that sent the packet, as the kernel says."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= CREDENTIALS.size:
            return int(CREDENTIALS.unpack_from(data)[0])
    return before


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found.extend(numbers)
    return found
