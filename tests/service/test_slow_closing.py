"""Descriptors that take for ever to close: whose they are waits, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
from link_peers import Knocker, Neighbour, Server, greet, say

from valved.abi.kv_link import KvDone, KvEntries, KvHow, KvOp, KvRuns
from valved.abi.link import MAX_FDS, LinkType
from valved.machine import helpers
from valved.machine.helpers import BACKLOG, CLOSERS, CLOSERS_OF_ACCOUNT, Closer
from valved.machine.possession import RmProver
from valved.model.ids import ClientId

DONE = LinkType.KV_DONE, KvDone(order=1, done=0, status=0, cu_result=0)
HELD = LinkType.KV_HELD, KvEntries(order=0, range=1, op=0, how=0, raw=b"")
ORDER = LinkType.KV_RUNS, KvRuns(order=1, op=KvOp.BACK, how=KvHow.AT_ONCE, raw=b"")
TOO_MANY = BACKLOG + CLOSERS
SOME = 3
GPU = SimpleNamespace(gpu_id=0x100, uuid=b"u" * 16)


@pytest.fixture
def may_close(monkeypatch):
    """Files called `slow` are closed once it is set."""
    may_close = threading.Event()

    def close(fd):
        if is_slow(fd):
            may_close.wait()
        os.close(fd)

    monkeypatch.setattr(helpers, "os", SimpleNamespace(close=close))
    yield may_close
    may_close.set()


@pytest.fixture
def server(tmp_path, own_time, may_close):
    with Server(tmp_path) as server:
        yield server
        may_close.set()


@pytest.fixture
def heard(server):
    """What the link's owners hear: nobody takes a descriptor."""
    heard = []
    server.world.register.handle = lambda client, packet, fds: heard.append((client, packet.type))
    return heard


def sends_slow_files(socks):
    slow = os.memfd_create("slow")
    for _ in range(10 * TOO_MANY // MAX_FDS):  # a link that is not read takes some only
        say(socks[0], *HELD, [slow] * MAX_FDS)


@pytest.fixture
def sender(server, heard):
    """A process of another account that sends files which are slow to close."""
    sender = Neighbour(server, sends_slow_files)
    sender.client = sender.join()
    yield sender
    sender.end()


def slow_files():
    return sum(is_slow(int(fd)) for fd in os.listdir("/proc/self/fd"))


def is_slow(fd):
    with contextlib.suppress(FileNotFoundError):
        return "slow" in os.readlink(f"/proc/self/fd/{fd}")
    return False


def is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_an_answer_never_waits_for_descriptors_that_another_account_sent(server, heard, sender):
    """Regression: while 256 descriptors waited to be closed, no offline link was read, and a service waits for some."""
    sender.begin()
    server.until(lambda: slow_files() > BACKLOG)
    sock, welcome, fds = server.welcome()
    server.call(lambda: server.world.register.send(welcome.client, *ORDER, 0))

    say(sock, *DONE)

    server.until(lambda: (ClientId(welcome.client), LinkType.KV_DONE) in heard)
    for fd in fds:
        os.close(fd)
    sock.close()


def test_an_account_never_makes_more_descriptors_pile_up_than_it_may(server, sender):
    sender.begin()
    peer, rests = server.call(lambda: peer_of(server, sender)), set()
    server.until(lambda: peer.is_behind)

    server.until(lambda: rests.add(peer._rests_until) or len(rests) > SOME)

    assert BACKLOG < slow_files() <= BACKLOG + CLOSERS_OF_ACCOUNT + MAX_FDS


def test_an_account_never_has_new_links_while_its_descriptors_pile_up(server, sender, may_close):
    """The sockets of those that end would pile up with them."""
    sender.begin()
    server.until(lambda: peer_of(server, sender).is_behind)
    other = Knocker(server)
    server.world.processes.homes[other.pid] = sender.HOME
    other.knock()
    for _ in range(SOME):  # whoever is of another account is welcomed behind it
        greet(server)

    assert server.call(lambda: other.pid not in {one.process.pid for one in server.world.books.clients.values()})
    may_close.set()
    assert other.is_welcomed()


def test_what_one_account_sent_never_keeps_that_of_another_open(may_close):
    closer, mine = Closer(), os.pipe()
    for account in range(CLOSERS // CLOSERS_OF_ACCOUNT - 1):
        closer.of(account).close([os.memfd_create("slow") for _ in range(TOO_MANY)])

    closer.of("another").close(mine)

    while any(map(is_open, mine)):
        may_close.wait(0.001)
    assert closer.of(0).is_behind
    assert not closer.of("another").is_behind
    may_close.set()
    while closer._accounts:  # nothing is kept of those that have nothing left to close
        may_close.wait(0)


def test_a_file_that_proves_nothing_never_keeps_that_of_another_account_open(may_close):
    loop = asyncio.new_event_loop()
    prover, judged = RmProver(loop, Closer()), []
    mine = os.open(os.devnull, os.O_RDONLY)

    def judge(fd, account):
        prover.check(fd, GPU, 1, 2, False, lambda is_own, _: judged.append(is_own), account)

    for _ in range(CLOSERS):
        judge(os.memfd_create("slow"), "one")
        prover.drop(os.memfd_create("slow"), "one")
    judge(mine, "another")

    while len(judged) <= CLOSERS or is_open(mine):
        loop.run_until_complete(asyncio.sleep(0.001))
    assert not any(judged)
    loop.close()


def peer_of(server, sender):
    return next(peer for peer in server.link._peers if peer.client == sender.client)
