"""Files of fleet jobs on the router's disk: a power cut, a file that is lost, a second router on the same folder."""

from __future__ import annotations

import os
import sqlite3
import threading

import pytest
from training_books import begin, blobs, push
from valve_router.training.ledger import FleetBooks
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
