"""Recorded traces: the schema, the files, and the form that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from node_world import FakeWork, World

from valved.model.events import Event, EventKind
from valved.model.ids import Role
from valved.state.eventfiles import EventFiles
from valved.state.journal import Journal
from valved.state.trace import LineFile, read_lines, to_trace_events

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "proto/trace/event.schema.json").read_text())


def conforms(record):
    """The part of JSON schema that ours uses, checked by hand: no library for one file."""
    assert set(record) == set(SCHEMA["required"]) == set(SCHEMA["properties"])
    assert record["kind"] in SCHEMA["properties"]["kind"]["enum"]
    for name in ("seq", "t_ns", "service", "client"):
        assert type(record[name]) is int
        assert record[name] >= SCHEMA["properties"][name]["minimum"]
    assert all(type(gpu) is int and gpu >= 0 for gpu in record["gpus"])
    assert isinstance(record["reason"], str)
    assert all(type(value) in (str, int) for value in record["detail"].values())
    return True


def a_life(world):
    """A node on which a good deal happens."""
    offline, online = world.offline(gpus=(0, 1)), world.online()
    for _ in range(3):
        world.work(online, ms=5)
        world.run(100)
    world.node.pause("me")
    world.node.resume()
    world.hello(1, wanted=1)
    world.register.malformed(1, 2, "noise")
    world.register.leave(offline, "exit")
    late = world.offline(pid=900)
    world.node.drain("me", stop=False)
    world.register.leave(late, "exit")
    for claim in [claim for claim in world.books.claims.values() if claim.role is Role.OFFLINE]:
        world.processes.end(claim.root.pid)
    world.run(1000)


def test_the_schema_names_every_kind():
    assert SCHEMA["properties"]["kind"]["enum"] == [kind.value for kind in EventKind]


def test_every_recorded_event_conforms_to_the_schema(tmp_path):
    world = World(tmp_path)
    file = LineFile(tmp_path / "trace.jsonl", 1 << 20)
    world.journal._files = EventFiles(world.clock, ((file, True),), FakeWork())

    a_life(world)
    world.journal.close()

    records = list(read_lines(tmp_path / "trace.jsonl"))
    assert len(records) > 20
    assert all(conforms(record) for record in records)
    assert [record["seq"] for record in records] == sorted(record["seq"] for record in records)


def test_audit_records_are_the_acts_and_not_the_looks(tmp_path):
    world = World(tmp_path)
    file = LineFile(tmp_path / "audit.jsonl", 1 << 20)
    world.journal._files = EventFiles(world.clock, ((file, False),), FakeWork())

    a_life(world)
    world.journal.close()

    kinds = {record["kind"] for record in read_lines(tmp_path / "audit.jsonl")}
    assert "gate" not in kinds, "500 a second would push out whom valved killed"
    assert {"paused", "resumed", "refused", "claimed", "leaving", "drained"} <= kinds
    assert not kinds & {"decided", "wake", "joined"}


def test_the_exported_trace_shows_each_stop_as_a_span(tmp_path):
    world = World(tmp_path)
    world.offline()
    online = world.online()
    world.run(100)
    launch_us = world.clock.now_ns() / 1e3
    world.gate.launch(online)
    world.run(1)
    world.gate.finish(online)
    world.run(100)

    exported = to_trace_events([event.as_record() for event in world.journal.recent(lambda e: True, 1000)])

    spans = [event for event in exported["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    stopping, stopped = spans[-2:]
    assert (stopping["name"], stopping["ts"]) == ("stopping", launch_us)
    assert stopped["name"] == "offline stopped"
    assert stopped["ts"] == stopping["ts"] + stopping["dur"]
    assert stopping["dur"] + stopped["dur"] == pytest.approx(21_000, rel=0.1)
    assert json.dumps(exported)


def test_the_exported_trace_never_shows_offline_work_as_stopped_while_it_still_runs():
    gate = {"launch_ns": 1_000_000, "done_ns": 1_590_000}
    records = [
        {"kind": "claimed", "service": 7, "client": 0, "gpus": [], "reason": "", "t_ns": 1, "detail": {"name": "chat"}},
        {"kind": "gate", "service": 7, "client": 1, "gpus": [0], "reason": "", "t_ns": 1_590_000, "detail": gate},
        {"kind": "wake", "service": 7, "client": 0, "gpus": [0], "reason": "", "t_ns": 9_000_000, "detail": {}},
    ]

    exported = to_trace_events(records)["traceEvents"]

    spans = {event["name"]: (event["ts"], event["dur"]) for event in exported if event["ph"] == "X"}
    assert spans["stopping"] == (1_000.0, 590.0)
    assert spans["offline stopped"] == (1_590.0, 7_410.0)
    tracks = {event["args"]["name"] for event in exported if event["name"] == "thread_name"}
    assert tracks == {"GPU 0", "chat"}


def test_a_stop_that_has_not_ended_reaches_to_the_end_of_the_trace(tmp_path):
    world = World(tmp_path)
    world.offline()
    online = world.online()
    world.run(100)
    world.gate.launch(online)
    world.run(1)
    world.journal.emit(EventKind.NOTED, reason="later", t_ns=world.clock.now_ns() + 50_000_000)

    exported = to_trace_events([event.as_record() for event in world.journal.recent(lambda e: True, 1000)])

    assert max(event.get("dur", 0) for event in exported["traceEvents"]) >= 50_000


def test_a_full_file_turns_over_and_keeps_one_old_one(tmp_path):
    file = LineFile(tmp_path / "t.jsonl", 2000)
    file.look()
    for number in range(1, 100):
        file.write(Event(seq=number, t_ns=1, kind=EventKind.NOTED, reason="x" * 50))
    file.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "t.jsonl.1"]
    assert (tmp_path / "t.jsonl.1").stat().st_size < 2300


def test_a_file_that_cannot_be_written_is_given_up_and_said(tmp_path):
    file = LineFile(tmp_path / "no" / "such" / "folder", 100)

    file.look()
    file.write(Event(seq=1, t_ns=1, kind=EventKind.NOTED))

    assert "No such file" in file.failure


def test_a_line_cut_short_by_a_crash_ends_the_trace(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"seq": 1}\n{"se')

    assert list(read_lines(path)) == [{"seq": 1}]


def test_a_slow_watcher_is_told_how_much_it_missed(tmp_path):
    world = World(tmp_path)
    watcher = world.journal.watch((), 3, lambda: None)
    for _ in range(10):
        world.journal.emit(EventKind.NOTED)

    taken = [(event.seq, lost) for event, lost in watcher.take()]

    assert [lost for _, lost in taken] == [7, 0, 0]


def test_a_watcher_sees_only_what_it_asked_for(tmp_path):
    world = World(tmp_path)
    watcher = world.journal.watch(["paused"], 10, lambda: None)

    world.node.pause("me")

    assert [event.kind for event, _ in watcher.take()] == [EventKind.PAUSED]


def test_the_ring_forgets_the_oldest(tmp_path):
    world = World(tmp_path)
    journal = Journal(world.clock, 5)
    for _ in range(20):
        journal.emit(EventKind.NOTED)

    assert [event.seq for event in journal.recent(lambda e: True, 100)] == [16, 17, 18, 19, 20]


def test_a_line_that_a_full_disk_cut_short_never_takes_the_next_one_with_it(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text('{"seq":1}\n{"seq":2,"ki')

    file = LineFile(path, 1 << 20)
    file.look()
    for seq in (3, 4):
        file.write(Event(seq, 0, EventKind.NOTED))
    file.close()

    assert [record["seq"] for record in read_lines(path)] == [1, 3, 4]
