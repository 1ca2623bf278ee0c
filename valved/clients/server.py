"""The link socket: accept, read, write, close; nothing here knows what a message means.

Everything is non-blocking and bounded: a peer is read a few packets at a time, and no longer than its share of the loop
(turns.py). Before its HELLO it waits for its turn (arrivals.py). One that does not read is dropped after a while
(outbox.py), one that says nothing likewise, and one malformed packet ends its connection. What strangers sent is never
closed here: close() may take as long as they like. What costs too much is done aside of the loop (dear.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from valved.abi.link import (
    MAX_FDS,
    Hello,
    LinkType,
    Malformed,
    Packet,
    Refusal,
    RefusedMessage,
    build,
)
from valved.clients.arrivals import LinkArrivals, LinkCaller
from valved.clients.aside import AsideReader
from valved.clients.connection import SO_PASSRIGHTS, LinkConnection, Received, end
from valved.clients.deaf import Unheard
from valved.clients.dear import DearAccounts
from valved.clients.lending import FetchedReader
from valved.clients.owing import OwingLine
from valved.clients.register import Register
from valved.clients.turns import PASS_NS, Postponed, Turns
from valved.fds import Fds, forget_name
from valved.machine.callers import MOST, accept
from valved.machine.clock import LoopClock
from valved.machine.helpers import Closer
from valved.paths import CLIENT_FOLDER

BACKLOG = MOST  # what is accepted in one pass of the loop: so many stand before a HELLO that comes
FLOOD_REST_S = 0.002  # after a pass in which some were turned away: a flood has half of the loop at most
PACKETS_AT_ONCE = 32  # per readiness of one peer
AWAITED_AT_ONCE = 4  # of one that owes an answer: a service may wait for that of the next one
KEPT_FDS = 0.2  # share of the descriptors that only online processes get; the kernel gives out the lowest number first
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
        LinkType.ENDING,
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
        LinkType.KV_MAKE,
    }
)
PACKETS = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


def scarce_from() -> float:
    """Of the limit that holds now: it may be lowered at any time (prlimit)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * (1 - KEPT_FDS)


class LinkServer:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, register: Register, path: Path, hello_s: float, closer: Closer
    ) -> None:
        self.loop = self._loop = loop
        self.born_ns = time.monotonic_ns()
        self.closer = closer
        self.dear = DearAccounts(loop, register.links_are_dear)
        self._aside = AsideReader(self)
        self._fetcher = FetchedReader(self)
        self._turns = Turns()
        self._owing = OwingLine(self, self._turns)
        self._hellos = Postponed(LoopClock(loop))  # read aside: none waits for what others say who were welcomed
        self.arrivals = LinkArrivals(loop, self, register.awaited, hello_s)
        self._spare = -1  # a descriptor kept for the moment when there is none
        self._register = register
        self.left_unread = register.admission.welcomes.left_unread
        self.cannot_hear = register.admission.deaf.not_taken  # somebody who may be online work, for want of our own
        self._path = path
        # The same socket in a folder of its own: what containers may see of the run folder, without the API.
        self._for_clients = path.parent / CLIENT_FOLDER / path.name
        self.names = [path, self._for_clients]  # of files, for whoever ends it
        self._listener: socket.socket | None = None
        self._peers: set[LinkConnection] = set()

    def start(self) -> None:
        """Bind under another name and rename: a client never meets a half-made socket or the predecessor's."""
        with Fds() as fds:
            listener = fds.enter_context(socket.socket(socket.AF_UNIX, PACKETS))
            fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            fds.callback(forget_name, fresh)  # each start has another name: starts that fail would fill the folder
            self._bind(listener, fresh)
            self._loop.add_reader(listener, self._accept)
            fds.keep()
        self._listener = listener
        self._keep_spare()

    def _bind(self, listener: socket.socket, fresh: Path) -> None:
        fresh.unlink(missing_ok=True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # of each packet, not only of the connection
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)  # until HELLO; connections inherit both
        listener.bind(str(fresh))
        fresh.chmod(0o666)  # anybody may knock; quotas and identity come after
        listener.listen(BACKLOG)
        self._for_clients.parent.mkdir(mode=0o755, exist_ok=True)
        self._for_clients.unlink(missing_ok=True)
        self._for_clients.hardlink_to(fresh)
        fresh.replace(self._path)

    def stop(self) -> None:
        """End every conversation. Clients see the end of the file and look for a successor."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for peer in list(self._peers):
            peer.close()
        self.arrivals.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def drop_later(self, peer: LinkConnection, why: EOFError) -> None:
        self._loop.call_soon(self._drop, peer, why)

    def forget(self, peer: LinkConnection) -> None:
        self._loop.remove_reader(peer.fileno())
        self._peers.discard(peer)

    @property
    def peers(self) -> int:
        return len(self._peers) + len(self.arrivals)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted = accept(self._listener)
        except OSError:  # out of descriptors: say so, and do not turn in a circle
            self.cannot_hear()
            self._refuse_one(self._listener)
            self._rest_accepting(self._listener, 0.1)
            return
        if not self.arrivals.come(accepted):
            self._rest_accepting(self._listener, FLOOD_REST_S)

    def _rest_accepting(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._resume_accept)

    def _refuse_one(self, listener: socket.socket) -> None:
        """Every connection gets an answer: the spare descriptor is lent for it."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            refused = RefusedMessage(code=Refusal.QUOTA, text="valved is out of descriptors")
            words = build(LinkType.REFUSED, refused, seq=0, sent_ns=time.monotonic_ns())
            self.closer.do(partial(end, sock, [(words, [])], [], self.closer))
            self._register.admission.count_refusal(Refusal.QUOTA)
        self._keep_spare()

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            if self._spare < 0:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _resume_accept(self) -> None:
        self._keep_spare()
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    # Before their HELLO (arrivals.py)

    def turn_away(self, caller: LinkCaller, fds: list[int], why: str) -> None:
        """Unread. `why` empty: they did nothing wrong. A thread tells them: how they wait is theirs to choose."""
        if why:
            self._register.malformed(caller.pid, caller.uid, why, len(fds))
        self.closer.of(caller.uid).close_in_turn(fds)

    def read_hello(self, fd: int, caller: LinkCaller) -> bool:
        """Of a connection that has something to say. Whether it is online work's."""
        peer = LinkConnection(self, fd, caller)
        self._peers.add(peer)
        if peer.lane.is_aside:
            self._aside.read(peer)
        elif not self.read_one(peer):
            self.drop_later(peer, EOFError("no HELLO"))
        return peer.is_online

    # Their messages

    def _read(self, peer: LinkConnection) -> None:
        if self._owing.may_be_read(peer):
            self.read_in_turn(peer, is_readable=True)

    def read_in_turn(self, peer: LinkConnection, *, is_readable: bool = False) -> None:
        """`is_readable`: it was asked just now."""
        if peer.lane.is_aside:
            self._aside.read(peer)
            return
        later = self.later(peer)
        if not later.do_now(partial(self._read_some, peer, is_readable=is_readable)):
            self._loop.remove_reader(peer.fileno())
            later.put(peer.turn, partial(self._read_later, peer))

    def most_fds(self, kind: LinkType) -> int:
        return FDS_MOST.get(kind, 0)

    def later(self, peer: LinkConnection) -> Postponed:
        if peer.client is None:
            return self._hellos
        return self._register.postponed_online if peer.is_online else self._register.postponed

    def _read_later(self, peer: LinkConnection) -> None:
        self.go_on(peer)
        self._read_some(peer)

    def go_on(self, peer: LinkConnection) -> None:
        peer.end_rest()
        if peer.is_open and not peer.is_fetching:
            self._loop.add_reader(peer.fileno(), self._read, peer)

    def _read_some(self, peer: LinkConnection, *, is_readable: bool = False) -> None:
        until_ns = time.monotonic_ns() + PASS_NS
        for _ in range(AWAITED_AT_ONCE if peer.was_awaited and not peer.is_online else PACKETS_AT_ONCE):
            if not ((is_readable or peer.is_readable) and self.read_one(peer)) or time.monotonic_ns() > until_ns:
                return  # it may be readable still: after the others
            is_readable = False

    def read_one(self, peer: LinkConnection, receive: Callable[[], Received | None] | None = None) -> bool:
        """Whether there was anything, the end included. What it took is charged, unless valved wanted it."""
        is_welcomed, wanted, began_ns = peer.client is not None, peer.wanted, time.thread_time_ns()
        try:
            received = (receive or peer.receive)()
            if received is None:
                return False
            peer.sender = received.sender or peer.sender
            if received.lent is not None:
                self._fetcher.read(peer, received, received.lent)
            else:
                self._take(peer, received.packet, received.fds)
        except EOFError as error:
            self._drop(peer, error)
        except Malformed as error:
            self._register.malformed(peer.pid, peer.uid, str(error))
            self._drop(peer, EOFError("malformed"))
        finally:
            if is_welcomed and peer.is_open and peer.wanted == wanted:
                self.charge(peer, time.thread_time_ns() - began_ns)
        return True

    def _take(self, peer: LinkConnection, packet: Packet, fds: list[int]) -> None:
        try:
            self._dispatch(peer, packet, fds)
        finally:
            peer.closer.close(fds)  # all that nobody took

    def _dispatch(self, peer: LinkConnection, packet: Packet, fds: list[int]) -> None:
        if len(fds) > self.most_fds(packet.type):
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
        if packet.type is LinkType.ENDING and peer.sender != peer.pid:
            return  # a child that has inherited the link, or whom it was passed to: it ends nobody but itself
        began_ns, ran_ns = time.monotonic_ns(), time.thread_time_ns()
        peer.heard(packet.type)
        self._register.handle(peer.client, packet, fds)
        if packet.type < LinkType.KV_RANGE and not peer.is_online:  # the loop may have waited for a busy driver
            self.charge(peer, max(0, time.monotonic_ns() - began_ns - (time.thread_time_ns() - ran_ns)))

    def charge(self, peer: LinkConnection, ns: int) -> None:
        """It is read again when it has paid for that."""
        self._turns.took(peer.pid, ns, time.monotonic_ns(), is_online=peer.is_online, is_awaited=peer.pays_as_awaited)

    def _hello(self, peer: LinkConnection, packet: Packet) -> None:
        peer.open_up()  # before the answer that invites descriptors
        try:
            peer.client = self._register.hello(peer, packet, is_scarce=peer.fileno() >= scarce_from())
            peer.is_online = peer.client is not None and self._register.is_online(peer.client)
            peer.lane.is_awaited |= peer.is_online
            peer.lane.is_new = False
        finally:  # also if that failed: nothing else ends a connection without a client
            if peer.client is None:
                peer.close()
        if peer.is_open:
            self._loop.add_reader(peer.fileno(), self._read, peer)

    def _drop(self, peer: LinkConnection, why: EOFError) -> None:
        if peer.is_online and isinstance(why, Unheard):  # it comes back, and is as deaf to us: time after time
            self.cannot_hear()
        began_ns = time.thread_time_ns()
        peer.close()
        if peer.client is not None:
            self._register.leave(peer.client, str(why) or "link closed")
            if not peer.is_online:
                self.arrivals.took(peer.caller, time.thread_time_ns() - began_ns)
