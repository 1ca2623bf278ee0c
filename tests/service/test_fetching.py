"""Descriptors that are lent by number: a hostile client harms nobody, and no file is fetched that is not its own."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import threading
from types import SimpleNamespace

import pytest
from link_peers import HELLO, hear, say

import valved.clients.lending as lending_room
from valved.abi.link import MAX_FDS, Ack, Channel, LinkType, RmClient, Schedule, Welcome, build, parse
from valved.clients.connection import LinkConnection, Received
from valved.clients.fetching import F_GETSIG, FETCHERS, LENT, UNFETCHED, Lent, fetch, fetched, split
from valved.clients.turns import BURST_NS

HONEST = 1 << 20
pytestmark = pytest.mark.skipif(not fetched(), reason="this kernel has no SO_PEERPIDFD")
F_SETSIG = 10
RM_CLIENT = RmClient(gpu_uuid=bytes([1]) * 16, device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)
CHANNEL = Channel(
    gpu_uuid=bytes([1]) * 16, device_instance=0, h_client=1, h_channel=2, cid=3, h_tsg=4, engine=1, compute=True
)


def lend(sock, numbers, *, body=RM_CLIENT, kind=LinkType.RM_CLIENT, mark=0, count=None, length=None):
    plain = build(kind, body, seq=7, sent_ns=0)
    trailer = struct.pack(f"<{len(numbers)}iII", *numbers, mark, len(numbers) if count is None else count)
    packet = bytearray(plain + trailer)
    packet[6:12] = struct.pack("<HI", kind | LENT, len(packet) if length is None else length)
    sock.send(packet)


def files(server):
    return [call[2] for call in server.world.gate.calls if call[0] == "give_rm_client" and call[2] >= 0]


def test_a_lent_file_proves_like_a_passed_one(server):
    sock, _, _ = server.welcome()
    fd = os.eventfd(0)

    lend(sock, [fd])

    assert hear(sock)[0].body == Ack(status=0)
    say(sock, LinkType.CHANNEL_ADD, CHANNEL)
    assert hear(sock)[0].body == Ack(status=0)
    os.close(fd)


def test_a_number_that_is_not_open_is_no_proof_and_no_end(server):
    sock, _, _ = server.welcome()

    lend(sock, [1 << 20])

    assert hear(sock)[0].body == Ack(status=UNFETCHED)
    say(sock, LinkType.RM_CLIENT, RM_CLIENT)
    assert hear(sock)[0].body.want_fd


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_file_without_the_mark_is_never_taken_for_the_one_that_was_meant(server, is_marked):
    sock, _, _ = server.welcome()
    fd = os.eventfd(0)
    if is_marked:
        fcntl.fcntl(fd, F_SETSIG, 40)
        assert fcntl.fcntl(fd, F_GETSIG) == 40

    lend(sock, [fd], mark=40)

    assert hear(sock)[0].body == Ack(status=0 if is_marked else UNFETCHED)
    os.close(fd)


@pytest.mark.parametrize(
    ("numbers", "changed"),
    [
        ([], {}),
        ([0, 0], {}),
        ([-1], {}),
        ([0], {"count": 0}),
        ([0], {"count": 2}),
        ([0], {"count": MAX_FDS + 1}),
        ([0], {"count": 0xFFFFFFFF}),
        ([0], {"length": 64}),
        ([0] * 65, {}),
        ([0], {"kind": LinkType.CHANNEL_ADD, "body": CHANNEL}),
        ([0], {"kind": LinkType.SCHEDULE_WAIT, "body": Schedule(h_client=1, h_object=2)}),
        ([0], {"kind": LinkType.HELLO, "body": HELLO}),
        ([0], {"kind": LinkType.ACK, "body": Ack()}),
    ],
)
def test_numbers_that_make_no_sense_end_the_link(server, numbers, changed):
    sock, _, _ = server.welcome()
    before = server.world.gating.counters.malformed

    lend(sock, numbers, **changed)

    assert sock.recv(4096) == b""
    server.until(lambda: server.world.gating.counters.malformed > before)


def test_numbers_before_a_hello_end_the_link(server):
    sock = server.connect()

    lend(sock, [0])

    assert sock.recv(4096) == b""


def test_no_number_is_looked_up_for_a_sender_that_is_another_process(server):
    """Whoever inherited the socket could name what the other has open."""
    sock, _, _ = server.welcome()
    if (pid := os.fork()) == 0:
        lend(sock, [0])
        os._exit(0)
    os.waitpid(pid, 0)

    assert sock.recv(4096) == b""
    assert not files(server)


def test_what_is_said_behind_lent_files_is_never_heard_before_them_and_others_never_wait(server, monkeypatch):
    may_go_on = threading.Event()

    def slow(pidfd, lent, closer):
        may_go_on.wait(200)
        return fetch(pidfd, lent, closer)

    monkeypatch.setattr(lending_room, "fetch", slow)
    sock, _, _ = server.welcome()
    fd = os.eventfd(0)

    lend(sock, [fd])
    say(sock, LinkType.CHANNEL_ADD, CHANNEL)
    _, welcome, _ = server.welcome()  # the loop goes on
    assert isinstance(welcome, Welcome)
    may_go_on.set()

    assert hear(sock)[0].body == Ack(status=0)
    assert hear(sock)[0].body == Ack(status=0)
    os.close(fd)


def test_a_peer_that_leaves_while_its_files_are_fetched_leaves_nothing_open(server, monkeypatch):
    may_go_on, got = threading.Event(), []

    def slow(pidfd, lent, closer):
        got.extend(fetch(pidfd, lent, closer))
        may_go_on.wait(200)
        return got

    monkeypatch.setattr(lending_room, "fetch", slow)
    sock, welcome, _ = server.welcome()
    reader, writer = os.pipe()
    lend(sock, [writer])
    server.until(lambda: got)
    server.call(lambda: server.world.register.leave(welcome.client, "test"))
    os.close(writer)

    may_go_on.set()

    assert os.read(reader, 1) == b""  # valved has closed its own
    os.close(reader)


def test_what_was_split_off_leaves_the_packet_as_it_was():
    plain = build(LinkType.RM_CLIENT, RM_CLIENT, seq=7, sent_ns=0)
    packet = bytearray(plain + struct.pack("<iiII", 5, 6, 40, 2))
    packet[6:12] = struct.pack("<HI", LinkType.RM_CLIENT | LENT, len(packet))

    data, lent = split(bytes(packet))

    assert data == plain
    assert lent == Lent((5, 6), 40)
    assert parse(data).body == RM_CLIENT
    assert split(plain) == (plain, None)


def test_numbers_that_are_not_open_are_never_lent_for_nothing(server, own_time, monkeypatch):
    """A client could keep a core busy with them."""
    fetch = lending_room.fetch

    def costly(*lent):
        own_time.spend(1000 * BURST_NS)
        return fetch(*lent)

    monkeypatch.setattr(lending_room, "fetch", costly)
    sock, _, _ = server.welcome()

    lend(sock, [1 << 20])

    assert hear(sock)[0].body == Ack(status=UNFETCHED)
    assert server.call(lambda: server.link._turns._each.of[os.getpid()].left_ns) < 0


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_client_is_never_told_that_its_files_cannot_be_had_where_valved_is_out_of_descriptors(
    server, monkeypatch, code
):
    """It would lend nothing more on that link. As with passed ones the link ends, and it comes again."""

    def fails(pidfd, *_):
        os.close(pidfd)
        raise OSError(code, "a test")

    monkeypatch.setattr(lending_room, "fetch", fails)
    sock, _, _ = server.welcome()

    lend(sock, [0])

    assert sock.recv(4096) == b""


def test_a_number_that_means_another_file_each_time_never_keeps_anything_open_or_another_waiting(server):
    """By dup2, between its packet and the fetch."""
    sock, _, _ = server.welcome()
    ends = [os.pipe() for _ in range(4)]
    number, ending = os.dup(ends[0][1]), threading.Event()

    def change():
        while not ending.is_set():
            for _, writer in ends:
                os.dup2(writer, number)

    changer = threading.Thread(target=change)
    changer.start()
    for _ in range(50):
        lend(sock, [number])
        assert hear(sock)[0].body in (Ack(status=0), Ack(status=UNFETCHED))
        server.call(lambda: None)
    ending.set()
    changer.join()
    sock.close()
    os.close(number)

    for reader, writer in ends:
        os.close(writer)
        assert os.read(reader, 1) == b""  # valved has closed its own
        os.close(reader)


def test_whoever_lends_what_cannot_be_fetched_never_has_the_answer_for_nothing(server, own_time, monkeypatch):
    sock, _, fds = server.welcome()
    server.rest()
    send = LinkConnection.send

    def dear(peer, kind, *more):
        own_time.spend(2 * BURST_NS)
        return send(peer, kind, *more)

    monkeypatch.setattr(LinkConnection, "send", dear)
    lend(sock, [1 << 20])

    assert hear(sock)[0].body == Ack(status=UNFETCHED)
    assert server.call(lambda: [bucket.left_ns < 0 for bucket in server.link._turns._each.of.values()]) == [True]
    sock.close()
    for fd in fds:
        os.close(fd)


@pytest.fixture
def lenders(monkeypatch):
    """`lenders(account, pid)`: a link of that process lends a file, whose fetch waits until `go_on` is set."""
    loop, begun, acted, go_on = asyncio.new_event_loop(), [], [], threading.Event()

    def fetch(pidfd, *_):
        begun.append(pidfd)
        if pidfd < HONEST:
            go_on.wait(200)
        return []

    monkeypatch.setattr(lending_room, "fetch", fetch)
    server = SimpleNamespace(
        loop=SimpleNamespace(remove_reader=lambda _: None, call_soon_threadsafe=loop.call_soon_threadsafe),
        most_fds=lambda _: 1,
        later=lambda _: SimpleNamespace(do=lambda _, job: job()),
        charge=lambda *_: None,
        go_on=lambda _: None,
        read_one=lambda peer, result: acted.append(peer.pid),
    )
    reader = lending_room.FetchedReader(server)
    packet = parse(build(LinkType.RM_CLIENT, RM_CLIENT, seq=7, sent_ns=0))

    def make(account, pid):
        peer = SimpleNamespace(
            client=1,
            pid=pid,
            is_open=True,
            wanted=0,
            fileno=int,
            pidfd=lambda: pid,
            closer=None,
            turn=(account, pid),
            lane=SimpleNamespace(account=account),
        )
        lent = Lent((0,), 0)
        reader.read(peer, Received(packet, [], pid, lent), lent)
        return peer

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.001)

    make.begun, make.acted, make.go_on, make.line = begun, acted, go_on, reader._line
    make.until = lambda condition: loop.run_until_complete(asyncio.wait_for(until(condition), 200))
    yield make
    loop.close()


def test_fetches_that_wait_never_keep_another_process_or_another_account_waiting(lenders):
    """A client chooses how long its exec takes, and the kernel fetches nothing from it meanwhile."""
    for _ in range(FETCHERS):
        lenders("hostile", 1)  # many links of one process
    lenders("hostile", HONEST)
    lenders.until(lambda: lenders.acted == [HONEST])
    for pid in range(2, 2 * FETCHERS):
        lenders("hostile", pid)
    lenders("another", HONEST + 1)

    lenders.until(lambda: lenders.acted == [HONEST, HONEST + 1])
    assert len(lenders.begun) == lending_room.OF_ACCOUNT + 2
    lenders.go_on.set()
    lenders.until(lambda: len(lenders.acted) == 3 * FETCHERS)


@pytest.mark.parametrize("accounts", [1, FETCHERS // lending_room.OF_ACCOUNT])
def test_links_that_end_before_their_turn_never_stay_in_line(lenders, accounts):
    """While fetches of its account wait, or of others all that there are: a client may come and go without end."""
    for number in range(accounts * lending_room.OF_ACCOUNT):
        lenders(f"hostile {number % accounts}", number)
    for number in range(100):
        lenders("hostile 0", 1000 + number).is_open = False
    assert lenders.line

    lenders("hostile 0", 2000).is_open = False
    lenders("hostile 0", 2001)

    assert lenders.line.take().peer.pid == 2001
    assert not lenders.line
    lenders.go_on.set()
    lenders.until(lambda: len(lenders.acted) == accounts * lending_room.OF_ACCOUNT)
