"""Processes that knock at the link socket: one that does so without end, and one whose HELLO valved fails to answer."""

from __future__ import annotations

import os
import threading

from link_peers import COST_S, HELLO, greet, hear, is_closed, say

from valved.abi.link import LinkType, Welcome
from valved.clients.turns import SECOND_NS, Knocks
from valved.machine.processes import LinuxProcesses
from valved.model.events import EventKind
from valved.model.ids import Role

BURST_S = 0.01  # of the loop, for the HELLOs of one process
SHIM_WAITS_NS = 50_000_000  # of an online process, for its welcome
KNOCKS = 200


def test_a_process_that_knocks_without_end_never_keeps_another_waiting(server):
    """The kernel hands connections over in their order: those of the flooder stand before the other's."""
    flooder_pid, order = 0, []
    hello, slow = server.world.register.hello, threading.Event()

    def expensive(connection, packet, **more):
        order.append(connection.pid)
        slow.wait(COST_S)
        return hello(connection, packet, **more)

    server.world.register.hello = expensive
    told, tell = os.pipe()
    ends, end = os.pipe()

    def all_knock():  # while the loop stands
        nonlocal flooder_pid
        flooder_pid = os.fork()
        if flooder_pid == 0:
            socks = [server.connect() for _ in range(KNOCKS)]
            for sock in socks:
                say(sock, LinkType.HELLO, HELLO)
            os.write(tell, b"!")
            os.read(ends, 1)
            os._exit(0)
        os.read(told, 1)
        honest = server.connect()
        say(honest, LinkType.HELLO, HELLO)
        return honest

    honest = server.call(all_knock)
    packet, fds = hear(honest)
    before = order[: order.index(os.getpid())].count(flooder_pid)
    os.write(end, b"!")
    os.waitpid(flooder_pid, 0)

    assert isinstance(packet.body, Welcome)
    assert before <= 2 + BURST_S / COST_S
    honest.close()
    for fd in [*fds, told, tell, ends, end]:
        os.close(fd)


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

    waits = [knocks.wait_ns(pid, 1000, 0, lambda pid: False) for pid in (100, 200)]

    assert max(waits) < SHIM_WAITS_NS


def test_an_online_process_never_waits_for_what_its_last_link_cost(server):
    pid, world = os.getpid(), server.world
    start_time = LinuxProcesses().start_time(pid)
    server.call(lambda: world.node.launch(pid, start_time, Role.ONLINE, "chat"))

    for _ in range(3):
        greet(server)
    server.until(lambda: not server.link.peers)

    assert pid not in server.link._knocks._processes.of
