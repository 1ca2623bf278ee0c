"""Clients that make packets on their link dear: what they cost, the loop pays once."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from link_peers import HELLO, PATIENCE_S, OwnTime, hear, is_closed, never_closing, say, stop_reading
from msgspec.structs import replace
from scarce import left

from valved.abi.link import MAX_FDS, Ack, LinkType, NoteMessage, RefusedMessage, Schedule, Welcome
from valved.clients.dear import DEAR_THREADS, LOOP_BURST_NS, USUAL_NS
from valved.clients.turns import PASS_NS, SECOND_NS
from valved.machine.processes import LinuxProcesses
from valved.model.ids import Role

TIMES = 10
MUCH_NS = 10 * LOOP_BURST_NS


class Costs:
    """What valved's sockets cost while `are_due`, and how often its loop has paid."""

    are_due = False
    by_loop = 0

    def __init__(self, loop: threading.Thread, own_time: OwnTime) -> None:
        self.loop, self.own_time = loop, own_time

    def pay(self) -> None:
        if not self.are_due or threading.current_thread() is threading.main_thread():
            return
        is_loop = threading.current_thread() is self.loop
        self.by_loop += is_loop
        self.own_time.spend(MUCH_NS if is_loop else 10 * USUAL_NS)  # else an account's core would be used up
        if is_loop:
            threading.Event().wait(2 * PASS_NS / SECOND_NS)  # such a packet ends its pass


@pytest.fixture
def costs(server, own_time, monkeypatch):
    """As if a million epolls waited for the other end: the kernel walks them for whoever reads, writes or ends it."""
    costs = Costs(server.thread, own_time)

    class Watched(socket.socket):
        def send(self, *words):
            sent = super().send(*words)
            costs.pay()
            return sent

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


def claim(server):
    """This process, which every peer is, for a service."""
    start_time = LinuxProcesses().start_time(os.getpid())
    server.call(lambda: server.world.node.launch(os.getpid(), start_time, Role.ONLINE, "chat"))


def make_dear(server, peer):
    lane = peer.lane
    server.call(lambda: server.link.dear.took_of_loop(lane.account, MUCH_NS, is_awaited=lane.is_awaited))


@pytest.fixture(params=["a service", "no service"])
def whose(request, server):
    if request.param == "a service":
        claim(server)


@pytest.mark.usefixtures("whose")
def test_the_packets_of_a_client_never_cost_the_loop_more_than_one(server, costs):
    sock, _, fds = server.welcome()
    server.rest()  # a thread may be at its welcome still
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


@pytest.mark.usefixtures("whose")
def test_answers_to_a_client_never_cost_the_loop_more_than_one_and_come_in_order(server, costs):
    sock, _, fds = server.welcome()
    server.rest()
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


@pytest.fixture(params=["a service", "no service"])
def dear(request, server):
    """One link of this process has cost much."""
    if request.param == "a service":
        claim(server)
    sock, _, fds = server.welcome()
    make_dear(server, peer_of(server))
    assert server.call(lambda: peer_of(server).lane.is_aside)
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


@pytest.mark.parametrize("is_dear", [False, True])
def test_a_client_is_never_given_up_for_what_its_socket_would_have_held(server, is_dear):
    """A service that grows at once by many handles, each with its descriptor."""
    claim(server)
    sock, _, fds = server.welcome()
    peer, passed = peer_of(server), [os.open(os.devnull, os.O_RDONLY)] * MAX_FDS
    if is_dear:
        make_dear(server, peer)

    server.call(lambda: [peer.send(LinkType.ACK, Ack(), seq, tuple(passed)) for seq in range(1, 41)])

    for seq in range(1, 41):
        packet, came = hear(sock)
        for fd in came:
            os.close(fd)
        assert (packet.seq, len(came)) == (seq, len(passed))
    sock.close()
    for fd in (passed[0], *fds):
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
        newest = server.call(lambda: max(server.link._peers, key=lambda peer: peer.client))
        server.call(
            lambda peer=newest, fd=read: (peer.send(LinkType.ACK, Ack(), 1, (fd,)), server.link._drop(peer, ""))
        )
        for fd in (read, write, *fds):
            os.close(fd)
        sock.close()

    server.until(lambda: server.link.peers == 1 and len(os.listdir("/proc/self/fd")) <= before)


@pytest.fixture
def held(server, monkeypatch):
    """A packet that a thread reads takes until this is set."""
    go_on = threading.Event()

    class Slow(socket.socket):
        def recvmsg(self, *words):
            if threading.current_thread() not in (threading.main_thread(), server.thread):
                go_on.wait(PATIENCE_S)
            return super().recvmsg(*words)

    monkeypatch.setattr(socket, "socket", Slow)
    yield go_on
    go_on.set()


@pytest.mark.usefixtures("dear")
def test_hellos_of_a_dear_account_never_pile_up_before_its_thread(server, held):
    """Nothing else bounds how many descriptors they take: what waits there is not counted as a silent connection is."""
    socks = [server.connect() for _ in range(6)]
    for sock in socks:
        say(sock, LinkType.HELLO, HELLO)

    server.until(lambda: server.link.peers == 1 + len(socks))
    server.until(lambda: len(server.link._peers) > 1)

    assert server.call(lambda: len(server.link._peers)) == 2
    held.set()
    for sock in socks:
        packet, fds = hear(sock)
        assert isinstance(packet.body, Welcome)
        sock.close()
        for fd in fds:
            os.close(fd)


@pytest.mark.usefixtures("dear")
def test_what_a_dear_client_left_unread_never_keeps_a_thread(server):
    """Its close() takes as long as its sender likes."""
    ends = []
    for _ in range(DEAR_THREADS):
        sock, _, fds = server.welcome()
        server.call(lambda: stop_reading(server))
        slow, theirs = never_closing()
        say(sock, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2), [slow.fileno()])
        slow.close()
        ends.append((theirs, sock, fds))
    server.call(lambda: [server.link._drop(peer, "test") for peer in list(server.link._peers)])

    sock, _, fds = server.welcome()

    for theirs, other, more in [*ends, (None, sock, fds)]:
        if theirs is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()  # a reset: close() comes back
        other.close()
        for fd in more:
            os.close(fd)


@pytest.mark.usefixtures("dear")
def test_a_packet_that_valved_fails_to_handle_never_leaves_a_dear_link_unread(server):
    sock, _, fds = server.welcome()
    server.loop.call_soon_threadsafe(server.loop.set_exception_handler, lambda *_: None)
    handled = []

    def fails_once(client, packet, descriptors):
        handled.append(packet.body.text)
        if len(handled) == 1:
            raise RuntimeError("a defect")

    server.world.register.handle = fails_once
    for text in ("first", "second"):
        say(sock, LinkType.NOTE, NoteMessage(code=1, h_client=0, h_channel=0, text=text))

    server.until(lambda: handled == ["first", "second"])
    sock.close()
    for fd in fds:
        os.close(fd)


def test_a_refusal_for_want_of_descriptors_never_costs_the_loop_what_its_client_likes(server, costs):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left(0):
        costs.are_due = True
        sock.connect(str(server.path))
        packet, _ = hear(sock)

    assert isinstance(packet.body, RefusedMessage)
    assert is_closed(sock)
    assert costs.by_loop == 0
    sock.close()
