"""A state file that is none: set aside and named, and never a reason not to start."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from fake_gate import FakeGate
from node_world import World
from valve.v1 import node_pb2

from valved import fds, metrics
from valved.daemon import take_over
from valved.model.events import EventKind
from valved.model.ids import Mode, Role
from valved.rpc import convert
from valved.state import saved as state


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def set_aside(path, data):
    path.write_bytes(data)
    saved, problem = state.load(path)
    return saved is None and "set aside" in problem and path.with_name("state.json.bad").read_bytes() == data


def test_a_state_file_that_is_cut_at_any_byte_is_set_aside_and_named(first):
    first.offline()
    first.online()
    first.handover.save()
    path = first.folder / "state.json"
    data = path.read_bytes()

    assert [end for end in range(len(data)) if not set_aside(path, data[:end])] == []


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b"\xff", b"[]", b'{"more": ' + b"[" * 100_000])
def test_a_state_file_that_is_none_never_keeps_valved_from_starting(tmp_path, data):
    assert set_aside(tmp_path / "state.json", data)


def test_a_state_file_that_stays_where_it_is_is_never_said_to_be_set_aside(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=PermissionError(errno.EPERM, "")))

    saved, problem = state.load(tmp_path / "state.json")

    assert saved is None
    assert "cannot be set aside" in problem


def without_sense(said, *path):
    *folders, last = path
    for name in folders:
        said = said[name]
    said[last] = {"no": ["sense"]}


PARTS = [
    ("counters", "gates"),
    ("refusals",),
    ("gpus", 0, "harvest_ns"),
    ("services", 0, "name"),
    ("clients", 0),
    ("next_client",),
    ("policy", "cooldown"),
    ("memory", "counters"),
    ("memory", "peaks"),
    ("frozen",),
    ("ending",),
]


@pytest.mark.parametrize("path", PARTS, ids=lambda path: ".".join(map(str, path)))
def test_a_value_without_sense_never_costs_more_than_its_own_record(first, path):
    """A mode that an operator set is in that file, too: without it valved would harvest again."""
    first.offline(name="batch")
    chat = first.service_of(first.online(name="chat"))
    first.node.set_policy(Mode.OBSERVE, {}, 0)
    first.handover.save()
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    without_sense(said, *path)
    file.write_text(json.dumps(said))

    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(second, second.config, first.folder)

    assert second.brake.mode is Mode.OBSERVE
    assert chat in second.gating.online
    assert any("makes no sense" in event.reason for event in second.events(EventKind.NOTED))
    assert json.loads(file.with_name("state.json.bad").read_bytes()) == said
    second.run(100)
    assert second.service_of(second.online(name="new")) not in (0, chat)


LARGE = [
    ("counters", "gates"),
    ("refusals", "quota"),
    ("gpus", 0, "harvest_ns"),
    ("gpus", 0, "latency", 0),
    ("services", 0, "harvest_ns"),
    ("services", 1, "preempted", 0),
    ("services", 1, "most_preempted"),
    ("memory", "phases", "total", "counts", 0),
    ("memory", "phases", "total", "sum_ns"),
]


@pytest.mark.parametrize("path", LARGE, ids=lambda path: ".".join(map(str, path)))
def test_a_number_that_no_field_holds_never_breaks_status_or_metrics(first, path):
    """It is saved again at each start: 400 digits were never got rid of."""
    first.offline(name="batch")
    first.online(name="chat")
    first.gating.counters.refuse("quota")
    first.handover.save()
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    *folders, last = path
    place = said
    for name in folders:
        place = place[name]
    place[last] = 10**400
    file.write_text(json.dumps(said))

    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(second, second.config, first.folder)

    assert convert.fill(node_pb2.Status(), second.node.status()).gpus
    assert metrics.render(second.node.status)
    second.handover.save()
    assert state.load(file)[1] == ""


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("value", [-(1 << 62), (1 << 63) - 1])
def test_a_cooldown_without_sense_never_keeps_offline_work_stopped(first, number, value):
    """An age before all time: each look at the service failed, so offline work beside it stood for ever."""
    first.online(name="chat", pid=200)
    first.handover.save()
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    said["services"][0]["cooldown"][number] = value
    file.write_text(json.dumps(said))
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)

    take_over(second, second.config, first.folder)
    assert not [event for event in second.events(EventKind.NOTED) if "unreadable" in event.reason]
    chat = second.online(pid=200)
    second.offline(pid=300)
    second.run(30_000)
    second.gate.launch(chat)
    second.run(10)
    assert second.gate.is_gated(0)
    second.gate.finish(chat)
    second.run(10_000)
    assert not second.gate.is_gated(0)


def test_a_cooldown_that_valved_refuses_never_costs_the_mode(first):
    """Its numbers are of the right types: another version, or a hand, takes other ones."""
    first.node.set_policy(Mode.OBSERVE, {}, 0)
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    said["policy"]["cooldown"] = [0, 0, 0, 0.0, 0]
    file.write_text(json.dumps(said))

    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(second, second.config, first.folder)

    assert second.brake.mode is Mode.OBSERVE
    assert second.gating.settings.cooldown == first.gating.settings.cooldown
    assert any("policy" in event.reason for event in second.events(EventKind.NOTED))


@pytest.mark.parametrize("name", ["version", "boot_id", "driver"])
def test_a_state_of_which_nobody_knows_what_it_is_about_is_set_aside(first, name):
    first.handover.save()
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    without_sense(said, name)

    assert set_aside(file, json.dumps(said).encode())


@pytest.mark.parametrize("number", [-(2**63), 0, 2, 0x7FFFFFFF, 2**63, 10**30])
def test_the_number_of_a_service_is_never_one_that_another_has(first, number):
    """A hand, or another version, wrote which comes next; numbers above 0x7f000000 are of valved itself."""
    chat = first.service_of(first.online(name="chat"))
    first.handover.save()
    file = first.folder / "state.json"
    said = json.loads(file.read_bytes())
    file.write_text(json.dumps({**said, "next_service": number, "next_client": number}))

    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(second, second.config, first.folder)

    assert chat < second.service_of(second.online(name="new")) < 100


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def round_link(path):
    path.symlink_to(path.name)


def huge(path):
    """Nothing but a hole: no machine has as much memory."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [pipe, endless, round_link, os.mkdir, huge], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["state.json", ".state.json.new", "state.json.bad", "unsaved.jsonl", "valved.pid"])
def test_what_is_no_file_never_keeps_valved_waiting(first, name, make):
    """A pipe that nobody writes into has no end, nor has a device."""
    path = first.folder / name
    path.unlink(missing_ok=True)
    make(path)

    take_over(first, first.config, first.folder)
    first.online(name="chat")
    first.handover.save()

    assert not any("Errno" in event.reason for event in first.events(EventKind.NOTED)), "people read it"
    assert state.RunFolder(first.folder).take(replace=False) is None


def test_no_state_is_ever_written_that_a_successor_finds_too_large(tmp_path, monkeypatch):
    """A client may tell of channels that are none. What an operator set, and other clients' channels, outlive that."""
    monkeypatch.setattr(state, "CLIENTS_BYTES", 6000, raising=False)
    monkeypatch.setattr(fds, "MOST_BYTES", 8000)
    channel = state.SavedChannel(gpu=0, h_client=1, h_channel=2, cid=3, h_tsg=4, engine=1, compute=True)
    clients = [
        state.SavedClient(pid=pid, start_time=1, role=Role.OFFLINE, service=1, channels=[channel] * count)
        for pid, count in enumerate([1, 1000, 50, 500])
    ]
    empty = World(tmp_path).handover.snapshot()
    state.save(
        tmp_path / "state.json",
        msgspec.structs.replace(empty, clients=clients, policy=state.SavedPolicy(mode=Mode.OFF)),
    )

    found, problem = state.load(tmp_path / "state.json")

    assert found is not None, problem
    assert found.policy.mode is Mode.OFF
    assert [len(client.channels) for client in found.clients] == [1, 0, 50, 0]


def test_no_file_beside_the_state_is_so_large_that_it_keeps_valved_from_starting(first):
    chat = first.service_of(first.online(name="chat"))
    first.handover.save()
    huge(first.folder / "unsaved.jsonl")
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)

    take_over(second, second.config, second.folder)

    assert chat in second.books.services
    assert any("unsaved.jsonl" in event.reason for event in second.events(EventKind.NOTED))


@pytest.mark.parametrize("make", [pipe, endless, round_link, os.mkdir, huge], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["pause", "drain"])
def test_a_switch_that_is_no_file_is_a_switch_and_never_keeps_valved_waiting(first, name, make):
    make(first.folder / name)

    first.brake.look_at_file()

    assert first.brake.is_paused if name == "pause" else first.brake.is_draining
    assert first.brake.paused_by.isprintable(), "people read it in a terminal"
