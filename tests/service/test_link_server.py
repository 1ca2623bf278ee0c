"""Real sockets, real descriptors, hostile peers; the services behind are those of the virtual node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
import time
from unittest import mock

import pytest
from lent_fds import lend
from link_peers import COST_S, HELLO, Server, greet, hear, is_closed, never_closing, say, stop_reading
from scarce import left, opened

from valved.abi.link import (
    Ack,
    Channel,
    EndingMessage,
    Hello,
    LinkType,
    RefusedMessage,
    RmClient,
    Schedule,
    build,
)
from valved.clients import outbox
from valved.clients.arrivals import PENDING_PER_PROCESS
from valved.clients.deaf import Unheard
from valved.clients.dear import CORE_BURST_NS, DearAccounts, LinkLane
from valved.clients.server import LinkServer
from valved.clients.turns import SHARE
from valved.errors import told
from valved.machine.helpers import Closer
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role


def test_a_hello_is_welcomed_with_four_descriptors(server):
    sock, welcome, fds = server.welcome()

    assert len(fds) == 4
    assert welcome.role == Role.OFFLINE
    assert all(os.fstat(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    sock.close()


def test_a_refusal_is_sent_before_the_end(server):
    sock = server.connect()
    say(sock, LinkType.HELLO, Hello(**{**fields(HELLO), "wanted_role": int(Role.ONLINE)}))

    packet, _ = hear(sock)

    assert isinstance(packet.body, RefusedMessage)
    assert is_closed(sock)


def test_what_a_process_said_before_it_ended_is_never_taken_for_words_of_the_next_with_its_number(server, monkeypatch):
    """It left its end of the link to another, and the number goes round while its HELLO waits."""
    may_read, sock = threading.Event(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.loop.call_soon_threadsafe(may_read.wait)
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            sock.connect(str(server.path))
            say(sock, LinkType.HELLO, HELLO)
        os._exit(0)
    os.waitpid(pid, 0)
    living = ProcessId(pid=pid, start_time=1)
    monkeypatch.setattr(server.world.processes, "ancestors", lambda number, most=64: [living] if number == pid else [])
    may_read.set()

    assert is_closed(sock)
    assert not server.call(lambda: [c for c in server.world.books.clients.values() if c.process.pid == pid])


def fields(value):
    return {name: getattr(value, name) for name in value.__slots__}


def test_the_end_of_the_link_is_the_end_of_the_client(server):
    sock, welcome, _ = server.welcome()

    sock.close()

    server.until(lambda: welcome.client not in server.world.books.clients)


def test_requests_are_acknowledged_with_their_number(server):
    sock, _, _ = server.welcome()
    show_rm_client(sock)
    channel = Channel(
        gpu_uuid=bytes([1]) * 16, device_instance=0, h_client=1, h_channel=2, cid=3, h_tsg=4, engine=1, compute=True
    )

    say(sock, LinkType.CHANNEL_ADD, channel)
    packet, _ = hear(sock)

    assert (packet.type, packet.seq, packet.body) == (LinkType.ACK, 7, Ack(status=0))


def show_rm_client(sock, h_client=1):
    """With a file that its prover believes."""
    body = RmClient(
        gpu_uuid=bytes([1]) * 16, device_instance=0, h_client=h_client, h_device=2, h_subdevice=3, has_fd=True
    )
    fd = os.eventfd(0)
    say(sock, LinkType.RM_CLIENT, body, [fd])
    os.close(fd)
    assert hear(sock)[0].body == Ack(status=0)


def test_a_passed_descriptor_arrives_and_ours_stays_ours(server):
    sock, _, _ = server.welcome()
    fd = os.eventfd(0)
    body = RmClient(gpu_uuid=bytes(16), device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)

    say(sock, LinkType.RM_CLIENT, body)
    assert hear(sock)[0].body == Ack(status=0, want_fd=True)  # what a shim of 0.1 waits for
    say(sock, LinkType.RM_CLIENT, body, [fd])
    hear(sock)
    server.until(lambda: any(call[0] == "give_rm_client" and call[2] >= 0 for call in server.world.gate.calls))

    given = [call for call in server.world.gate.calls if call[0] == "give_rm_client" and call[2] >= 0]
    assert given[0][2] >= 0
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "send"),
    [
        ("noise", lambda sock: sock.send(os.urandom(64))),
        ("one byte", lambda sock: sock.send(b"x")),
        ("too long", lambda sock: sock.send(bytes(4096))),
        ("a request before HELLO", lambda sock: say(sock, LinkType.SCHEDULE_WAIT, Schedule(h_client=1, h_object=2))),
        ("an answer from a client", lambda sock: say(sock, LinkType.ACK, Ack())),
        ("descriptors on a HELLO", lambda sock: say(sock, LinkType.HELLO, HELLO, [0])),
        ("a cut packet", lambda sock: sock.send(build(LinkType.HELLO, HELLO, seq=1, sent_ns=0)[:-1])),
    ],
)
def test_a_peer_that_makes_no_sense_is_counted_and_closed(server, name, send):
    sock = server.connect()

    try:
        send(sock)
    except PermissionError:
        return  # Linux 6.16 and later refuse descriptors for us (SO_PASSRIGHTS)

    assert is_closed(sock), name
    assert server.world.gating.counters.malformed == 1


def test_a_welcomed_client_that_turns_hostile_is_removed(server):
    sock, welcome, _ = server.welcome()

    say(sock, LinkType.HELLO, HELLO)

    assert is_closed(sock)
    server.until(lambda: welcome.client not in server.world.books.clients)


def test_descriptors_that_nobody_asked_for_are_not_kept(server):
    lend()  # the fakes' own
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sock, _, kept = server.welcome()
        say(sock, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2), [0, 1, 2])
        assert is_closed(sock)
        sock.close()
        for fd in kept:
            os.close(fd)

    server.until(lambda: server.link.peers == 0)
    server.until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_peer_that_says_nothing_is_closed(tmp_path):
    with Server(tmp_path, hello_s=0.01) as server:
        assert is_closed(server.connect())


def test_silent_peers_cannot_take_all_places(server):
    silent = [server.connect() for _ in range(PENDING_PER_PROCESS + 20)]

    server.until(lambda: server.world.gating.counters.malformed >= 20)
    for sock in silent:
        sock.close()
    server.until(lambda: server.link.peers == 0)
    sock, _, _ = server.welcome()
    sock.close()


def test_a_client_that_does_not_read_is_dropped_and_stops_nobody(server, monkeypatch):
    """valved never waits to send (link.h)."""
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.05)
    deaf, welcome, _ = server.welcome()

    def drive():
        for _ in range(1000):
            server.world.register.send(welcome.client, LinkType.ACK, Ack(), 1)
        return welcome.client not in server.world.books.clients

    server.until(drive)
    deaf.close()
    other, _, _ = server.welcome()
    other.close()


def box_for(loop, sock, broken):
    return outbox.Outbox(loop, sock, broken, LinkLane(DearAccounts(loop), "a service", is_awaited=True))


def test_a_packet_that_waits_in_valved_never_counts_as_arrived():
    """It dies with valved; what lies in the peer's socket does not."""
    loop = asyncio.new_event_loop()
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arrived: list[int] = []
    box = box_for(loop, ours, pytest.fail)
    count = 0
    while len(arrived) == count:  # until the socket is full
        count += 1
        assert box.send(bytes(1024), (), lambda: arrived.append(len(arrived)))

    read = 0
    while len(arrived) < count:
        assert len(arrived) == count - 1
        read += bool(peer.recv(2048))
        loop.run_until_complete(asyncio.sleep(0))
    box.close()
    ours.close()
    assert read + sum(1 for _ in iter(lambda: len(peer.recv(2048)), 0)) == count
    peer.close()
    loop.close()


def test_a_peer_is_never_given_up_for_packets_that_wait_for_a_thread(monkeypatch):
    """Whoever shares its account may have used up what threads do for it: for a minute, and it reads all the while."""
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.001)
    loop, broken, looks, look = asyncio.new_event_loop(), [], [], outbox.Outbox._look
    monkeypatch.setattr(outbox.Outbox, "_look", lambda box, taken: (looks.append(taken), look(box, taken)))
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    accounts = DearAccounts(loop)
    accounts.took("account", 60 * CORE_BURST_NS)
    box = outbox.Outbox(loop, ours, broken.append, LinkLane(accounts, "account"))

    assert box.send(b"packet", ())
    while len(looks) < 2 and not broken:
        loop.run_until_complete(asyncio.sleep(0.001))

    assert not broken
    box.close()
    ours.close()
    peer.close()
    loop.close()


def test_a_client_that_reads_is_never_dropped_for_one_that_did_not():
    """Whoever hears that a packet has arrived may send at once, and find the socket full again."""
    answers = [BlockingIOError, None, BlockingIOError, None]  # of the socket, in turn
    peer, loop, timers = mock.Mock(), mock.Mock(), []

    def later(*_):
        timers.append(mock.Mock())
        return timers[-1]

    loop.call_later.side_effect = later
    peer.sendmsg.side_effect = answers
    box = box_for(loop, peer, pytest.fail)

    assert box.send(b"first", (), lambda: box.send(b"second", ()))
    flush = loop.add_writer.call_args.args[1]
    flush()
    flush()

    assert peer.sendmsg.call_count == len(answers)
    assert timers
    assert all(one.cancel.called for one in timers)


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ETOOMANYREFS])
def test_a_peer_is_never_taken_for_broken_as_the_kernel_has_no_room_for_what_valved_sends(code):
    peer, broken = mock.Mock(), []
    peer.sendmsg.side_effect = OSError(code, "a test")

    assert not box_for(mock.Mock(), peer, broken.append).send(b"packet", ())
    assert [*map(type, broken)] == [Unheard]


def test_copies_that_could_not_all_be_made_never_stay_open():
    peer, broken, none_left = mock.Mock(), [], OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    peer.sendmsg.side_effect = BlockingIOError
    box, fd = box_for(mock.Mock(), peer, broken.append), os.open(os.devnull, os.O_RDONLY)
    before = opened()

    with mock.patch("os.dup", side_effect=[os.dup(fd), os.dup(fd), none_left]):
        assert not box.send(b"packet", (fd, fd, fd))

    assert not opened() - before
    assert [*map(type, broken)] == [Unheard]
    os.close(fd)


def test_nobody_is_called_malformed_for_what_valved_had_no_descriptor_for(server):
    sock, welcome, _ = server.welcome()
    body = RmClient(gpu_uuid=bytes(16), device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)
    server.rest()
    with left(0):
        say(sock, LinkType.RM_CLIENT, body, [sock.fileno()])
        server.until(lambda: welcome.client not in server.world.books.clients)

    assert server.world.gating.counters.malformed == 0
    assert server.world.events(EventKind.LEFT)[-1].reason == "valved is out of descriptors"
    sock.close()


def test_a_thousand_conversations_leave_no_descriptor_behind(server):
    sock, _, fds = server.welcome()
    for fd in fds:
        os.close(fd)
    sock.close()
    server.until(lambda: not server.world.books.clients)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        sock, _, fds = server.welcome()
        for fd in fds:
            os.close(fd)
        sock.close()

    server.until(lambda: not server.world.books.clients)
    server.until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


def test_a_new_server_takes_the_path_over_without_a_gap(server, tmp_path):
    """A client never meets a half-made socket: the path always leads to a server that listens."""
    sock, _, _ = server.welcome()
    second = LinkServer(server.loop, server.world.register, server.path, hello_s=1, closer=Closer())

    server.call(second.start)
    server.connect().close()
    server.call(second.stop)
    sock.close()


def test_starts_that_fail_never_fill_the_run_folder_and_name_what_stands_in_their_way(server, tmp_path):
    """A service manager starts valved again and again, each time with another number in the name of the new socket."""
    folder = tmp_path / "other"
    (folder / "link.sock").mkdir(parents=True)
    other = LinkServer(server.loop, server.world.register, folder / "link.sock", hello_s=1, closer=Closer())

    with pytest.raises(OSError, match="Is a directory") as raised:
        server.call(other.start)

    assert told(raised.value) == f"{folder / 'link.sock'}: Is a directory"
    assert sorted(path.name for path in folder.iterdir()) == ["client", "link.sock"]


def test_containers_reach_the_link_through_a_folder_that_holds_nothing_else(tmp_path):
    """The run folder itself has the API in it, and file modes do not stop a container's root."""
    (tmp_path / "valved.sock").touch()
    with Server(tmp_path) as server:
        server.path = tmp_path / "client/link.sock"
        _, welcome, fds = server.welcome()
        for fd in fds:
            os.close(fd)

        assert welcome.client
        assert [path.name for path in (tmp_path / "client").iterdir()] == ["link.sock"]


# Descriptors that cannot be closed


@pytest.mark.parametrize("how", ["read", "queued"])
def test_a_descriptor_that_takes_long_to_close_never_stops_the_loop(server, how):
    """Neither one that is read and not wanted, nor one that lies in the queue of a peer that is dropped."""
    hostile, _, kept = server.welcome()
    slow, theirs = never_closing()
    if how == "queued":
        server.call(lambda: stop_reading(server))
        say(hostile, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2), [slow.fileno()])
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
        slow.close()
        server.call(lambda: [server.link._drop(peer, "test") for peer in list(server.link._peers)])
    else:
        say(hostile, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2), [slow.fileno()])
        threading.Thread(target=slow.close).start()  # who closes last waits: that may be this side
    assert is_closed(hostile)

    sock, _, fds = server.welcome()  # while a thread waits in close()

    assert len(fds) == 4
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for fd in kept + fds:
        os.close(fd)
    theirs.close()  # a reset: close() comes back
    sock.close()


def test_a_hello_never_counts_for_another_process_than_sent_it(server):
    """A connection can be handed on: the one that connected may be gone, and its number somebody else's."""
    sock = server.connect()
    child = os.fork()
    if child == 0:
        say(sock, LinkType.HELLO, HELLO)
        os._exit(0)
    os.waitpid(child, 0)

    assert is_closed(sock)
    assert not server.world.books.clients


def test_a_child_with_the_link_never_ends_its_parent(server):
    sock, _, _ = server.welcome()
    if os.fork() == 0:
        sock.send(build(LinkType.ENDING, EndingMessage(signal=15), seq=3, sent_ns=0))
        os._exit(0)
    os.wait()

    say(sock, LinkType.ENDING, EndingMessage(signal=15))

    assert [hear(sock)[0].seq] == [7], "what the child said has no answer"


def test_a_burst_of_orders_never_costs_a_peer_its_link(server):
    """160 ranges of an engine are 160 packets at once; a shim that is off the CPU reads them a moment later."""
    sock, welcome, fds = server.welcome()
    give = os.eventfd(0)

    def burst():
        return [
            server.world.register.send(welcome.client, LinkType.ACK, Ack(status=number), number, (give,))
            for number in range(600)
        ]

    assert all(server.call(burst))
    heard = []
    for _ in range(600):
        packet, passed = hear(sock)
        heard.append(packet.seq)
        assert len(passed) == 1
        os.close(passed[0])

    assert heard == list(range(600))
    assert welcome.client in server.world.books.clients
    for fd in [*fds, give]:
        os.close(fd)
    sock.close()


def test_a_flood_never_keeps_others_from_being_welcomed(server):
    """Messages without an answer, as fast as they can be sent: its share of the loop is bounded, whatever they are."""
    flooder, _, fds = server.welcome()
    show_rm_client(flooder)
    ending = threading.Event()
    handle = server.world.register.handle
    slow = threading.Event()
    handled = []

    def expensive(client, packet, passed):
        slow.wait(COST_S)
        handled.append(client)
        handle(client, packet, passed)

    server.world.register.handle = expensive
    flooder.setblocking(False)

    def flood():
        while not ending.is_set():
            try:
                say(flooder, LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=2))
            except BlockingIOError:
                slow.wait(0.0005)

    thread = threading.Thread(target=flood)
    thread.start()
    buckets = server.link._turns._each
    server.until(lambda: buckets.of and min(bucket.left_ns for bucket in buckets.of.values()) <= 0)
    began, seen = time.monotonic(), len(handled)
    for _ in range(40):
        greet(server)
    messages = len(handled) - seen
    took_s = time.monotonic() - began
    ending.set()
    thread.join()

    assert messages <= 20 + took_s * SHARE / COST_S  # the slower this machine, the fewer of them fit into its share
    flooder.close()
    for fd in fds:
        os.close(fd)
