"""A valved that starts after one that was killed: nothing of offline work runs until online processes are back."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
from fake_gate import FakeGate
from node_world import FakePrompt, World
from scarce import left

from valved.abi.link import Feature
from valved.machine.processes import LinuxProcesses
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role
from valved.node.bystanders import Bystanders
from valved.node.comeback import ComeBack
from valved.node.handover import EXPECTED_NS
from valved.state import saved as state
from valved.state.lived import FOLDER, Lived

PATIENCE_S = 2.0
OFFLINE, ONLINE = 300, 200


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def successor(first):
    """A new valved after one that was killed: what its predecessor had not written by then is lost."""
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    second.come_back.begin(PATIENCE_S, is_first=False)
    saved, problem = state.load(first.folder / "state.json")
    assert not problem
    if saved is not None:
        second.handover.restore(saved, PATIENCE_S)
    return second


def killed_unsaved(first):
    """It had welcomed an online process, and its state file says nothing of that process's GPU yet."""
    first.processes.add(ONLINE)
    first.node.launch(ONLINE, first.processes.start_time(ONLINE), Role.ONLINE, "chat")
    first.offline(pid=OFFLINE)
    first.handover.save()
    before = (first.folder / "state.json").read_bytes()
    first.online(pid=ONLINE)
    assert (first.folder / "state.json").read_bytes() == before
    return successor(first)


def flag_of(world, client):
    return world.books.clients[client].lease_flag


@pytest.mark.parametrize("comes_first", ["online", "offline"])
def test_offline_work_never_runs_before_an_online_process_that_lived_has_told_of_its_channels(first, comes_first):
    second = killed_unsaved(first)

    if comes_first == "online":
        online = second.hello(ONLINE, Role.ONLINE).client
        offline = second.offline(pid=OFFLINE)
    else:
        offline = second.offline(pid=OFFLINE)
        online = second.hello(ONLINE, Role.ONLINE).client
    second.run(900)
    assert second.gate.is_gated(0), "its channels may be on their way"
    assert second.gate.off
    assert not second.gate.foreign_enabled

    second.add_channel(online, h_client=0xC1D00000 + online)
    second.gate.launch(online)
    second.run(10_000)

    assert second.gate.is_gated(0), "it is busy"
    second.gate.finish(online)
    second.run(3000)
    assert not second.gate.off
    assert offline in second.books.clients


def test_offline_work_never_takes_itself_for_alone_while_an_online_process_is_on_its_way_back(first):
    """This valved may die, too, before that process is back: then offline work must stop itself."""
    second = killed_unsaved(first)

    offline = second.hello(OFFLINE, features=Feature.GAPS).client

    assert flag_of(second, offline), "before it told of any channel"
    second.add_channel(offline, h_client=0xC1D00000 + offline)
    assert flag_of(second, offline)
    first.processes.table.pop(ONLINE)
    second.run(100)
    assert not flag_of(second, offline)


def test_no_successor_misses_an_online_process_that_was_welcomed_with_the_last_descriptor(tmp_path):
    process = ProcessId(pid=200, start_time=2000)
    with left(0):
        Lived(tmp_path, FakePrompt()).put(process)

    assert Lived(tmp_path, FakePrompt()).read() == {process}


def test_nobody_waits_for_an_online_process_that_has_ended(first):
    second = killed_unsaved(first)
    second.offline(pid=OFFLINE)

    first.processes.table.pop(ONLINE)
    second.run(100)

    assert not second.gate.off


def test_the_start_never_holds_for_longer_than_its_patience(first):
    second = killed_unsaved(first)
    second.offline(pid=OFFLINE)
    second.run(1900)
    assert second.gate.off

    second.run(200)

    assert not second.gate.off
    assert any("did not come back" in event.reason for event in second.events(EventKind.NOTED))


@pytest.mark.parametrize("fails", ["the process table", "the books", "who hears of the end"])
def test_a_look_that_fails_never_makes_the_hold_last_for_ever(first, monkeypatch, fails):
    second = killed_unsaved(first)
    second.offline(pid=OFFLINE)

    def fail(*_):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as broken:
        if fails == "the process table":
            broken.setattr(second.processes, "is_ending", fail)
            broken.setattr(second.processes, "start_time", fail)
        elif fails == "the books":
            broken.setattr(second.books, "with_role", fail)
        else:
            broken.setattr(second.gating.listener, "standing_changed", fail)
        run_on(second, 1000)
    assert second.gate.off
    run_on(second, 5000)

    assert not second.gate.off


def run_on(world, ms):
    """As the loop does: what a timer raises ends nothing but that call."""
    until_ns = world.clock.now_ns() + ms * 1_000_000
    while (left_ns := until_ns - world.clock.now_ns()) > 0:
        with contextlib.suppress(OSError):
            world.run(left_ns / 1_000_000)


def test_an_online_process_that_cannot_be_read_counts_as_alive(tmp_path):
    class FullTable(LinuxProcesses):
        def _read(self, pid, name):
            raise OSError(errno.EMFILE, "too many open files")

    world = World(tmp_path)
    world.register.lived.put(ProcessId(pid=ONLINE, start_time=1))
    parts = (world.books, world.gating, world.register, world.journal, world.clock, FullTable())
    ComeBack(*parts).begin(PATIENCE_S, is_first=False)

    world.run(1900)
    assert all(account.holders for account in world.gating.gpus.values())
    world.run(200)
    assert not any(account.holders for account in world.gating.gpus.values())


def guarded(world):
    """The daemon's own guard, which has not looked yet."""
    rooms = (world.books, world.gating, world.processes, world.journal, world.gate.gpus())
    bystanders = Bystanders(*rooms, world.ladder, set, lambda process: False)
    parts = (world.books, world.gating, world.register, world.journal, world.clock, world.processes)
    return ComeBack(*parts, bystanders), bystanders


def cards(world, *pids):
    """What NVML says: these processes compute on the first GPU."""
    return {info.uuid: dict.fromkeys(pids if info.index == 0 else (), 1) for info in world.gate.gpus()}


def test_offline_work_never_runs_beside_a_process_without_valve_before_the_guard_has_looked(first):
    first.offline(pid=OFFLINE)
    first.handover.save()
    stranger = first.processes.add(700, cgroup="/elsewhere")
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    come_back, bystanders = guarded(second)
    come_back.begin(PATIENCE_S, is_first=False)
    second.offline(pid=OFFLINE)
    second.run(1000)
    assert second.gate.off

    bystanders.look(cards(second, stranger))
    second.run(5000)
    assert second.gate.off, "the guard holds it now"

    bystanders.look(cards(second))
    second.run(100)
    assert not second.gate.off


@pytest.mark.parametrize("has_guard", [False, True])
def test_a_first_start_holds_nothing(tmp_path, has_guard):
    world = World(tmp_path)
    come_back = guarded(world)[0] if has_guard else world.come_back
    come_back.begin(PATIENCE_S, is_first=True)

    assert not any(account.holders for account in world.gating.gpus.values())


def test_a_folder_that_cannot_be_read_never_lets_offline_work_run_at_once(first, monkeypatch):
    first.offline(pid=OFFLINE)
    first.handover.save()

    def refuse(self):
        raise PermissionError(13, "refused")

    monkeypatch.setattr(Lived, "read", refuse)
    second = successor(first)
    second.offline(pid=OFFLINE)

    second.run(1900)
    assert second.gate.off
    second.run(200)
    assert not second.gate.off


def test_processes_that_ended_never_fill_the_folder_of_those_that_lived(first):
    online = [first.online() for _ in range(3)]
    assert len(os.listdir(first.folder / FOLDER)) == 3

    for client in online[1:]:
        first.processes.end(first.books.clients[client].process.pid)
    first.handover.settle(patience_over=True)

    assert [int(name.split("-")[0]) for name in os.listdir(first.folder / FOLDER)] == [
        first.books.clients[online[0]].process.pid
    ]


def test_a_claim_of_an_online_process_is_never_lost_with_the_valved_that_took_it(first):
    first.processes.add(ONLINE)
    first.node.launch(ONLINE, first.processes.start_time(ONLINE), Role.ONLINE, "chat")

    second = successor(first)

    assert second.online(pid=ONLINE, name="chat")
    assert [entry.name for entry in second.books.services.values()] == ["chat"]


def test_an_online_process_that_was_welcomed_is_never_refused_because_the_disk_was_full(first):
    """No state names its claim. That it was welcomed is an empty file, which a full disk takes."""
    first.processes.add(ONLINE)
    first.handover.save()
    before = (first.folder / "state.json").read_bytes()
    client = first.online(pid=ONLINE, name="chat")
    (first.folder / "state.json").write_bytes(before)

    second = successor(first)
    second.processes.add(OFFLINE, cgroup="/other")
    back = second.hello(ONLINE, Role.ONLINE).client

    assert first.books.clients[client].process == second.books.clients[back].process
    assert second.books.clients[back].role is Role.ONLINE
    assert second.gating.online[second.service_of(back)].holding
    assert second.hello(OFFLINE, Role.ONLINE).client is None  # nobody welcomed that one


def test_a_number_that_an_earlier_boot_welcomed_never_makes_a_process_online(first):
    """The folder outlived the boot, and a stranger waits for the number and the time since boot of a service."""
    first.register.lived.put(ProcessId(pid=ONLINE, start_time=10 * ONLINE))

    second = successor(first)
    second.processes.add(ONLINE)

    assert second.processes.start_time(ONLINE) == 10 * ONLINE
    assert second.hello(ONLINE, Role.ONLINE).client is None


def test_a_claim_that_was_lost_never_comes_back_as_one_of_a_whole_session(first, monkeypatch):
    """Whoever started it has ended, so its control group differs from that of its parent, which is init now."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    first.processes.add(199, cgroup="/session")
    first.processes.add(ONLINE, parent=199, cgroup="/session", comm="prod/chat")
    first.handover.save()
    before = (first.folder / "state.json").read_bytes()
    first.online(pid=ONLINE, name="chat")
    (first.folder / "state.json").write_bytes(before)
    first.processes.add(ONLINE, start=first.processes.start_time(ONLINE), cgroup="/session", comm="prod/chat")
    first.processes.add(OFFLINE, cgroup="/session")

    second = successor(first)
    back = second.hello(ONLINE, Role.ONLINE).client
    beside = second.hello(OFFLINE).client

    assert second.books.clients[back].role is Role.ONLINE
    assert second.books.clients[beside].role is Role.OFFLINE, "nobody claimed that one"
    assert second.hello(OFFLINE, Role.ONLINE).client is None
    assert "/" not in second.books.services[second.service_of(back)].name, "it would be trusted as a pod's"


def test_offline_processes_that_never_came_back_are_never_expected_for_ever(first):
    """Their numbers become those of others, which would have turns before all that is not awaited."""
    for number in range(5):
        first.offline(pid=OFFLINE + number)
    first.handover.save()
    second = successor(first)
    assert len(second.register.awaited.expected) == 5

    second.clock.advance(EXPECTED_NS)

    assert not second.register.awaited.expected
