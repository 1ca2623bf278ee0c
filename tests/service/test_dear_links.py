"""Clients that make packets on their link dear: what they cost, the loop pays once."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from link_peers import HELLO, hear, is_closed, say

from valved.abi.link import Ack, LinkType, NoteMessage, RefusedMessage, Welcome
from valved.clients.dear import DEAR_NS

TIMES = 10


class Costs:
    """What valved's sockets cost while `are_due`, and how often its loop has paid."""

    are_due = False
    by_loop = 0

    def __init__(self, loop: threading.Thread) -> None:
        self.loop = loop

    def pay(self) -> None:
        if not self.are_due or threading.current_thread() is threading.main_thread():
            return
        self.by_loop += threading.current_thread() is self.loop
        until_ns = time.thread_time_ns() + 2 * DEAR_NS
        while time.thread_time_ns() < until_ns:
            pass


@pytest.fixture
def costs(server, monkeypatch):
    """As if a million epolls waited for the other end: the kernel walks them for whoever reads, writes or ends it."""
    costs = Costs(server.thread)

    class Watched(socket.socket):
        def recvmsg(self, *words):
            received = super().recvmsg(*words)
            costs.pay()
            return received

        def sendmsg(self, *words):
            sent = super().sendmsg(*words)
            costs.pay()
            return sent

        def shutdown(self, how):
            super().shutdown(how)
            costs.pay()

    monkeypatch.setattr(socket, "socket", Watched)
    return costs


def peer_of(server):
    [peer] = server.link._peers
    return peer


def test_the_packets_of_a_client_never_cost_the_loop_more_than_one(server, costs):
    sock, _, fds = server.welcome()
    handled, handle = [], server.world.register.handle

    def count(client, packet, descriptors):
        handled.append(packet.body.text)
        handle(client, packet, descriptors)

    server.world.register.handle = count
    costs.are_due = True

    for number in range(TIMES):
        say(sock, LinkType.NOTE, NoteMessage(code=1, h_client=0, h_channel=0, text=str(number)))

    server.until(lambda: len(handled) == TIMES)
    assert handled == [str(number) for number in range(TIMES)]
    sock.close()
    server.until(lambda: not server.link.peers)
    assert costs.by_loop == 1
    for fd in fds:
        os.close(fd)


def test_answers_to_a_client_never_cost_the_loop_more_than_one_and_come_in_order(server, costs):
    sock, _, fds = server.welcome()
    costs.are_due = True
    arrived = []

    server.call(
        lambda: [
            peer_of(server).send(LinkType.ACK, Ack(), seq, arrived=lambda seq=seq: arrived.append(seq))
            for seq in range(1, TIMES + 1)
        ]
    )

    assert [hear(sock)[0].seq for _ in range(TIMES)] == list(range(1, TIMES + 1))
    server.until(lambda: len(arrived) == TIMES)
    server.call(lambda: peer_of(server).close())
    assert is_closed(sock)
    assert costs.by_loop == 1
    for fd in fds:
        os.close(fd)


@pytest.fixture
def dear(server):
    """One link of this account has cost much."""
    sock, _, fds = server.welcome()
    server.call(lambda: server.link.dear.note(peer_of(server).lane.account()))
    yield
    sock.close()
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("dear")
def test_a_process_of_a_dear_account_is_welcomed_with_its_descriptors_and_costs_the_loop_nothing(server, costs):
    costs.are_due = True

    sock, welcome, fds = server.welcome()

    assert isinstance(welcome, Welcome)
    assert len(fds) == 4
    sock.close()
    server.until(lambda: server.link.peers == 1)
    assert costs.by_loop == 0
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("dear")
def test_a_process_of_a_dear_account_always_hears_that_it_is_refused(server):
    sock = server.connect()

    say(sock, LinkType.HELLO, replace(HELLO, abi_min=9, abi_max=9))

    packet, _ = hear(sock)
    assert isinstance(packet.body, RefusedMessage)
    assert is_closed(sock)


@pytest.mark.usefixtures("dear")
def test_a_link_that_ends_while_a_packet_is_under_way_never_keeps_a_descriptor(server):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sock, _, fds = server.welcome()
        read, write = os.pipe()
        newest = max(server.link._peers, key=lambda peer: peer.since_ns)
        server.call(
            lambda peer=newest, fd=read: (peer.send(LinkType.ACK, Ack(), 1, (fd,)), server.link._drop(peer, ""))
        )
        for fd in (read, write, *fds):
            os.close(fd)
        sock.close()

    server.until(lambda: server.link.peers == 1 and len(os.listdir("/proc/self/fd")) <= before)
