"""Accepts API connections: counts them per user, and passes each on to the gRPC server behind.

gRPC does not say which user called over a unix socket, and it accepts without end. This listener reads the peer's uid
before anything else. A user has a few connections, each with a few calls (server.py); root and valved's own user have
more, and places that no other user can take. So no user can use up the descriptors of valved, or another user's calls.

What a packet costs is for the caller to choose: who reads or writes it walks all epolls that wait for the other end.
So a front lives in a loop of its own (aside.py), which nothing but its callers waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import cast

import msgspec

from valved.clients.connection import ANCILLARY, RECEIVE, SO_PASSRIGHTS, passed
from valved.fds import Fds, is_scarce
from valved.machine.helpers import Closer

PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
PEER_NAME = "valve-api-"
WELCOME, TURNED_AWAY = "welcome", "turned_away"
TURNED_AWAY_AT_ONCE = 8  # refused connections that stay open until they are told why
EARLY_BYTES = 1 << 20  # kept of one caller until its connection is passed on
TURNED_AWAY_S = 2.0  # how long a refused connection stays open


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a thing there may be at one time."""

    per_user: int
    others: int  # all users together, other than root and valved's own
    own: int  # root and valved's own user


class Crowd:
    """Which user has how many of a thing."""

    def __init__(self, what: str, places: Places, own: frozenset[int] | None = None) -> None:
        """`what`: the thing, for the refusal."""
        self.own = frozenset({0, os.getuid()}) if own is None else own
        self._what = what
        self._places = places
        self._count: Counter[int] = Counter()

    def refusal(self, uid: int) -> str:
        """Why this user gets no further one; empty: the user gets it."""
        if uid in self.own:
            taken = sum(self._count[one] for one in self.own)
            return self._full("root and valved's user", taken) if taken >= self._places.own else ""
        if self._count[uid] >= self._places.per_user:
            return self._full(f"user {uid}", self._count[uid])
        taken = sum(count for one, count in self._count.items() if one not in self.own)
        return self._full("all users", taken) if taken >= self._places.others else ""

    def _full(self, who: str, taken: int) -> str:
        return f"no more {self._what} for {who}: {taken} are open"

    def enter(self, uid: int) -> None:
        self._count[uid] += 1

    def leave(self, uid: int) -> None:
        self._count[uid] -= 1
        if not self._count[uid]:
            del self._count[uid]


class _CallerSocket(socket.socket):
    """A descriptor on a call ends its connection: none belongs there. A thread closes it, and the socket, in which more
    may lie unread: close() may take as long as their sender likes (before Linux 6.16 anybody can send them)."""

    def __init__(self, fd: int, closer: Closer) -> None:
        super().__init__(fileno=fd)
        self._closer = closer

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        if self._closer.is_behind:
            raise ConnectionAbortedError(errno.ECONNABORTED, "descriptors of callers cannot be closed")
        data, ancillary, _, _ = self.recvmsg(bufsize, ANCILLARY, RECEIVE | flags)
        fds, _ = passed(ancillary)
        if fds:
            self._closer.close(fds)
            raise ConnectionAbortedError(errno.ECONNABORTED, "a descriptor on a call")
        return data

    def close(self) -> None:
        if self.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        self._closer.close([self.detach()])


class _CallerListener(socket.socket):
    """The closer is its own, so those who call here can hold up nobody else's descriptors."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._closer = Closer()
        self._has_failed = False  # in this pass: asyncio goes on a hundred times, and logs each
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)  # connections inherit it

    def accept(self) -> tuple[socket.socket, str]:
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError  # nobody else waits
        try:
            if self._closer.is_behind:
                raise OSError(errno.EMFILE, "descriptors of callers cannot be closed")  # asyncio rests for a second
            sock, address = super().accept()
        except OSError as error:
            self._has_failed = is_scarce(error)
            raise
        return _CallerSocket(sock.detach(), self._closer), address


class Front:
    """Listens on `path`; what arrives goes to the socket `behind`."""

    def __init__(self, path: Path, behind: Path, crowd: Crowd) -> None:
        self.crowd = crowd
        self._path = path
        self._behind = behind
        self._server: asyncio.AbstractServer | None = None
        self._open: set[_Outer] = set()
        self._turned_away = 0

    async def start(self, mode: int, gid: int) -> None:
        """The umask keeps other users out between bind and chmod."""
        self._path.unlink(missing_ok=True)
        with Fds() as fds:
            listener = fds.enter_context(_CallerListener())
            before = os.umask(0o117)
            try:
                listener.bind(str(self._path))
            finally:
                os.umask(before)
            if gid >= 0:
                os.chown(self._path, -1, gid)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Outer(self), sock=listener)
            fds.keep()
        self._path.chmod(mode)

    async def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        for one in list(self._open):
            one.abort()

    def enter(self, one: _Outer) -> bool:
        """False: close this connection at once. A refused one stays open until it is told why."""
        one.is_welcome = not self.crowd.refusal(one.uid)
        if one.is_welcome:
            self.crowd.enter(one.uid)
        elif self._turned_away < TURNED_AWAY_AT_ONCE:
            self._turned_away += 1
            asyncio.get_running_loop().call_later(TURNED_AWAY_S, one.abort)
        else:
            return False
        self._open.add(one)
        return True

    def leave(self, one: _Outer) -> None:
        if one not in self._open:
            return
        self._open.discard(one)
        if one.is_welcome:
            self.crowd.leave(one.uid)
        else:
            self._turned_away -= 1

    async def connect(self, outer: _Outer) -> _Half:
        """Binds the connection to a name that gRPC then reports as its peer. No user can guess the name and take it."""
        loop = asyncio.get_running_loop()
        welcome = WELCOME if outer.is_welcome else TURNED_AWAY
        with Fds() as fds:
            inner = fds.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            inner.bind(f"\0{PEER_NAME}{outer.uid}-{welcome}-{secrets.token_hex(16)}")
            await loop.sock_connect(inner, str(self._behind))
            _, half = await loop.create_unix_connection(lambda: _Half(outer), sock=inner)
            fds.keep()
        return half


class _Half(asyncio.Protocol):
    """One side of a connection: what it receives is written to the other; it reads no faster than the other takes."""

    def __init__(self, other: _Half | None = None) -> None:
        self.other = other
        self.is_full = False  # nobody takes what it writes

    @property
    def may_read(self) -> bool:
        return self.other is None or not self.other.is_full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        self._fill(True)

    def resume_writing(self) -> None:
        self._fill(False)

    def _fill(self, is_full: bool) -> None:
        self.is_full = is_full
        for half in filter(None, (self, self.other)):
            (half.transport.resume_reading if half.may_read else half.transport.pause_reading)()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self.other is not None:
            self.other.transport.close()


class _Outer(_Half):
    """The caller's side. One that takes no answers is not read: what it asks for would pile up in gRPC, megabytes of
    each connection."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.uid = -1
        self.is_welcome = False
        self._front = front
        self._joining: asyncio.Task[None] | None = None
        self._early = b""  # Python before 3.11.3: a transport reads although it was paused when made

    @property
    def may_read(self) -> bool:
        return super().may_read and not self.is_full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer: socket.socket = transport.get_extra_info("socket")
        _, self.uid, _ = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if not self._front.enter(self):
            self.transport.abort()
            return
        self.transport.pause_reading()  # until the connection to gRPC stands
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        try:
            self.other = await self._front.connect(self)
        except OSError:
            return
        finally:
            if self.other is None:
                self.transport.close()
        if self.transport.is_closing():  # it left meanwhile
            self.other.transport.close()
        else:
            self.other.transport.write(self._early)
            if self.may_read:
                self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
        elif len(self._early) + len(data) > EARLY_BYTES:
            self.abort()
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.leave(self)

    def abort(self) -> None:
        self.transport.abort()


class Caller(msgspec.Struct, frozen=True):
    uid: int
    is_welcome: bool

    @classmethod
    def of(cls, peer: str) -> Caller:
        """The user of a connection that came through a front, by gRPC's name for it."""
        uid, welcome, _ = peer.partition(PEER_NAME)[2].split("-")
        return cls(int(uid), welcome == WELCOME)
