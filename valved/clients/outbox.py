"""What a peer has not read yet. valved never waits to send, and drops no peer that is off the CPU for a moment.

A socket holds about a hundred packets, one reclaim of an engine with 160 ranges is more. What does not fit waits here,
in order, up to a bound in bytes, descriptors and seconds; beyond it the peer is given up.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from valved.clients.deaf import Unheard
from valved.clients.dear import LinkLane
from valved.fds import Fds, is_scarce

SEND_BUFFER = 1 << 20  # of the socket; a packet of 1 KiB costs it about two
MOST_BYTES = 1 << 20
MOST_FDS = 1024  # duplicates of ours: the caller that handed them in may close its own
ASIDE_FDS = 4096  # more, where a thread sends: what the socket would hold waits here as well
LONG_NS = 1_000_000  # of a thread, for packets of one link: others of its account wait
PATIENCE_S = 5.0  # a peer that takes nothing for so long is stopped, frozen or hostile
_SO_SNDBUFFORCE = 32
SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number: enum takes 0.5 us for the sum, 20 when cold


Arrived = Callable[[], object]
Unsent = tuple[bytes, list[int]]
Item = tuple[bytes, list[int], Arrived | None]


def widen(sock: socket.socket) -> None:
    """As root beyond the system's bound, else up to it."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SEND_BUFFER)
    except OSError:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def send_on(sock: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], rights, SEND)


def send_some(sock: socket.socket, packets: Sequence[Unsent]) -> tuple[int, OSError | None]:
    """How many were sent, and why not the next; one at least, and no more once that has taken long."""
    until_ns = time.monotonic_ns() + LONG_NS
    for number, (packet, fds) in enumerate(packets):
        if number and time.monotonic_ns() > until_ns:
            return number, None
        try:
            send_on(sock, packet, fds)
        except OSError as error:
            return number, error
    return len(packets), None


def _end_by(error: Exception) -> EOFError:
    return Unheard() if isinstance(error, OSError) and is_scarce(error) else EOFError("its socket is broken")


class Outbox:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, broken: Callable[[EOFError], None], lane: LinkLane
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._broken = broken
        self._lane = lane
        self._queue: deque[Item] = deque()
        self._handed: list[Item] = []  # the first of them, with a thread aside
        self._bytes = self._fds = 0
        self._timer: asyncio.TimerHandle | None = None
        self._taken = 0  # packets that left the queue, ever

    def send(self, packet: bytes, fds: tuple[int, ...], arrived: Arrived | None = None) -> bool:
        """Whether it may arrive; `arrived` is called when it has. From then on it lies in the peer's socket, and the
        peer reads it even if we are gone. What waits here dies with us. The descriptors stay the caller's.
        """
        if self._queue or self._lane.is_aside:
            return self._keep(packet, fds, arrived)
        try:
            self._send(packet, fds)
        except (BlockingIOError, InterruptedError):
            return self._keep(packet, fds, arrived)
        except OSError as error:
            self._broken(_end_by(error))
            return False
        if arrived is not None:
            arrived()
        return True

    def close(self) -> list[Unsent]:
        """Packets that no thread has begun to send, with descriptors of ours."""
        self._stop_writing()
        unsent = [(packet, fds) for packet, fds, _ in self._queue]
        self._queue.clear()
        return unsent[len(self._handed) :]

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        began_ns = time.thread_time_ns()
        send_on(self._sock, packet, fds)
        self._lane.took(began_ns)

    def _keep(self, packet: bytes, fds: tuple[int, ...], arrived: Arrived | None) -> bool:
        more_bytes, more_fds = (SEND_BUFFER, ASIDE_FDS) if self._lane.is_aside else (0, 0)
        if self._bytes + len(packet) > MOST_BYTES + more_bytes or self._fds + len(fds) > MOST_FDS + more_fds:
            self._broken(EOFError("it does not read"))
            return False
        try:
            with Fds() as copies:
                mine = [copies.own(os.dup(fd)) for fd in fds]
                copies.keep()
        except OSError as error:
            self._broken(_end_by(error))
            return False
        self._queue.append((packet, mine, arrived))
        self._bytes += len(packet)
        self._fds += len(mine)
        if len(self._queue) == 1:
            self._watch(self._taken)
            if self._lane.is_aside:
                self._hand_over()
            else:
                self._loop.add_writer(self._sock, self._flush)
        return True

    def _watch(self, taken: int) -> None:
        """One watch at a time: a caller that hears within a flush that its packet arrived may send more and wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(PATIENCE_S, self._look, taken)

    def _look(self, taken: int) -> None:
        if self._taken == taken and not self._handed:  # else it waits for a thread, maybe for what others made it owe
            self._broken(EOFError("it does not read"))
        else:
            self._watch(self._taken)

    def _flush(self) -> None:
        while self._queue:
            if self._lane.is_aside:
                self._loop.remove_writer(self._sock)
                self._hand_over()
                return
            packet, fds, _ = self._queue[0]
            try:
                self._send(packet, fds)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            self._is_sent()
        if not self._queue:  # a caller that was told may have sent more
            self._stop_writing()

    def _is_sent(self) -> None:
        """The first of the queue."""
        arrived = self._pop()
        if arrived is not None:
            arrived()

    def _pop(self) -> Arrived | None:
        packet, fds, arrived = self._queue.popleft()
        self._taken += 1
        self._bytes -= len(packet)
        self._fds -= len(fds)
        for fd in fds:  # ours to begin with: closing them waits for nobody
            os.close(fd)
        return arrived

    def _break(self, error: Exception) -> None:
        self._stop_writing()
        self._broken(_end_by(error))

    def _hand_over(self) -> None:
        """The queue to a thread. The link may be closed meanwhile, but its lane keeps the socket open."""
        if not self._handed:
            self._handed = list(self._queue)
            packets = [(packet, fds) for packet, fds, _ in self._handed]
            self._lane.do(partial(send_some, self._sock, packets), self._come_back)

    def _come_back(self, result: tuple[int, OSError | None] | None, error: Exception | None) -> None:
        handed, self._handed = self._handed, []
        if not self._queue or self._queue[0] is not handed[0]:  # closed
            for fd in [fd for _, fds, _ in handed for fd in fds]:
                os.close(fd)
            return
        sent, failed = result or (0, error)
        arrived = [self._pop() for _ in range(sent)]
        if isinstance(failed, BlockingIOError | InterruptedError):
            self._loop.add_writer(self._sock, self._flush)
        elif failed is not None:
            self._break(failed)
        elif self._queue:
            self._hand_over()
        else:
            self._stop_writing()
        for tell in filter(None, arrived):  # last: it may send more, or close the link
            tell()

    def _stop_writing(self) -> None:
        if self._queue or self._timer is not None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_writer(self._sock)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
