"""Processes that knock at the link socket: such as do so without end, and one whose HELLO valved fails to answer.

How long a HELLO waits is told by what valved does before it: a test asserts how much work, not how much time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
from link_peers import COST_S, HELLO, Crowd, Knocker, greet, hear, is_closed, say

import valved.clients.arrivals
from valved.abi.link import LinkType, Schedule, Welcome, build
from valved.clients.accounts import account_of
from valved.clients.arrivals import PENDING, PENDING_PER_PROCESS
from valved.clients.dear import CORE_BURST_NS
from valved.clients.server import BACKLOG, LinkConnection
from valved.clients.turns import PASS_NS, SECOND_NS, Knocks
from valved.machine.callers import Accepted
from valved.machine.processes import LinuxProcesses
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ProcessId, Role
from valved.state.saved import VERSION, SavedClient, SavedState

SHIM_WAITS_NS = 50_000_000  # of an online process, for its welcome
PROCESSES = 20
EACH = BACKLOG // PROCESSES - 1  # all of them wait in the kernel's queue, and there is room for one more
SPOKEN = build(LinkType.HELLO, HELLO, seq=7, sent_ns=0)
# What is done before a HELLO that just came: the rest of one pass of the loop, and one job of each kind in the next,
# where each job costs as much as a pass has.
AT_ONCE = 6
FEW = 8
NOBODYS_PID = 1 << 23  # beyond what Linux gives out


@pytest.fixture
def crowd(server):
    crowd = Crowd(server)
    yield crowd
    crowd.end()


@pytest.fixture
def judged(server, own_time):
    """The processes whose HELLOs were judged, in order. Each HELLO costs as much as a pass of the loop has."""
    order, slow = [], threading.Event()
    hello = server.world.register.hello

    def expensive(connection, packet, **more):
        order.append(connection.pid)
        slow.wait(COST_S)
        own_time.spend(int(COST_S * 1e9))
        return hello(connection, packet, **more)

    server.world.register.hello = expensive
    return order


def knock(server):
    sock = server.connect()
    say(sock, LinkType.HELLO, HELLO)
    return sock


def welcomed(sock):
    packet, fds = hear(sock)
    for fd in fds:
        os.close(fd)
    sock.close()
    return isinstance(packet.body, Welcome)


def claim(server, pid):
    start_time = LinuxProcesses().start_time(pid)
    server.call(lambda: server.world.node.launch(pid, start_time, Role.ONLINE, "chat"))


def spoken(crowd, times=EACH):
    return lambda: crowd.connect(times, SPOKEN)


def is_welcomed_beside(server, crowd, act):
    """Many processes act while the loop stands, and then this one knocks."""

    def all_act():
        crowd.add(PROCESSES, act)
        return knock(server)

    return welcomed(server.call(all_act))


def test_the_cost_of_a_hello_in_these_tests_is_a_pass_of_the_loop():
    assert COST_S * 1e9 >= PASS_NS


def test_a_process_that_knocks_without_end_never_keeps_another_waiting(server, crowd, judged):
    """The kernel hands connections over in their order: those of the flooder stand before the other's."""

    def all_knock():  # while the loop stands
        crowd.add(1, spoken(crowd, BACKLOG - 1))
        return knock(server)

    honest = server.call(all_knock)

    assert welcomed(honest)
    assert judged.index(os.getpid()) <= 2


@pytest.mark.parametrize("who", ["claimed itself", "a worker of one"])
def test_many_processes_of_root_never_keep_a_process_of_a_claim_waiting(server, crowd, judged, who):
    """Nobody claimed the worker: it is known by its parent."""
    honest = Knocker(server, below=1 if who == "a worker of one" else 0)
    claim(server, honest.top)

    def all_knock():
        crowd.add(PROCESSES, spoken(crowd))
        honest.knock()

    server.call(all_knock)

    assert honest.is_welcomed()
    assert judged.index(honest.pid) <= AT_ONCE


def test_many_processes_of_one_account_never_keep_another_account_waiting(server, crowd, judged):
    """Root is in every container: there an account is a control group."""
    server.world.processes.homes[os.getpid()] = "/kubepods/pod-of-another"

    assert is_welcomed_beside(server, crowd, spoken(crowd))
    assert judged.index(os.getpid()) <= AT_ONCE


def test_silent_connections_of_many_processes_never_push_out_anothers(server, crowd):
    """There is a bound for all of them together; those give way of which there are most."""
    early = server.connect()
    crowd.add(PENDING // PENDING_PER_PROCESS + 4, lambda: crowd.connect(PENDING_PER_PROCESS + 2))

    server.until(lambda: server.world.gating.counters.malformed >= 2 * (PENDING // PENDING_PER_PROCESS))
    assert server.call(lambda: server.link.peers) <= PENDING
    say(early, LinkType.HELLO, HELLO)
    assert welcomed(early)


@pytest.mark.parametrize("what", ["silence", "noise", "too long", "too short", "descriptors"])
def test_what_is_no_hello_never_costs_more_than_a_read(server, crowd, judged, what):
    packets = {"silence": None, "noise": os.urandom(64), "too long": bytes(60_000), "too short": b"x"}

    def send():
        if what in packets:
            crowd.connect(EACH, packets[what])
            return
        for _ in range(EACH):
            sock = server.connect()
            with contextlib.suppress(PermissionError):  # Linux 6.16 and later
                say(sock, LinkType.HELLO, HELLO, [0] * 200)
            sock.detach()

    assert is_welcomed_beside(server, crowd, send)
    assert judged == [os.getpid()]


def test_a_silent_connection_never_costs_a_read(server, crowd, monkeypatch):
    """Whoever opens many would have a part of each pass of the loop for them."""
    read, receive = [], LinkConnection.receive_aside
    monkeypatch.setattr(LinkConnection, "receive_aside", lambda peer: (read.append(peer.pid), receive(peer))[1])

    def all_knock():
        crowd.add(PROCESSES, lambda: crowd.connect(EACH))
        return knock(server)

    honest = server.call(all_knock)

    assert welcomed(honest)
    assert set(read) == {os.getpid()}


def test_offline_processes_with_stopped_channels_never_stand_before_online_work(server, crowd, judged):
    """Each process can come to that by itself: it closes its link while its channels are off."""
    leftovers, honest = server.world.register.channels.leftovers, Knocker(server)
    claim(server, honest.top)

    def all_knock():
        crowd.add(PROCESSES, spoken(crowd, 1))
        for pid in crowd.pids:
            channel = ChannelRef(gpu=0, h_client=pid, h_channel=1, cid=1, h_tsg=1, engine=1, compute=True)
            owner = ProcessId(pid=pid, start_time=LinuxProcesses().start_time(pid))
            leftovers.put(channel, owner, has_left=True)
        honest.knock()

    server.call(all_knock)

    assert honest.is_welcomed()
    assert judged.index(honest.pid) <= AT_ONCE
    server.call(lambda: leftovers.take_where(lambda _: True))


@pytest.mark.parametrize("what", ["silence", "a hello"])
def test_connections_that_are_gone_again_never_keep_another_waiting(server, crowd, judged, what):
    """They are in the kernel's queue all the same. A shim whose HELLO waits for too long gives up and says another:
    where the first is answered the second waits for too long, too, and so on for ever."""

    def come_and_go():
        for _ in range(EACH):
            sock = server.connect()
            if what == "a hello":
                sock.send(SPOKEN)
            sock.close()

    assert is_welcomed_beside(server, crowd, come_and_go)
    assert judged == [os.getpid()]


def test_a_crowd_that_dies_at_once_never_keeps_a_hello_waiting(server, crowd):
    """Each goodbye costs: links end, and processes."""
    done, slow = [], threading.Event()
    register = server.world.register
    leave, hello = register.leave, register.hello

    def expensive(client, reason):
        if client in server.world.books.clients:
            done.append("leave")
            slow.wait(COST_S)
        leave(client, reason)

    crowd.add(PROCESSES, lambda: [server.welcome()[0].detach() for _ in range(4)])
    register.leave = expensive
    register.hello = lambda *args, **more: (done.append("hello"), hello(*args, **more))[1]

    def all_die():
        crowd.end()
        return knock(server)

    honest = server.call(all_die)

    assert welcomed(honest)
    assert done.index("hello") <= AT_ONCE
    server.until(lambda: done.count("leave") == 4 * PROCESSES + 1)


@pytest.mark.parametrize("dear", ["none", "those of another account", "all of its account"])
def test_messages_of_many_links_never_keep_a_hello_waiting(server, dear):
    """Each link has its turn in each pass of the loop, and a process may have many links. On many machines all
    services of a user are one account, and interrupts make its packets dear."""
    done, slow = [], threading.Event()
    register = server.world.register
    handle, hello = register.handle, register.hello
    links, honest = [server.welcome() for _ in range(30)], Knocker(server)
    if dear != "all of its account":
        server.world.processes.homes[honest.pid] = "/kubepods/pod-of-another"
    if dear != "none":
        [account] = {peer.lane.account for peer in server.link._peers}
        server.call(lambda: server.link.dear.took(account, CORE_BURST_NS // 2))

    def expensive(client, packet, fds):
        done.append("message")
        slow.wait(COST_S)
        handle(client, packet, fds)

    register.handle = expensive
    register.hello = lambda *args, **more: (done.append("hello"), hello(*args, **more))[1]

    def all_say():
        for sock, _, _ in links:
            for _ in range(4):
                say(sock, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2))
        honest.knock()

    server.call(all_say)

    assert honest.is_welcomed()
    assert done.index("hello") <= AT_ONCE
    for sock, _, fds in links:
        sock.close()
        for fd in fds:
            os.close(fd)


def test_a_full_queue_of_the_kernel_never_stays_full_for_long(server, crowd, judged):
    """Whoever does not wait in connect() is told EAGAIN meanwhile; a shim tries again each millisecond."""
    taken, come = [], server.link.arrivals.come

    def counted(accepted):
        taken.append(len(accepted))
        return come(accepted)

    server.link.arrivals.come = counted
    server.call(lambda: crowd.add(1, spoken(crowd, BACKLOG)))

    server.until(lambda: sum(taken) == BACKLOG)
    assert len(taken) <= 2


def test_a_hello_that_valved_fails_to_answer_never_leaves_a_connection_that_nobody_ends(server):
    def fails(*_):
        raise RuntimeError("a defect")

    server.loop.call_soon_threadsafe(server.loop.set_exception_handler, lambda *_: None)
    server.world.gating.listener.clients_changed, joined = fails, server.world.gating.listener.clients_changed
    sock = server.connect()
    say(sock, LinkType.HELLO, HELLO)

    assert is_closed(sock)
    server.world.gating.listener.clients_changed = joined
    server.until(lambda: not server.world.books.clients and not server.link.peers)
    sock.close()


def test_a_hello_that_valved_fails_to_answer_never_keeps_the_next_of_its_process_unread(server):
    register, failed = server.world.register, []
    hello = register.hello

    def fails_once(*args, **more):
        if not failed:
            failed.append(1)
            raise RuntimeError("a defect")
        return hello(*args, **more)

    server.loop.call_soon_threadsafe(server.loop.set_exception_handler, lambda *_: None)
    register.hello = fails_once

    first, second = server.call(lambda: (knock(server), knock(server)))

    assert is_closed(first)
    assert welcomed(second)
    first.close()


@pytest.fixture
def in_debt(server, monkeypatch):
    """A user who has to wait for an hour. `in_debt(number)`: one of its processes connects. Returns its end."""
    monkeypatch.setattr(valved.clients.arrivals, "PENDING", FEW)
    arrivals, ends = server.link.arrivals, []
    server.call(lambda: arrivals._knocks._accounts.took(account_of(1000, ""), 3600 * SECOND_NS, time.monotonic_ns()))

    def come(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(ours)
        server.call(lambda: arrivals.come([Accepted(theirs.detach(), NOBODYS_PID + number, 1000)]))
        return ours

    yield come
    for end in ends:
        end.close()


def test_processes_that_were_turned_away_never_stay_in_line(server, in_debt):
    """Each of them would be asked after in each pass of the loop, for as long as its account has to wait."""
    for number in range(4 * FEW):
        in_debt(number)

    line = server.link.arrivals._lines[1]
    assert server.call(lambda: len(list(iter(line.take, None)))) <= FEW + 1


def test_the_last_connection_of_a_process_never_makes_room_for_one_that_it_gave_up(server, in_debt):
    for _ in range(3):
        last = [in_debt(number) for number in range(FEW)]

    for end in last:
        with pytest.raises(BlockingIOError):
            end.recv(1, socket.MSG_DONTWAIT)
    assert server.call(lambda: server.link.peers) == FEW


def test_offline_processes_of_a_predecessor_never_wait_for_what_their_account_took(server, in_debt, judged):
    """They would be stopped for seconds after a restart. Each has one HELLO of its own for each client it was."""
    world, back = server.world, range(FEW - 2)
    clients = [
        SavedClient(pid=NOBODYS_PID + number, start_time=1, role=int(Role.OFFLINE), service=9, channels=[])
        for number in back
    ]
    empty = {"counters": {}, "refusals": {}, "gpus": [], "services": [], "next_client": 1, "next_service": 1}
    saved = SavedState(version=VERSION, boot_id="boot", driver=world.gate.driver_version(), clients=clients, **empty)
    server.call(lambda: world.handover.restore(saved, 2.0))

    for number in (FEW - 1, *back, 0):  # a stranger first; the last one knocks again
        in_debt(number).send(SPOKEN)

    server.until(lambda: len(judged) >= len(back))
    assert sorted(judged) == [NOBODYS_PID + number for number in back]
    assert server.call(lambda: server.link.peers) == 2


def test_one_user_never_pushes_the_decisions_out_of_the_journal(server):
    world = server.world
    server.call(lambda: world.journal.emit(EventKind.PAUSED, reason="by alice"))
    ring = world.config.ring_events

    server.call(lambda: [world.register.malformed(pid, 1000, "noise") for pid in range(2 * ring)])

    kept = server.call(lambda: world.journal.recent(lambda _: True, 2 * ring))
    assert kept[0].kind is EventKind.PAUSED
    assert world.gating.counters.malformed == 2 * ring


def test_a_goodbye_that_the_driver_holds_up_never_keeps_the_next_process_of_the_user_out():
    """It costs what its channels cost, which were paid for as they came, and for how long the driver is busy."""
    knocks = Knocks()
    for pid in range(100, 108):
        knocks.took(pid, 1000, SECOND_NS // 2, 0)

    waits = [knocks.wait_ns(pid, 1000, 0) for pid in (100, 200)]

    assert max(waits) < SHIM_WAITS_NS


def test_an_online_process_never_waits_for_what_its_last_link_cost(server):
    pid = os.getpid()
    claim(server, pid)

    for _ in range(3):
        greet(server)
    server.until(lambda: not server.link.peers)

    assert pid not in server.link.arrivals._knocks._processes.of
