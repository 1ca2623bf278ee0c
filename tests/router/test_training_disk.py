"""Files of fleet jobs on the router's disk: a power cut, a file that is lost, a second router on the same folder."""

from __future__ import annotations

import os
import sqlite3
import threading

import pytest
from training_books import begin, blobs, push
from valve_router.training.ledger import KEPT, FleetBooks
from valve_router.training.records import Gone, LedgerRefused


def test_a_row_never_names_a_blob_that_a_power_cut_could_take(tmp_path, monkeypatch):
    """The folder is forced to disk after the blob has its name, and before the row is."""
    ledger = begin(tmp_path, batches=1)
    one = ledger.join("j", "a", 0.0)
    number = ledger.take("j", one.trainer, one.version, 0.0)
    forced, fsync = [], os.fsync

    def force(descriptor):
        forced.append((os.readlink(f"/proc/self/fd/{descriptor}"), blobs(tmp_path), ledger.kept_in_file()))
        fsync(descriptor)

    class Looks(FleetBooks):
        def kept_in_file(self):
            with sqlite3.connect(tmp_path / "training.sqlite3") as db:
                return db.execute("SELECT COUNT(kept) FROM batches").fetchone()[0]

    ledger.__class__ = Looks
    monkeypatch.setattr("valve_router.training.ledger.os.fsync", force)
    push(ledger, one, [number], 100, content=b"a1")
    ledger.publish("j", 0, b"average", 1.0)

    folder = str(tmp_path / "blobs")
    assert [(found, kept) for path, found, kept in forced if path == folder] == [
        ([b"a1"], 0),
        ([b"a1", b"average"], 1),
    ]


def test_a_blob_that_is_missing_is_never_taken_for_one_that_nobody_needs(tmp_path):
    """A trainer that is told `gone` begins again, and would be told so for ever."""
    ledger = begin(tmp_path, batches=2)
    one = ledger.join("j", "a", 0.0)
    push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 100, content=b"a1")
    blob = ledger.join("j", "a", 1.0).push
    (tmp_path / "blobs" / blob).unlink()

    with pytest.raises(LedgerRefused, match="is missing") as refused:
        ledger.read(blob)

    assert not isinstance(refused.value, Gone)


def test_a_router_that_starts_on_the_same_folder_never_drops_what_another_is_writing(tmp_path, monkeypatch):
    """In an update two of them run for a while. The new one looks for what nobody needs between a blob and its row."""
    ledger = begin(tmp_path, batches=1)
    one = ledger.join("j", "a", 0.0)
    number = ledger.take("j", one.trainer, one.version, 0.0)
    fsync, starting = os.fsync, []

    def force(descriptor):
        fsync(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            starting.append(threading.Thread(target=lambda: FleetBooks(tmp_path).close()))
            starting[0].start()
            starting[0].join(0.5)  # it would be done by then, or waits for the row

    monkeypatch.setattr("valve_router.training.ledger.os.fsync", force)
    push(ledger, one, [number], 100, content=b"a1")
    starting[0].join()

    assert blobs(tmp_path) == [b"a1"]


def published(ledger, count, now=0.0):
    """`count` versions, by one trainer; the blob of each."""
    found = []
    for turn in range(count):
        one = ledger.join("j", "a", now)
        push(ledger, one, [ledger.take("j", one.trainer, one.version, now)], 100, content=b"push %d" % turn, now=now)
        ledger.publish("j", one.version, b"version %d" % turn, now)
        found.append(ledger.version("j", one.version + 1))
    return found


def test_versions_never_fill_the_disk_and_the_last_ones_are_always_there(tmp_path):
    """Each version of each job was kept for ever."""
    ledger = begin(tmp_path, rounds=20, batches=1)
    names = published(ledger, 8)
    assert blobs(tmp_path) == [b"version %d" % turn for turn in range(8 - KEPT, 8)]
    assert [ledger.read(name) for name in names[-KEPT:]] == blobs(tmp_path)
    with pytest.raises(Gone):
        ledger.read(names[-KEPT - 1])  # a trainer that is late joins again
    with pytest.raises(LedgerRefused):
        ledger.publish("j", 0, b"another", 1.0)
    ledger.close()
    again = FleetBooks(tmp_path)
    assert blobs(tmp_path) == [b"version %d" % turn for turn in range(8 - KEPT, 8)]
    assert again.read(again.join("j", "a", 0.0).start) == b"version 7"


def test_a_version_that_comes_again_is_never_dropped_as_an_old_one(tmp_path):
    """An average may be the same bytes as one before; and two jobs may have one blob."""
    ledger = begin(tmp_path, rounds=20, batches=1)
    for turn in range(6):
        one = ledger.join("j", "a", 0.0)
        push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 100, content=b"push %d" % turn)
        ledger.publish("j", one.version, b"same", 0.0)
    assert blobs(tmp_path) == [b"same"]
    assert ledger.read(ledger.join("j", "a", 0.0).start) == b"same"


def test_what_an_older_router_kept_for_ever_is_swept_at_the_start(tmp_path, monkeypatch):
    ledger = begin(tmp_path, rounds=20, batches=1)
    monkeypatch.setattr(FleetBooks, "_drop", lambda *_: None)
    published(ledger, 6)
    ledger.close()
    monkeypatch.undo()
    assert len(blobs(tmp_path)) > KEPT
    FleetBooks(tmp_path).close()
    assert blobs(tmp_path) == [b"version %d" % turn for turn in range(6 - KEPT, 6)]


def test_a_blob_that_the_disk_has_damaged_is_never_sent(tmp_path):
    ledger = begin(tmp_path, batches=2)
    one = ledger.join("j", "a", 0.0)
    push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 100, content=b"a1")
    blob = ledger.join("j", "a", 1.0).push
    for damaged in (b"", b"a", b"a2", b"a1\x00"):
        (tmp_path / "blobs" / blob).write_bytes(damaged)
        with pytest.raises(LedgerRefused, match="is not what was pushed") as refused:
            ledger.read(blob)
        assert not isinstance(refused.value, Gone)


def test_trainers_that_join_again_and_again_never_fill_the_ledger(tmp_path):
    ledger = begin(tmp_path)
    first = ledger.join("j", "a", 0.0)
    for _ in range(50):
        last = ledger.join("j", "a", 0.0)
    ledger.sweep(1000.0)
    assert last.trainer == first.trainer + 50
    with sqlite3.connect(tmp_path / "training.sqlite3") as db:
        assert db.execute("SELECT COUNT(*) FROM trainers").fetchone()[0] == 0
    assert ledger.join("j", "a", 1000.0).trainer == last.trainer + 1  # no number comes again


def test_trainers_that_wait_never_write_to_the_disk_at_each_question(tmp_path):
    """Ten of them ask fifty times a second, and each change is forced to disk. None is given up for it."""
    ledger = begin(tmp_path, silent_s=60.0)
    one = ledger.join("j", "a", 1000.0)

    before = ledger._db.total_changes
    for tick in range(300):  # a minute
        ledger.seen(one.trainer, 1000.0 + tick / 5)
        assert ledger.sweep(1000.0 + tick / 5) == []
    assert 0 < ledger._db.total_changes - before <= 30
    assert ledger.sweep(1059.8 + 60.0) == []  # it may be silent for a minute
    assert ledger.sweep(1059.8 + 62.1) == [one.trainer]
