"""A link server on a loop of its own thread, and peers of it: real sockets before the services of a virtual node."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import threading

from node_world import World

from valved.abi.link import Hello, LinkType, Welcome, build, parse
from valved.clients.server import LinkServer
from valved.config import Config, QuotaTable
from valved.machine.helpers import Closer
from valved.machine.processes import LinuxProcesses
from valved.model.ids import Role

COST_S = 0.002  # of a driver call
PATIENCE_S = 200.0  # ends only a hung test
HELLO = Hello(abi_min=1, abi_max=1, features=1, wanted_role=int(Role.OFFLINE), driver=0, build="t", comm="t")


class Server:
    """A link server on an asyncio loop of its own thread; `call` runs something on that loop."""

    def __init__(self, folder, hello_s=600):
        self.path = folder / "link.sock"
        self.loop = asyncio.new_event_loop()
        # Every peer is this very process, and one that has just gone may still be in the books.
        quota = QuotaTable(clients_per_process=1000)
        self.world = World(folder, config=Config(quota=quota), processes=SelfProcesses())
        self.world.register._exits.reactor = self.loop
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
        sock.connect(str(self.path))
        return sock

    def welcome(self):
        sock = self.connect()
        say(sock, LinkType.HELLO, HELLO)
        packet, fds = hear(sock)
        assert isinstance(packet.body, Welcome)
        return sock, packet.body, fds

    def until(self, condition):
        deadline = threading.Event()
        for _ in range(int(PATIENCE_S / 0.002)):
            if self.call(condition):
                return
            deadline.wait(0.002)
        raise AssertionError("never happened")


class SelfProcesses(LinuxProcesses):
    """Real processes; the world's setter for its reactor is not needed."""

    _reactor = None


def say(sock, kind, body, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([build(kind, body, seq=7, sent_ns=0)], rights)


def hear(sock):
    """One packet and its descriptors; (None, []) at the end of the file."""
    data, fds, _, _ = socket.recv_fds(sock, 1024, 8)
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
