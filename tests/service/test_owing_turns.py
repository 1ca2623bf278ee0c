"""Whose turn it is among processes that owe answers."""

from __future__ import annotations

import threading
import time

import pytest
from link_peers import COST_S, Neighbour, say

from valved.abi.kv_link import KvDone, KvHow, KvOp, KvRuns, KvStep
from valved.abi.link import LinkType
from valved.clients.turns import BURST_OF_ALL_NS

FLOODERS = 12
TOOK_NS = 20_000_000
STEP = LinkType.KV_STEP, KvStep(range=1)
DONE = LinkType.KV_DONE, KvDone(order=1, done=0, status=0, cu_result=0)
ORDER = LinkType.KV_RUNS, KvRuns(order=1, op=KvOp.BACK, how=KvHow.AT_ONCE, raw=b"")


def floods(socks):
    for sock in socks:
        for _ in range(8):
            say(sock, *STEP)


@pytest.mark.parametrize("is_used_up", [False, True])
def test_an_answer_never_waits_for_many_of_another_account_that_owe_one(server, own_time, is_used_up):
    """Regression: it stood behind each of them. `is_used_up`: what all that owe answers have in common is."""
    handled, may_read = [], threading.Event()
    neighbours = [Neighbour(server, floods) for _ in range(FLOODERS)]
    clients = [one.join() for one in neighbours]
    sock, welcome, _ = server.welcome()
    server.rest()

    def handle(_client, packet, _fds):
        handled.append(packet.type)
        own_time.spend(TOOK_NS)
        threading.Event().wait(COST_S)  # the loop has time for one such message in a pass

    server.world.register.handle = handle
    for client in (*clients, welcome.client):
        server.call(lambda client=client: server.world.register.send(client, *ORDER, 0))
    server.loop.call_soon_threadsafe(may_read.wait)
    for one in neighbours:
        one.act()
    say(sock, *DONE)
    if is_used_up:
        for key in (False, True):
            server.link._turns._all.took(key, BURST_OF_ALL_NS + TOOK_NS, time.monotonic_ns())
    may_read.set()

    server.until(lambda: LinkType.KV_DONE in handled)
    assert handled.index(LinkType.KV_DONE) < FLOODERS // 2
    for one in neighbours:
        one.end()
    sock.close()
