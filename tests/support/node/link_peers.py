"""A link server on a loop of its own thread, and peers of it: real sockets before the services of a virtual node."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading

from node_world import World

from valved.abi.link import MAX_FDS, Hello, LinkType, Welcome, build, parse
from valved.clients.server import LinkServer
from valved.clients.turns import Postponed
from valved.config import Config, QuotaTable
from valved.machine.clock import LoopClock
from valved.machine.helpers import Closer
from valved.machine.processes import LinuxProcesses
from valved.model.ids import ClientId, Role

COST_S = 0.002  # of a driver call
PATIENCE_S = 200.0  # ends only a hung test
HELLO = Hello(abi_min=1, abi_max=1, features=1, wanted_role=int(Role.OFFLINE), driver=0, build="t", comm="t")


class OwnTime:
    """What time.thread_time_ns() says: what a test has a thread spend. The real one counts the interrupts that the
    thread meets, and what a host takes from its machine, so that any packet may turn out to be dear."""

    def __init__(self):
        self._of = threading.local()

    def now_ns(self):
        return getattr(self._of, "ns", 0)

    def spend(self, ns):
        self._of.ns = self.now_ns() + ns


class Server:
    """A link server on an asyncio loop of its own thread; `call` runs something on that loop."""

    def __init__(self, folder, hello_s=600):
        self.path = folder / "link.sock"
        self.loop = asyncio.new_event_loop()
        # Every peer is this very process, and one that has just gone may still be in the books.
        quota = QuotaTable(clients_per_process=1000)
        self.world = World(folder, config=Config(quota=quota), processes=SelfProcesses())
        self.world.register._exits.reactor = self.loop
        self.world.register.postponed = Postponed(LoopClock(self.loop))
        self.link = LinkServer(self.loop, self.world.register, self.path, hello_s, Closer())
        self.thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self):
        self.thread.start()
        self.call(self.link.start)
        return self

    def __exit__(self, *_):
        self.call(self.link.stop)
        for client in list(self.world.books.clients):
            self.call(lambda client=client: self.world.register.leave(client, "end"))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def call(self, what):
        async def run():
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def connect(self):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(PATIENCE_S)
        while sock.connect_ex(str(self.path)):  # the kernel's queue is full: a shim asks again, too
            threading.Event().wait(0.001)
        return sock

    def welcome(self):
        sock = self.connect()
        say(sock, LinkType.HELLO, HELLO)
        packet, fds = hear(sock)
        assert isinstance(packet.body, Welcome)
        return sock, packet.body, fds

    def rest(self):
        """No thread has anything to do for a link: descriptors that it sent are closed."""
        self.until(lambda: not any(peer.lane._under_way for peer in self.link._peers))

    def until(self, condition):
        deadline = threading.Event()
        for _ in range(int(PATIENCE_S / 0.002)):
            if self.call(condition):
                return
            deadline.wait(0.002)
        raise AssertionError("never happened")


class SelfProcesses(LinuxProcesses):
    """Real processes; the world's setter for its reactor is not needed. `homes`: control groups of some of them."""

    _reactor = None

    def __init__(self):
        super().__init__()
        self.homes = {}

    def cgroup(self, pid):
        return self.homes.get(pid) or super().cgroup(pid)


class Crowd:
    """Processes of this machine, each with connections to a server. They live until `end`."""

    def __init__(self, server):
        self._server = server
        self.pids = []

    def add(self, count, be):
        """`count` of them, each of which does `be()`; returns once all have. Also while the loop stands."""
        told, tell = os.pipe()
        for _ in range(count):
            self.pids.append(_forked(lambda: self._live(be, tell)))
        os.close(tell)
        for _ in range(count):
            assert os.read(told, 1) == b"!", "a process of the crowd failed"
        os.close(told)

    def connect(self, times, packet=None):
        """Of a process of the crowd."""
        for _ in range(times):
            sock = self._server.connect()
            if packet is not None:
                sock.send(packet)
            sock.detach()

    def end(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids = []

    def _live(self, be, tell):
        be()
        os.write(tell, b"!")
        os.close(tell)
        signal.pause()


class Knocker:
    """A process that says HELLO when it is told to. `below`: it starts that one, which says it in its place."""

    def __init__(self, server, *, below=0):
        self._server = server
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.top = _forked(lambda: self._live(theirs, below))
        theirs.close()
        self.pid = int(self._ours.recv(16))

    def knock(self):
        """Returns once it has said HELLO; also while the loop stands."""
        self._ours.send(b"!")
        assert self._ours.recv(16) == b"said"

    def is_welcomed(self):
        is_welcome = self._ours.recv(16) == b"welcome"
        self._ours.close()
        os.waitpid(self.top, 0)
        return is_welcome

    def _live(self, parent, below):
        self._ours.close()
        if below and (child := os.fork()):
            os.waitpid(child, 0)
            return
        parent.send(b"%d" % os.getpid())
        parent.recv(16)
        sock = self._server.connect()
        say(sock, LinkType.HELLO, HELLO)
        parent.send(b"said")
        parent.send(b"welcome" if isinstance(hear(sock)[0].body, Welcome) else b"no")


class Neighbour:
    """A process of another account, with links of its own. `act` is what it does, with these, when it is told to."""

    HOME = f"/docker/{'a' * 64}"

    def __init__(self, server, act):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = _forked(lambda: self._live(server, act, theirs))
        theirs.close()
        server.world.processes.homes[self.pid] = self.HOME

    def join(self):
        """Another link. Returns its client."""
        self._ours.send(b"join")
        return ClientId(int(self._ours.recv(16)))

    def begin(self):
        """It may wait for valved to read."""
        self._ours.send(b"act")

    def act(self):
        self.begin()
        assert self._ours.recv(16) == b"done"

    def end(self):
        self._ours.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _live(self, server, act, parent):
        self._ours.close()
        socks = []
        while told := parent.recv(16):
            if told == b"join":
                sock, welcome, _ = server.welcome()
                socks.append(sock)
                parent.send(b"%d" % welcome.client)
            else:
                act(socks)
                parent.send(b"done")


def _forked(run):
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


def say(sock, kind, body, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([build(kind, body, seq=7, sent_ns=0)], rights)


def hear(sock):
    """One packet and its descriptors; (None, []) at the end of the file."""
    data, fds, _, _ = socket.recv_fds(sock, 1024, MAX_FDS)
    return (parse(data), fds) if data else (None, [])


def is_closed(sock):
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1024) == b""
    return True


def greet(server):
    sock, _, fds = server.welcome()
    for fd in fds:
        os.close(fd)
    sock.close()


def never_closing():
    """One end of a TCP connection whose close() waits for a reader that never reads, as long as its sender likes."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(65536))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    ours.setblocking(True)
    return ours, theirs


def stop_reading(server):
    for peer in server.link._peers:
        server.loop.remove_reader(peer.fileno())
