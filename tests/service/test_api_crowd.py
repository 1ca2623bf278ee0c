"""The API beside a user who takes all he can: connections, watchers, calls; and a reader that never reads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import grpc
import pytest
from link_peers import never_closing
from node_world import World
from valve.v1 import node_pb2, node_pb2_grpc

from valved.model.events import EventKind
from valved.paths import grpc_address
from valved.rpc import aside, convert, front
from valved.rpc.front import TURNED_AWAY_AT_ONCE, Caller, Crowd, Front, Places
from valved.rpc.node import NodeServicer, ViewServicer
from valved.rpc.pace import CallPace, Rate
from valved.rpc.server import CONNECTIONS, GrpcServer, start

PATIENCE_S = 200.0  # ends only a hung test
NO_OWN = frozenset[int]()  # nobody is root or valved's own user: this process is a user like any other
TINY = Places(per_user=2, others=3, own=2)
ANY_PACE = Rate(per_user=1e9, others=1e9, burst_s=1.0)
SLOW_PACE = Rate(per_user=10.0, others=20.0, burst_s=1.0)


def run(story):
    async def within():
        return await asyncio.wait_for(story(), PATIENCE_S)

    return asyncio.run(within())


@contextlib.asynccontextmanager
async def served(folder, *, connections=CONNECTIONS, watchers=TINY, own=NO_OWN, slow_s=60.0, calls=ANY_PACE):
    """(world, path) of a virtual node whose API is open."""
    world = World(folder)
    path = folder / "valved.sock"
    servicer = NodeServicer(world.node, Crowd("watchers", watchers, own), slow_s=slow_s, calls=calls)
    server = GrpcServer(servicer, path, Crowd("connections", connections, own))
    await server.start(0o666, -1)
    try:
        yield world, path
    finally:
        await server.stop(0)
        del server
        gc.collect()  # gRPC's object ends its threads by the loop, which must still run


@contextlib.asynccontextmanager
async def stub_of(path):
    """A stub with a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(grpc_address(path), options=options) as channel:
        yield node_pb2_grpc.NodeStub(channel)


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("held", "asks", "refused"),
    [
        ([], 7, ""),
        ([7], 7, ""),
        ([7, 7], 7, "user 7"),
        ([7, 7], 8, ""),
        ([7, 7, 8], 9, "all users"),
        ([7, 7, 8], 0, ""),
        ([7, 7, 8, 0], 0, ""),
        ([0, 0], 0, "root"),
        ([0, 0], 7, ""),
    ],
)
def test_no_user_takes_the_places_of_another_or_of_root(held, asks, refused):
    crowd = Crowd("watchers", TINY, frozenset({0}))
    for uid in held:
        crowd.enter(uid)

    refusal = crowd.refusal(asks)

    assert (refused in refusal) if refused else refusal == ""


def test_who_leaves_makes_room():
    crowd = Crowd("watchers", TINY, frozenset({0}))
    crowd.enter(7)
    crowd.enter(7)
    crowd.leave(7)

    assert crowd.refusal(7) == ""


def test_the_name_of_a_peer_says_which_user_it_is():
    assert Caller.of("unix-abstract:valve-api-1000-welcome-00ff") == Caller(1000, True)
    assert Caller.of("unix-abstract:valve-api-0-turned_away-00ff") == Caller(0, False)


ATTACK = """
import os, select, socket, sys
os.setgid(65534), os.setuid(65534)
held = []
while True:
    one = socket.socket(socket.AF_UNIX)
    one.connect(sys.argv[1])
    held.append(one)
    try:
        one.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + bytes([4]) + bytes(5))
        if not one.recv(1):
            break
    except ConnectionError:
        break
print(len(held), flush=True)
sys.stdin.read()
"""


def test_a_user_who_opens_connections_without_end_never_keeps_root_out():
    async def story(folder):
        world = World(folder)
        server = await start(ViewServicer(world.node), folder / "view.sock", 0o666, -1)
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", ATTACK, str(folder / "view.sock"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        try:
            opened = int(await attacker.stdout.readline())
            async with stub_of(folder / "view.sock") as stub:
                status = await stub.GetStatus(node_pb2.GetStatusRequest())
        finally:
            attacker.kill()
            await attacker.wait()
            await server.stop(0)
        return opened, status.version

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        opened, version = run(lambda: story(folder))

    assert opened == CONNECTIONS.per_user + TURNED_AWAY_AT_ONCE + 1, "the last one was closed at once"
    assert version == "test"


def test_a_client_that_opens_watches_without_end_gets_a_few_and_a_named_error(tmp_path):
    async def story():
        async with served(tmp_path) as (world, path), stub_of(path) as first, stub_of(path) as second:
            calls = [stub.Watch(node_pb2.WatchRequest()) for stub in (first, second) for _ in range(3)]
            await until(lambda: sum(call.done() for call in calls) == len(calls) - TINY.per_user)
            refused = [call for call in calls if call.done()]
            codes = {await call.code() for call in refused}
            said = {await call.details() for call in refused}
            return codes, said, len(world.journal._watchers)

    codes, said, watchers = run(story)

    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all("no more watchers for user" in one for one in said)
    assert watchers == TINY.per_user


def test_a_reader_that_never_reads_is_ended_with_a_named_error_and_holds_no_queue(tmp_path):
    async def story():
        async with served(tmp_path, slow_s=0.2) as (world, path), stub_of(path) as stub:
            call = stub.Watch(node_pb2.WatchRequest())
            await call.initial_metadata()
            while world.journal._watchers:
                world.journal.emit(EventKind.NOTED, reason="x" * 4096)
                await asyncio.sleep(0)
            arrived = []

            async def read_all():
                while True:
                    arrived.append(await call.read())

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all()
            last = arrived[-1]
            again = stub.Watch(node_pb2.WatchRequest(since_seq=last.seq, epoch=last.epoch))
            following = await again.read()
            again.cancel()
            return caught.value, last.seq, following

    error, last, following = run(story)

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "took no event for 0.2 s" in error.details()
    assert "since_seq" in dict(error.trailing_metadata())["valve-next-step"]
    assert following.seq > last, "it goes on behind the last one that it has"


def test_a_thousand_questions_of_one_user_never_stand_before_everything_else(tmp_path):
    """Between two answers the loop serves whatever else is ready, so no burst holds it for longer than one answer."""

    async def story():
        async with served(tmp_path) as (world, path), contextlib.AsyncExitStack() as stack:
            stubs = [await stack.enter_async_context(stub_of(path)) for _ in range(CONNECTIONS.per_user)]
            turns, answered, most = 0, 0, 0
            status = world.node.status

            def counted():
                nonlocal answered
                answered += 1
                return status()

            world.node.status = counted

            async def ask(stub):
                return [await stub.GetStatus(node_pb2.GetStatusRequest()) for _ in range(30)]

            calls = asyncio.gather(*(ask(stub) for stub in stubs for _ in range(4)))
            while not calls.done():
                before = answered
                await asyncio.sleep(0)
                turns, most = turns + 1, max(most, answered - before)
            return sum(map(len, calls.result())), most

    done, most = run(story)

    assert done == CONNECTIONS.per_user * 4 * 30
    assert most == 1


def test_the_rows_of_a_status_are_never_written_in_one_turn_of_the_loop(tmp_path, monkeypatch):
    """A HELLO or a reclaim of a node of many processes would wait for all of them."""
    filled, fill = [], convert.fill
    monkeypatch.setattr(convert, "fill", lambda *row: filled.append(row) or fill(*row))

    async def story():
        async with served(tmp_path) as (world, path), stub_of(path) as stub:
            for _ in range(50):
                world.offline(gpus=())
            most, call = 0, asyncio.ensure_future(stub.GetStatus(node_pb2.GetStatusRequest()).code())
            while not call.done():
                before = len(filled)
                await asyncio.sleep(0)
                most = max(most, len(filled) - before)
            return most

    most = run(story)

    assert len(filled) > 100
    assert most <= 17


def test_a_connection_beyond_the_places_is_told_why(tmp_path):
    async def story():
        async with served(tmp_path, connections=TINY) as (_, path):
            held = [await asyncio.open_unix_connection(path) for _ in range(TINY.per_user)]
            async with stub_of(path) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetStatus(node_pb2.GetStatusRequest())
            for _, writer in held:
                writer.close()
            return caught.value

    error = run(story)

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no more connections for user" in error.details()


@pytest.mark.parametrize("is_taken", [True, False], ids=["read", "turned away unread"])
def test_a_descriptor_that_a_caller_of_the_api_passes_never_stops_the_loop(monkeypatch, tmp_path, is_taken):
    """Who may look sends one to a kernel that lets it (before Linux 6.16)."""
    monkeypatch.setattr(front, "SO_PASSRIGHTS", 0xFFFF)
    monkeypatch.setattr(front, "TURNED_AWAY_AT_ONCE", 0)
    places = CONNECTIONS if is_taken else Places(per_user=0, others=0, own=0)
    slow, theirs = never_closing()
    has_ended, is_stuck = threading.Event(), []

    def let_go():
        is_stuck.append(not has_ended.wait(PATIENCE_S / 2))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()  # a reset: close() comes back

    async def story():
        inner = await asyncio.start_unix_server(lambda *_: None, tmp_path / "behind")
        outer = front.Front(tmp_path / "front", tmp_path / "behind", Crowd("connections", places, NO_OWN))
        await outer.start(0o666, -1)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "front"))
            socket.send_fds(caller, [b"PRI"], [slow.fileno()])
            slow.close()  # what lies in the socket is the last of it
            caller.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""
        has_ended.set()
        await outer.stop_listening()
        await outer.close()
        inner.close()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        run(story)
    finally:
        has_ended.set()
        thread.join()
    assert is_stuck == [False]


def test_what_packets_of_a_caller_cost_is_never_paid_by_the_loop(monkeypatch, tmp_path):
    """A million epolls may wait for the other end: the kernel walks them for whoever reads and writes here."""
    served_by, take = set(), front._Outer.data_received

    def data_received(self, data):
        served_by.add(threading.current_thread())
        take(self, data)

    monkeypatch.setattr(front._Outer, "data_received", data_received)

    async def story():
        async with served(tmp_path) as (_, path), stub_of(path) as stub:
            await stub.GetStatus(node_pb2.GetStatusRequest())

    run(story)

    assert served_by
    assert threading.current_thread() not in served_by


def test_what_a_caller_asks_for_and_never_reads_never_piles_up(tmp_path):
    """Each of 64 connections that sent pings or calls and read nothing cost valved 3 MB."""
    many = 16 << 20

    async def story():
        heard = 0

        async def answer(reader, writer):  # as gRPC does: whether the caller reads or not
            nonlocal heard
            while asked := await reader.read(1 << 16):
                heard += len(asked)
                writer.write(asked)

        behind = await asyncio.start_unix_server(answer, tmp_path / "behind")
        there = Front(tmp_path / "front", tmp_path / "behind", Crowd("connections", TINY, NO_OWN))
        await there.start(0o666, -1)
        sent = turns = 0  # turns of the loop in which it is not read
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "front"))
            caller.setblocking(False)
            await until(lambda: all(one.other for one in there._open) and there._open)
            (outer,) = there._open
            while heard < many and turns < 1000:
                turns = 0 if outer.transport.is_reading() else turns + 1
                with contextlib.suppress(BlockingIOError):
                    sent += caller.send(bytes(1 << 16))
                await asyncio.sleep(0)
            piled_up, read = heard, 0
            while read < sent:
                read += len(await asyncio.get_running_loop().sock_recv(caller, 1 << 16))
        await there.close()
        await there.stop_listening()
        behind.close()
        return piled_up, read == sent

    piled_up, is_all_answered = run(story)

    assert piled_up < many
    assert is_all_answered, "one that reads again is read again"


def test_a_front_that_callers_hold_up_never_keeps_valved_from_leaving(monkeypatch, tmp_path):
    """Its thread is in the kernel, for the epolls of one who may look; the state is not written yet."""
    monkeypatch.setattr(aside, "LEAVE_S", 0.01)
    let_go = threading.Event()

    async def story():
        server = await start(NodeServicer(World(tmp_path).node), tmp_path / "valved.sock", 0o666, -1)
        there, _ = server._aside._begun.result()
        there.call_soon_threadsafe(let_go.wait)
        try:
            await asyncio.wait_for(server.stop(0), PATIENCE_S / 2)
        finally:
            let_go.set()

    run(story)


def test_a_start_never_waits_for_a_front_that_gets_no_descriptors(monkeypatch, tmp_path):
    def scarce():
        raise OSError(errno.EMFILE, "Too many open files")

    async def story():
        server = GrpcServer(NodeServicer(World(tmp_path).node), tmp_path / "valved.sock", Crowd("connections", TINY))
        monkeypatch.setattr(asyncio.events, "new_event_loop", scarce)
        try:
            with pytest.raises(OSError, match="Too many") as caught:
                await server.start(0o666, -1)
            return caught.value.errno
        finally:
            await server._server.stop(0)

    assert run(story) == errno.EMFILE


def test_a_socket_that_is_taken_by_a_stale_file_is_opened_all_the_same(tmp_path):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "valved.sock"))

    async def story():
        async with served(tmp_path) as (_, path), stub_of(path) as stub:
            return (await stub.GetStatus(node_pb2.GetStatusRequest())).version

    assert run(story) == "test"


# Calls per second


class Skips(selectors.SelectSelector):
    """Nobody sleeps: time goes on by what the loop would have slept."""

    now_s = 100.0

    def select(self, timeout=None):
        assert timeout is not None, "everybody waits for ever"
        self.now_s += timeout
        return super().select(0)


def virtually(story):
    """`story(pace)`, on a loop whose time is virtual."""
    skips = Skips()
    with contextlib.closing(asyncio.SelectorEventLoop(skips)) as loop:
        loop.time = lambda: skips.now_s
        return loop.run_until_complete(story(CallPace(SLOW_PACE, frozenset({0}), loop.time)))


async def waited_s(pace, uid):
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await pace.turn(uid)
    return loop.time() - began_s


def test_a_user_who_calls_without_end_is_put_off():
    async def story(pace):
        waits = await asyncio.gather(*(waited_s(pace, 7) for _ in range(50)))
        root = [await waited_s(pace, 0) for _ in range(1000)]
        await asyncio.sleep(10.0)
        return waits, root, await waited_s(pace, 7)

    waits, root, later = virtually(story)

    assert waits[:10] == [0.0] * 10
    assert waits[-1] == pytest.approx(4.0)  # 50 calls at 10 a second, one second of them at once
    assert root == [0.0] * 1000
    assert later == 0.0


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_user_who_calls_without_end_never_keeps_another_waiting(gives_up):
    async def story(pace):
        held, others = [], []
        for _ in range(100):
            held += [asyncio.create_task(pace.turn(7)) for _ in range(100)]
            await asyncio.sleep(0.1)
            others.append(await waited_s(pace, 8))
            if gives_up:
                for call in held:
                    call.cancel()
                await asyncio.gather(*held, return_exceptions=True)
                held.clear()
        done = sum(call.done() for call in held)
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return others, done, await waited_s(pace, 7)

    others, done, own = virtually(story)

    assert max(others) == pytest.approx(0.0)
    assert done in ((0,) if gives_up else range(105, 112))
    assert own <= 0.1 + 1e-6, "what was given up costs the user itself nothing, too"


def test_many_users_together_never_take_more_than_their_share():
    async def story(pace):
        return await asyncio.gather(*(waited_s(pace, uid) for uid in range(1, 2001)))

    assert virtually(story)[-1] == pytest.approx(2000 / 20.0 - 1.0)


def test_accounts_of_users_who_are_gone_are_not_kept():
    async def story(pace):
        for uid in range(1, 5001):
            await asyncio.sleep(1.0)
            await pace.turn(uid)
        return len(pace._users)

    assert virtually(story) < 1100


def test_the_calls_of_a_user_are_never_answered_faster_than_its_pace(tmp_path):
    """The last of so many calls comes no sooner than its turn; root's come at once."""
    calls = Rate(per_user=20.0, others=1000.0, burst_s=0.1)

    async def story():
        async with served(tmp_path, calls=calls) as (_, path), stub_of(path) as one, stub_of(path) as other:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            stubs = [one, other] * 6  # a connection's share of calls at a time is 8
            await asyncio.gather(*(stub.GetStatus(node_pb2.GetStatusRequest()) for stub in stubs))
            return loop.time() - began_s

    assert run(story) >= 12 / 20.0 - 0.1


# Numbers of events over a restart


async def resumed(folder, since_seq, epoch=None):
    """(the metadata, the first event) of a watch that goes on behind `since_seq`."""
    async with served(folder) as (world, path), stub_of(path) as stub:
        world.node.pause("alice")
        request = node_pb2.WatchRequest(kinds=["paused"], since_seq=since_seq)
        if epoch is not None:
            request.epoch = world.journal.epoch + epoch
        call = stub.Watch(request)
        metadata = dict(await call.initial_metadata())
        event = await call.read() if metadata["valve-kept"] != "0" else None
        call.cancel()
        return metadata, event, world.journal.epoch


@pytest.mark.parametrize(
    ("since_seq", "epoch"),
    [(500, None), (500, -1), (1, -1), (0, -1)],
    ids=["a client that knows no epoch", "another start", "another start, a number that is reached", "none yet"],
)
def test_events_after_a_restart_are_never_missed_in_silence(tmp_path, since_seq, epoch):
    metadata, event, current = run(lambda: resumed(tmp_path, since_seq, epoch))

    assert event.reason == "by alice"
    assert event.epoch == current == int(metadata["valve-epoch"])
    assert metadata["valve-missed"] == "unknown"


def test_a_client_that_knows_no_epoch_never_hears_that_nothing_is_missing(tmp_path):
    """Its number may be of another start of valved, and reached by now."""
    metadata, _, _ = run(lambda: resumed(tmp_path, 1))

    assert metadata["valve-missed"] == "unknown"


def test_within_one_start_a_watch_goes_on_where_it_was(tmp_path):
    metadata, event, _ = run(lambda: resumed(tmp_path, 0, 0))

    assert (event.reason, metadata["valve-missed"]) == ("by alice", "0")


def test_what_is_not_kept_any_more_is_counted(tmp_path):
    async def story():
        async with served(tmp_path) as (world, path), stub_of(path) as stub:
            for number in range(world.config.ring_events + 10):
                world.journal.emit(EventKind.GATE, gpus=(0,), reason=str(number))
            call = stub.Watch(node_pb2.WatchRequest(since_seq=5, epoch=world.journal.epoch))
            metadata = dict(await call.initial_metadata())
            event = await call.read()
            call.cancel()
            return metadata, event.seq, world.journal._seq

    metadata, first, last = run(story)

    assert int(metadata["valve-missed"]) + int(metadata["valve-kept"]) == last - 5
    assert first == last - int(metadata["valve-kept"]) + 1
