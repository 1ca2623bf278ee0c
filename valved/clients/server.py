"""The link socket: accept, read, write, close; nothing here knows what a message means.

Everything is non-blocking and bounded: a peer is read a few packets at a time so that it cannot starve the others, a
peer whose socket is full is dropped (link.h: clients read all the time), one that says nothing is closed after a
while, and one malformed packet ends its connection.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from pathlib import Path

from valved.abi.link import MAX_FDS, MAX_PACKET, Body, Hello, LinkType, Malformed, Packet, build, parse
from valved.clients.register import Register
from valved.model.ids import ClientId
from valved.paths import CLIENT_FOLDER

BACKLOG = 512
PACKETS_AT_ONCE = 32  # per readiness of one peer
ACCEPTS_AT_ONCE = 64
PENDING_PER_UID = 64  # connections that have not said HELLO yet
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
        LinkType.KV_SCRATCH,
    }
)


class LinkConnection:
    """One accepted peer."""

    def __init__(self, server: LinkServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, _ = struct.unpack("3i", raw)
        self.client: ClientId | None = None
        self.is_open = True

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = ()) -> bool:
        """Whether it is on its way. Never waits: a peer that does not read is dropped in the next turn of the loop."""
        if not self.is_open:
            return False
        packet = build(kind, body, seq=seq, sent_ns=time.monotonic_ns())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([packet], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self._server.drop_later(self)
            return False
        return True

    def receive(self) -> tuple[bytes, list[int]] | None:
        """One packet and the descriptors on it; None when nothing waits. EOFError at the end."""
        room = socket.CMSG_SPACE(MAX_FDS * 4)
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                MAX_PACKET + 1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise EOFError from error
        fds = _descriptors(ancillary)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(fds)
            raise Malformed("a packet or its descriptors were cut short")
        if not data:
            close_all(fds)
            raise EOFError
        return data, fds

    def close(self) -> None:
        """The server forgets the peer; its client, if any, is the register's business."""
        if self.is_open:
            self.is_open = False
            self._server.forget(self)
            self._sock.close()


class LinkServer:
    def __init__(self, loop: asyncio.AbstractEventLoop, register: Register, path: Path, hello_s: float) -> None:
        self._loop = loop
        self._register = register
        self._path = path
        self._hello_s = hello_s
        self._listener: socket.socket | None = None
        self._peers: set[LinkConnection] = set()
        self._pending: dict[LinkConnection, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Bind under another name and rename: a client never meets a half-made socket or the predecessor's."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(0o666)  # anybody may knock; quotas and identity come after
        listener.listen(BACKLOG)
        for_clients = self._for_clients()
        for_clients.parent.mkdir(mode=0o755, exist_ok=True)
        for_clients.unlink(missing_ok=True)
        for_clients.hardlink_to(fresh)
        fresh.replace(self._path)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

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

    def _for_clients(self) -> Path:
        """The same socket in a folder of its own: what containers may see of the run folder, without the API."""
        return self._path.parent / CLIENT_FOLDER / self._path.name

    def drop_later(self, peer: LinkConnection) -> None:
        self._loop.call_soon(self._drop, peer, "its socket is full or broken")

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
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: stop listening for a moment instead of turning in a circle
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.1, self._resume_accept)
                return
            self._admit(sock)

    def _resume_accept(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = LinkConnection(self, sock)
        if sum(other.uid == peer.uid for other in self._pending) >= PENDING_PER_UID:
            self._register.malformed(peer.pid, peer.uid, "too many silent connections")
            sock.close()
            return
        self._peers.add(peer)
        self._pending[peer] = self._loop.call_later(self._hello_s, self._drop, peer, "no HELLO")
        self._loop.add_reader(sock, self._read, peer)

    def _read(self, peer: LinkConnection) -> None:
        for _ in range(PACKETS_AT_ONCE):
            if not peer.is_open:
                return
            try:
                received = peer.receive()
                if received is None:
                    return
                self._take(peer, *received)
            except EOFError:
                self._drop(peer, "link closed")
                return
            except Malformed as error:
                self._register.malformed(peer.pid, peer.uid, str(error))
                self._drop(peer, "malformed")
                return

    def _take(self, peer: LinkConnection, data: bytes, fds: list[int]) -> None:
        try:
            self._dispatch(peer, parse(data), fds)
        finally:
            close_all(fds)  # all that nobody took

    def _dispatch(self, peer: LinkConnection, packet: Packet, fds: list[int]) -> None:
        if len(fds) > FDS_MOST.get(packet.type, 0):
            raise Malformed(f"{len(fds)} descriptors on {packet.type.name}")
        if peer.client is None:
            if not isinstance(packet.body, Hello):
                raise Malformed(f"{packet.type.name} before HELLO")
            self._pending.pop(peer).cancel()
            peer.client = self._register.hello(peer, packet)
            if peer.client is None:
                peer.close()
            return
        if packet.type not in FROM_CLIENT:
            raise Malformed(f"{packet.type.name} from a client")
        self._register.handle(peer.client, packet, fds)

    def _drop(self, peer: LinkConnection, reason: str) -> None:
        peer.close()
        if peer.client is not None:
            self._register.leave(peer.client, reason)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found.extend(numbers)
    return found
