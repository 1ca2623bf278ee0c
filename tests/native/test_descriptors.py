"""Whichever descriptor cannot be had, nothing that was opened before it stays open, and what could not be asked is not
taken for gone.

The daemon's parts are real, over the fake driver. A round has so many descriptors left; the next one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from gates import SETTINGS, FakeDriver
from node_world import FakeThawer
from scarce import left, opened

from valved import paths
from valved.abi.kv_link import KvAttach
from valved.clients.server import LinkServer
from valved.compose import Outer, build
from valved.config import Config
from valved.gate.adapter import NativeGate
from valved.kv.engines import Engine
from valved.machine.cardlock import CardLock
from valved.machine.clock import LoopClock
from valved.machine.driver import driver_state
from valved.machine.helpers import Closer, Prompt, Worker
from valved.machine.possession import RmProver
from valved.machine.processes import LinuxProcesses
from valved.machine.signals import Signals
from valved.machine.uvm import UvmDoor, UvmDoors
from valved.machine.watch import FolderWatch
from valved.model.ids import ClientId, Role, ServiceId
from valved.rpc.front import Crowd, Front, Places
from valved.state import pending
from valved.state.saved import RunFolder

MOST = 40  # descriptors that any of these takes
Opener = Callable[[ExitStack, FakeDriver, Path], None]


def a_place_in_line(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    for _ in range(2):
        one = RunFolder(folder)
        scope.callback(one.release)
        one.queue()


def the_cards(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    for minor in (0, 2):
        os.mknod(folder / f"nvidia{minor}", 0o600)
        scope.callback(os.unlink, folder / f"nvidia{minor}")
    cards = CardLock(folder)
    scope.callback(cards.release)
    cards.take()
    assert opened()[str(folder / "nvidia2")] == 1, "a card that could not be opened was taken for none"


def a_gate(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    gate = NativeGate(SETTINGS, driver.machine())
    scope.callback(gate.close)
    for client, role in ((1, Role.ONLINE), (2, Role.OFFLINE), (3, Role.HOOK)):
        gate.create_client(ClientId(client), role, ServiceId(7))


def an_engine(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    sizes = {"blocks": 64, "block_tokens": 16, "rows": 8, "row_blocks": 8, "ranks": 1, "mode": 0}
    attach = KvAttach(abi_min=1, abi_max=1, engine="toy", **sizes)
    engine = Engine(ClientId(1), ServiceId(1), Role.OFFLINE, attach)
    scope.callback(engine.book.close)
    scope.callback(engine.table.close)


def a_watch(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    scope.callback(FolderWatch(folder).close)
    scope.callback(FolderWatch(folder / "none").close)


def a_claim(scope: ExitStack, driver: FakeDriver, folder: Path) -> None:
    pending.make_folder(folder)
    (folder / pending.FOLDER / "0-0").mkdir(exist_ok=True)
    if not pending.leave(folder, pending.PendingClaim(pid=7, start_time=8, name="chat")):
        raise OSError("no claim was left")
    if not pending.read(folder):
        raise OSError("the claim cannot be read")


OPENERS = {opener.__name__: opener for opener in (a_place_in_line, the_cards, a_gate, an_engine, a_watch, a_claim)}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_nothing_stays_open_of_what_could_not_be_opened_whole(
    opener: Opener, driver: FakeDriver, tmp_path: Path
) -> None:
    before = opened()
    for count in range(MOST):
        is_whole = False
        with ExitStack() as scope, left(count), contextlib.suppress(OSError):
            opener(scope, driver, tmp_path)
            is_whole = True

        assert not opened() - before, f"{count} descriptors were left"

        if is_whole:
            return
    raise AssertionError("never whole")


def test_no_door_that_could_not_be_opened_keeps_a_descriptor_or_takes_the_callers() -> None:
    async def knock(count: int) -> bool:
        fd, loop = os.open(os.devnull, os.O_RDWR), asyncio.get_running_loop()
        before = opened()
        with left(count), contextlib.suppress(OSError):
            UvmDoor(loop, fd, bytes(16)).close()
            return True

        assert not opened() - before
        os.close(fd)
        return False

    assert [asyncio.run(knock(count)) for count in range(2)] == [False, True]


def test_a_door_that_the_loop_cannot_listen_to_stays_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def knock() -> None:
        fd, loop = os.open(os.devnull, os.O_RDWR), asyncio.get_running_loop()
        before = opened()
        monkeypatch.setattr(loop, "add_reader", refuse)
        with pytest.raises(OSError, match="no room"):
            UvmDoor(loop, fd, bytes(16))

        assert not opened() - before
        os.close(fd)

    def refuse(*_: object) -> None:
        raise OSError("no room in the epoll")

    asyncio.run(knock())


@pytest.mark.parametrize("error", [OSError("no room in the epoll"), asyncio.CancelledError()])
def test_no_caller_of_the_api_who_could_not_be_passed_on_keeps_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """While the error lives, nothing collects what was forgotten."""

    async def fail(*_: object, **__: object) -> None:
        raise error

    async def story() -> None:
        loop = asyncio.get_running_loop()
        crowd = Crowd("calls", Places(per_user=9, others=9, own=9))
        front = Front(tmp_path / "api", tmp_path / "behind", crowd)
        behind = socket.socket(socket.AF_UNIX)
        behind.bind(str(tmp_path / "behind"))
        behind.listen()
        before = opened()
        monkeypatch.setattr(loop, "create_unix_connection", fail)
        with pytest.raises(type(error)) as passing:
            await front.connect(SimpleNamespace(uid=7, is_welcome=True, transport=None))  # type: ignore[arg-type]

        assert passing.value is error
        assert not opened() - before
        behind.close()

    asyncio.run(story())


# Clients of a whole daemon

CLIENT = """
import array, socket, sys, os
from valved.abi.link import Hello, LinkType, RmClient, build
rm = RmClient(gpu_uuid=bytes(16), device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)
hello = Hello(abi_min=1, abi_max=1, features=1, wanted_role=2, driver=0, build="t", comm="t")
for path in sys.stdin:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard = []
    try:
        link.connect(path.strip())
        link.send(build(LinkType.HELLO, hello, seq=1, sent_ns=0))
        data, fds, _, _ = socket.recv_fds(link, 1024, 8)
        heard.append(len(fds))
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
            link.sendmsg([build(LinkType.RM_CLIENT, rm, seq=2, sent_ns=0)], rights)
            heard.append(len(link.recv(1024)))
        for fd in fds:
            os.close(fd)
    except OSError as error:
        heard.append(error.errno)
    link.close()
    print(*heard, flush=True)
"""


async def talk(child: subprocess.Popen[str], path: Path) -> list[int]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{path}\n")
    child.stdin.flush()
    line = await asyncio.get_running_loop().run_in_executor(None, child.stdout.readline)
    return [int(word) for word in line.split()]


def test_no_client_that_could_not_join_leaves_a_descriptor_in_the_daemon(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more descriptor is left in each round, until it is welcomed and heard."""
    monkeypatch.setattr("valved.clients.server.KEPT_FDS", 0)  # what is kept for online work is never left here
    child = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=-1, stdout=-1, text=True)

    async def story() -> tuple[list[list[int]], NativeGate]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        gate, closer, clock = NativeGate(SETTINGS, driver.machine()), Closer(), LoopClock(loop)
        processes = LinuxProcesses()
        outer = Outer(
            gate=gate,
            processes=processes,
            clock=clock,
            reactor=loop,
            prover=RmProver(loop, closer),
            uvm=UvmDoors(loop),
            work=Worker(loop),
            disk=Worker(loop),
            prompt=Prompt(),
            event_disk=Worker(loop),
            closer=closer,
            signals=Signals(processes, clock, FakeThawer()),
            fd_limit=65536,
            driver=driver_state(gate.driver_version()),
            boot="boot",
            stop=lambda: None,
            version="test",
        )
        daemon = build(Config(guard_bystanders=False), tmp_path, outer)
        link = LinkServer(loop, daemon.register, tmp_path / paths.LINK_SOCKET, 60.0, closer)
        link.start()
        heard = [await talk(child, tmp_path / paths.LINK_SOCKET)]
        await settle(daemon.books.clients)
        gc.collect()  # what tests before this one left
        before = opened()
        for count in range(MOST):
            with left(count):
                heard.append(await talk(child, tmp_path / paths.LINK_SOCKET))
                await settle(daemon.books.clients)
            for _ in range(100_000):
                if not opened() - before:
                    break
                await asyncio.sleep(0.002)

            assert not opened() - before, f"{count} descriptors were left: {heard[-1]}"

            if heard[-1] == heard[0]:
                break
        link.stop()
        daemon.register.close()
        return heard, gate

    async def settle(clients: object) -> None:
        while clients:
            await asyncio.sleep(0.001)

    failures: list[object] = []
    heard, gate = asyncio.run(story())
    gate.close()  # after the loop: a timer of the daemon that is due reads its stamps
    child.communicate()

    assert heard[0] == heard[-1] == [4, heard[0][1]]
    assert not failures
