"""A disk that hangs: who waits for it, and what is never told before it is written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from fake_gate import FakeGate
from node_world import MS, World, successor
from prometheus_client.parser import text_string_to_metric_families
from valve.v1 import node_pb2, node_pb2_grpc

from valved.abi.link import Feature
from valved.config import Config, LadderTable
from valved.daemon import take_over
from valved.machine import helpers
from valved.machine.clock import LoopClock
from valved.machine.helpers import Helpers, Prompt, Worker
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Mode, ProcessId, Role
from valved.node.upkeep import Upkeep
from valved.paths import grpc_address
from valved.rpc.server import serve
from valved.scraping import Scraped
from valved.state import eventfiles
from valved.state import saved as state
from valved.state.eventfiles import EventFiles
from valved.state.statefile import StateFile
from valved.state.trace import LineFile
from valved.state.unsaved import Unsaved

GPU = GpuIndex(0)


def _answer_again(prompt, free, monkeypatch):
    """All that waited is done, and from now on each answer is waited for, however slow the machine is."""
    monkeypatch.setattr(helpers, "PATIENCE_S", 100.0)
    free.set()
    assert prompt._last.wait(100)


@pytest.fixture
def hung(monkeypatch):
    """A disk that has hung since before, and is given free at the end."""
    prompt, free, begun = Prompt(), threading.Event(), threading.Event()
    prompt._helpers.do(begun.set)
    prompt._helpers.do(free.wait)
    assert begun.wait(100)
    with pytest.raises(TimeoutError):
        prompt.do(lambda: None)
    prompt.answers_again = partial(_answer_again, prompt, free, monkeypatch)
    yield prompt
    free.set()


def saved_in(world):
    return json.loads((world.folder / "state.json").read_text())


def test_no_welcome_and_no_stop_ever_waits_for_a_disk_that_hangs(tmp_path, hung, monkeypatch):
    """Who waits any more waits for longer than this test may take."""
    monkeypatch.setattr(helpers, "PATIENCE_S", 1e6)
    world = World(tmp_path, prompt=hung)
    world.disk.later = True
    take_over(world, world.config, world.folder)
    world.run(3_000)

    offline, online = world.offline(pid=300), world.online(pid=200)
    world.run(1_000)
    world.gate.launch(online)
    world.run(1)

    assert world.books.clients.keys() == {offline, online}
    assert world.gate.is_gated(GPU)
    (lost,) = world.node.status().unwritten
    assert lost.path.endswith("state.json")
    assert lost.error.startswith("its disk has not answered for ")

    world.disk.later = False
    world.disk.finish()
    hung.answers_again()
    assert not world.node.status().unwritten
    assert {client["pid"] for client in saved_in(world)["clients"]} == {200, 300}
    assert world.register.lived.read() == {ProcessId(pid=200, start_time=2000)}


def test_no_order_is_ever_lost_because_a_disk_hangs_for_hours(tmp_path, hung, monkeypatch):
    """Every two seconds the run folder is looked at, and where there is no watch the files in it are. Nobody waits for
    those answers, and they left no room for what must be done once the disk answers."""
    monkeypatch.setattr(helpers, "MOST_LEFT", 10)
    world, process = World(tmp_path, prompt=hung), ProcessId(pid=200, start_time=2000)
    folder = SimpleNamespace(is_ours=lambda: True)
    care = Upkeep(None, None, None, world.brake, folder, hung, has_watch=False)
    for _ in range(20):
        assert not care.is_lost()
        world.brake.look_at_file()

    world.register.lived.put(process)
    hung.answers_again()

    assert world.register.lived.read() == {process}
    assert (tmp_path / "online").is_dir()


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_offline_work_never_runs_on_because_the_disk_of_the_order_hangs(tmp_path, hung, name):
    world = World(tmp_path, prompt=hung)

    getattr(world.brake, name)("alice")
    world.brake.look_at_file()  # as the upkeep does

    assert world.brake.switches.is_closed
    assert [(lost.path, lost.error) for lost in world.node.status().unwritten] == [
        (str(tmp_path / name), helpers.NO_ANSWER)
    ]
    hung.answers_again()
    world.brake.look_at_file()
    assert world.brake.switches.is_closed
    assert not world.node.status().unwritten
    assert (tmp_path / name).read_text() == "alice\n"


def test_no_order_by_hand_is_ever_overlooked_because_its_disk_was_slow(tmp_path, hung):
    """The watch tells of it once."""
    world = World(tmp_path, prompt=hung)
    (tmp_path / "pause").write_text("alice\n")
    world.brake.look_at_file()
    assert world.brake.is_unsure
    hung.answers_again()
    world.brake.look_at_file()
    assert world.brake.switches.is_paused
    assert not world.brake.is_unsure


def test_no_half_of_a_resume_is_ever_left_because_its_disk_was_slow(tmp_path, hung):
    """The pause file went, and the drain went on."""
    for name in ("pause", "drain"):
        (tmp_path / name).write_text("alice\n")
    world = World(tmp_path)
    world.brake.look_at_file()
    world.brake._files = hung

    with pytest.raises(TimeoutError):
        world.brake.resume()
    assert world.brake.switches.is_paused
    assert world.brake.switches.is_draining
    hung.answers_again()
    world.brake.look_at_file()

    assert not world.brake.switches.is_paused
    assert not world.brake.switches.is_draining


def test_a_hung_disk_is_never_waited_for_twice(monkeypatch):
    prompt, free, waits = Prompt(), threading.Event(), []
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda self, *args: waits.append(args) or wait(self, *args))
    with pytest.raises(TimeoutError):
        prompt.do(lambda: wait(free))
    done = []
    before = len([args for args in waits if args])

    for number in range(100):
        with pytest.raises(TimeoutError):
            prompt.do(lambda number=number: done.append(number))

    assert len([args for args in waits if args]) == before
    free.set()
    assert wait(prompt._last, 100)
    assert done == list(range(100)), "in their turn"
    monkeypatch.setattr(helpers, "PATIENCE_S", 100.0)
    assert prompt.do(lambda: "well") == "well"


def test_one_write_is_under_way_at_most_and_the_newest_state_is_never_left_out(tmp_path, monkeypatch):
    world, written = World(tmp_path), []
    save = state.save
    monkeypatch.setattr(state, "save", lambda path, said, *more: written.append(said) or save(path, said, *more))
    world.disk.later = True

    for pid in range(200, 210):
        world.online(pid=pid)
        world.handover.save()

    assert len(world.disk._jobs) == 1
    world.disk.finish()
    assert len(written) == 2
    assert len(saved_in(world)["services"]) == 10


def test_a_state_that_is_taken_never_begins_a_second_write_beside_its_own(tmp_path, monkeypatch):
    """Taking it reads the stamps, and the first that tells of a stop that failed saves who is to be frozen."""
    world, asks = World(tmp_path), [None]
    monkeypatch.setattr(world.gating, "drain", lambda: asks and (asks.pop(), world.handover.save()))
    world.disk.later = True

    world.handover.save()

    assert not asks
    assert len(world.disk._jobs) == 1


def test_no_change_ever_waits_for_minutes_because_the_disk_hung_before_it(tmp_path):
    """The next write came twenty times as late as the last one had taken."""
    world = World(tmp_path)
    world.disk.later = True
    world.handover.save()
    world.run(60_000)
    world.disk.later = False
    world.disk.finish()

    world.offline(pid=300)
    world.run(1_001)

    assert [client["pid"] for client in saved_in(world)["clients"]] == [300]


def test_the_last_state_is_never_given_up_because_the_write_before_it_is_slow(tmp_path):
    world, told = World(tmp_path), []
    world.disk.later = True
    world.handover.save()
    world.run(700)

    world.handover.save()
    world.handover.when_saved(told.append, 2_000 * MS, is_last=True)
    world.run(100)
    assert not told
    world.disk.finish()
    world.run(1)

    assert told == [True]


def test_the_loop_never_stands_while_a_write_does(tmp_path, monkeypatch):
    """With the threads that valved has: the clock of the loop goes on, and who waits is told that it is not written."""
    free, hangs = threading.Event(), threading.Event()

    def sync(fd):
        del fd
        hangs.set()
        free.wait(100)

    monkeypatch.setattr(os, "fsync", sync)
    world = World(tmp_path)

    async def story():
        loop = asyncio.get_running_loop()
        disk = Worker(loop, Helpers("disk", 1))
        parts = (world.handover._unsaved, world.journal, LoopClock(loop), disk)
        file = StateFile(tmp_path / "state.json", world.handover.snapshot, *parts, is_ours=lambda: True)
        answers = []
        file.save()
        file.when_saved(answers.append, 5 * MS)
        while not (hangs.is_set() and answers):
            await asyncio.sleep(0.001)
        file.save()
        file.when_saved(answers.append, 100_000 * MS)
        free.set()
        while len(answers) < 2:
            await asyncio.sleep(0.001)
        return answers

    assert asyncio.run(story()) == [False, True]


@pytest.mark.parametrize("call", ["SetPolicy", "Launch"])
def test_no_caller_is_ever_answered_before_what_it_asked_for_is_saved(tmp_path, call):
    async def story():
        world = World(tmp_path)
        world.processes.add(700)
        server = await serve(world.node, tmp_path / "valved.sock")
        channel = grpc.aio.insecure_channel(grpc_address(tmp_path / "valved.sock"))
        stub, online = node_pb2_grpc.NodeStub(channel), node_pb2.ROLE_ONLINE
        requests = {
            "SetPolicy": node_pb2.Policy(mode=node_pb2.MODE_OBSERVE),
            "Launch": node_pb2.LaunchRequest(pid=700, start_time=7000, role=online, name="chat"),
        }
        world.disk.later = True
        asked = asyncio.ensure_future(getattr(stub, call)(requests[call]))
        while not world.disk._jobs:
            await asyncio.sleep(0.001)
        await stub.GetPolicy(node_pb2.GetPolicyRequest())  # who asks after it is answered before it
        assert not asked.done()
        world.disk.finish()
        while not asked.done():
            world.run(1)
            await asyncio.sleep(0.001)
        said = saved_in(world)
        await channel.close()
        await server.stop(0)
        return said

    said = asyncio.run(story())

    assert said["policy"]["mode"] == ("observe" if call == "SetPolicy" else None)
    assert [service["name"] for service in said["services"]] == ([] if call == "SetPolicy" else ["chat"])


def page(world, scraped):
    """Scraped while the clock of the world goes on."""

    async def story():
        asked = asyncio.ensure_future(scraped.body())
        while not asked.done():
            await asyncio.sleep(0)
            world.run(10)
        return asked.result()

    scraped._next_s = 0.0
    scraped._turn = asyncio.Lock()
    text = asyncio.run(story()).decode()
    return {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}


def test_no_counter_is_ever_told_before_it_is_saved(tmp_path):
    """Else it falls if valved is killed while its disk hangs."""
    world = World(tmp_path)
    scraped = Scraped(world.node.status, save=world.node.save)
    _, online = world.offline(), world.online()
    world.run(200)
    first = page(world, scraped)
    world.disk.later = True
    for _ in range(5):
        world.work(online, ms=5)
        world.run(200)

    hung = page(world, scraped)

    assert hung["valve_gates_total"] == first["valve_gates_total"]
    assert (first["valve_unwritten_files"], hung["valve_unwritten_files"]) == (0, 0), "it hangs since this scrape"
    assert page(world, scraped)["valve_unwritten_files"] == 1
    assert saved_in(world)["counters"]["gates"] >= hung["valve_gates_total"]
    world.disk.later = False
    world.disk.finish()
    assert page(world, scraped)["valve_gates_total"] > first["valve_gates_total"]


def test_no_channel_is_forgotten_because_an_older_state_was_written_after_it_came(tmp_path):
    """That state does not name it, and took its line away."""
    world = World(tmp_path)
    world.disk.later = True
    world.handover.save()
    client = world.offline(pid=300)
    (job, _), *_ = world.disk._jobs
    job()  # and valved is killed before the next one

    second = successor(world, was_killed=True)

    assert [left.channel.h_client for left in second.register.channels.leftovers.all()] == [0xC1D00000 + client]


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_could_not_be_stopped_is_never_kept_running_by_a_disk_that_hangs(tmp_path, answers):
    world = World(tmp_path, config=Config(ladder=LadderTable(kill_after_s=30)))
    world.offline(pid=300)
    online = world.online(pid=200)
    world.run(100)
    world.gate.launch(online)
    world.disk.later = True
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    assert not world.signals, "first a successor must know of it"

    if answers:
        world.disk.finish()
        assert [300, 3000] in saved_in(world)["frozen"]
    world.run(1 if answers else 30)

    assert world.signals == [(300, "SIGSTOP")]


def test_a_claim_in_a_file_is_never_removed_before_the_state_names_its_service(tmp_path):
    from valved.state import pending

    world = World(tmp_path)
    pending.make_folder(tmp_path)
    world.processes.add(700)
    assert pending.leave(tmp_path, pending.PendingClaim(pid=700, start_time=7000, name="chat"))
    world.disk.later = True

    assert world.hello(700, wanted=Role.ONLINE, features=Feature.GAPS).client is not None
    assert len(pending.read(tmp_path)) == 1

    world.disk.finish()
    world.run(1)
    assert not pending.read(tmp_path)
    assert [service["name"] for service in saved_in(world)["services"]] == ["chat"]


# Trace and audit


def test_no_event_is_ever_written_on_the_loop(tmp_path):
    world = World(tmp_path)
    file = LineFile(tmp_path / "audit.jsonl", 1 << 20)
    world.journal._files = EventFiles(world.clock, ((file, False),), world.event_disk)
    world.event_disk.later = True
    for _ in range(5):
        world.node.set_policy(Mode.OBSERVE, {}, 0)
        world.node.set_policy(Mode.HARVEST, {}, 0)
        world.run(1_000)

    assert len(world.event_disk._jobs) == 1
    assert not (tmp_path / "audit.jsonl").exists()  # not even to open it, which a start would wait for
    (lost,) = world.node.status().unwritten
    assert lost.error.startswith("its disk has not answered for ")

    world.event_disk.later = False
    world.event_disk.finish()
    world.run(2_000)
    assert not world.node.status().unwritten
    assert (tmp_path / "audit.jsonl").read_text().count('"policy"') == 10


def test_what_a_disk_that_hangs_does_not_take_never_grows_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(eventfiles, "MOST_KEPT", 3)
    world = World(tmp_path)
    files = EventFiles(world.clock, ((LineFile(tmp_path / "a.jsonl", 1 << 20), True),), world.event_disk)
    world.event_disk.later = True
    world.run(1)
    for _ in range(10):
        files.put(world.journal.emit(EventKind.NOTED))
    world.run(3_000)

    assert "7 for good" in files.unwritten()[0].loss


def test_a_file_that_can_be_written_again_is_never_called_unwritable(tmp_path):
    """Though nothing happens that would be written there: `valve doctor` goes by it."""
    folder = tmp_path / "disk"
    world = World(tmp_path)
    file = LineFile(folder / "trace.jsonl", 1 << 20)
    world.journal._files = EventFiles(world.clock, ((file, True),), world.event_disk)
    world.run(1_000)
    assert "No such file" in world.node.status().unwritten[0].error
    world.run(3_000)
    assert world.node.status().unwritten

    folder.mkdir()
    world.run(2_000)

    assert not world.node.status().unwritten


def test_a_disk_that_opens_files_and_takes_no_byte_is_never_called_well(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "trace.jsonl", 1 << 20)
    file.look()

    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            pass

    with monkeypatch.context() as full:
        full.setattr(LineFile, "_open", lambda self: None)
        file._give_up(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("valved.state.trace._open_plain", lambda path: Full())
    file.look()

    assert file.failure == "No space left on device"


# What another version left


@pytest.mark.parametrize("version", [state.VERSION, state.VERSION + 1])
@pytest.mark.parametrize("policy", [{"mode": "gentle"}, "gentle", {"mode": "gentle", "cooldown": [0, 0]}])
def test_a_mode_that_is_not_known_never_becomes_harvest(tmp_path, policy, version):
    first = World(tmp_path)
    first.handover.save()
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**saved_in(first), "version": version, "policy": policy}))
    for _ in range(2):  # also after one more restart
        second = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
        take_over(second, second.config, tmp_path)

        assert second.brake.switches.is_closed
        assert not second.brake.switches.must_leave, "nobody loses work for it"
        assert "gentle" in second.node.status().paused_by
    second.node.resume()
    third = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(third, third.config, tmp_path)
    assert not third.brake.switches.is_closed, "the word of an operator"


def test_a_mode_of_the_command_line_never_waits_for_one_that_is_not_known(tmp_path):
    first = World(tmp_path)
    first.handover.save()
    (tmp_path / "state.json").write_text(json.dumps({**saved_in(first), "policy": {"mode": "gentle"}}))
    second = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)

    take_over(second, second.config, tmp_path, Mode.HARVEST)

    assert not second.brake.switches.is_closed


@pytest.mark.parametrize("change", [{"version": state.VERSION + 1}, {"boot_id": "another"}, {"driver": "1.2"}])
def test_no_channel_is_forgotten_because_valved_was_killed_just_after_it_followed_another_one(tmp_path, change):
    """The state file was the other one's still, and the lines beside it were taken for its lines."""
    first = World(tmp_path)
    first.handover.save()
    (tmp_path / "state.json").write_text(json.dumps({**saved_in(first), **change}))
    second = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    second.disk.later = True  # so nothing is saved in time
    take_over(second, second.config, tmp_path)
    client = second.offline(pid=300)

    third = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(third, third.config, tmp_path)

    assert [left.channel.h_client for left in third.register.channels.leftovers.all()] == [0xC1D00000 + client]


@pytest.mark.parametrize("change", [{"version": state.VERSION + 1}, {"boot_id": "another"}])
def test_a_state_file_of_another_one_never_stays(tmp_path, change):
    first = World(tmp_path)
    first.handover.save()
    (tmp_path / "state.json").write_text(json.dumps({**saved_in(first), **change}))
    second = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)

    take_over(second, second.config, tmp_path)

    assert (saved_in(second)["version"], saved_in(second)["boot_id"]) == (state.VERSION, "boot")


def test_a_line_of_another_boot_is_never_read(tmp_path):
    world = World(tmp_path)
    client = world.offline(pid=300)
    entry, channel = world.books.clients[client], next(iter(world.books.clients[client].channels.values()))
    world.handover.save()
    world.handover.note_channel(entry, channel)

    other = Unsaved(tmp_path / "unsaved.jsonl", "1 another driver", world.handover._prompt)

    assert len(list(world.handover._unsaved.read(with_older=False))) == 1
    assert not list(other.read(with_older=True))


def test_a_job_that_was_frozen_for_a_late_proof_never_stands_on_under_the_next_valved(tmp_path):
    """While it stands its shim cannot come back, so no proof ever comes."""
    world = World(tmp_path)
    client = world.offline(pid=300, gpus=())
    process = world.books.clients[client].process
    world.ladder.freeze_untold(process, "a test")
    world.run(100)
    assert world.signals == [(300, "SIGSTOP")]

    second = successor(world, was_killed=True)
    second.run(1)

    assert second.signals == [(300, "SIGCONT")]
    world.ladder.let_stranger_go(process, "it was told")
    world.handover.save()
    assert saved_in(world)["frozen"] == []


def test_what_comes_while_the_state_is_taken_is_never_called_saved(tmp_path, monkeypatch):
    """Taking it reads stamps. One of them may say that a stop failed: then a process is to be frozen."""
    world = World(tmp_path)
    client = world.offline()
    entry, channel = world.books.clients[client], next(iter(world.books.clients[client].channels.values()))
    told, snapshot = [], world.handover._file._take

    def take():
        state = snapshot()
        if not told:
            told.append("asked")
            world.handover.note_channel(entry, channel)
            world.handover.save()
            world.handover.when_saved(told.append, 1_000 * MS)
        return state

    monkeypatch.setattr(world.handover._file, "_take", take)
    world.disk.later = True
    world.handover.save()
    job, then = world.disk._jobs.pop()

    then(job(), None)  # the first state is written
    world.run(1)
    assert told == ["asked"]
    assert len(list(world.handover._unsaved.read(with_older=False))) == 1

    world.disk.finish()
    world.run(1)
    assert told == ["asked", True]
    assert not list(world.handover._unsaved.read(with_older=False))
