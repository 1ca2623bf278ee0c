"""What a fleet job has computed, in SQLite: nothing is lost and no micro-batch counts twice, whatever is killed.

A round is a number of micro-batches that are trained from one version of the adapter. After its time limit nothing more
of it is handed out: what is kept is averaged, and what still waits goes into the next round. A micro-batch waits, is
out with a trainer, or is kept: part of a checkpoint that its trainer pushed. It may be computed several times, and is
kept once. A trainer that was given up (it was silent, or another came under its name) has a number that is no longer
valid: what it pushes later is refused, and what it held waits again. Its last push stays, and counts in the average.
`now_s` is wall time: it must go on over a restart of the router.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from valve_router.training.records import Gone, Joined, LedgerRefused, Push, RoundStanding

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  name TEXT PRIMARY KEY, rounds INTEGER NOT NULL, round_batches INTEGER NOT NULL, version INTEGER NOT NULL DEFAULT 0,
  digest TEXT NOT NULL, tokens INTEGER NOT NULL, begun_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  job TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, queued_s REAL NOT NULL,
  trainer INTEGER, kept INTEGER, PRIMARY KEY (job, number));
CREATE TABLE IF NOT EXISTS trainers (
  id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, name TEXT NOT NULL, seen_s REAL NOT NULL,
  is_valid INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS pushes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, version INTEGER NOT NULL, name TEXT NOT NULL,
  blob TEXT NOT NULL, tokens INTEGER NOT NULL, steps INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS versions (
  job TEXT NOT NULL, version INTEGER NOT NULL, blob TEXT NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (job, version));
CREATE TABLE IF NOT EXISTS rounds (job TEXT PRIMARY KEY, begun_s REAL NOT NULL, limit_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of ON batches (job, version, trainer, kept);
"""
KEPT = 3  # versions of a job: the one that is trained on, and two for whoever is late or wants one back
NEEDED = f"""
SELECT blob FROM versions JOIN jobs ON jobs.name = versions.job WHERE versions.version > jobs.version - {KEPT}
UNION SELECT blob FROM pushes WHERE id IN (
  SELECT MAX(pushes.id) FROM pushes JOIN jobs ON jobs.name = pushes.job AND jobs.version = pushes.version
  GROUP BY pushes.job, pushes.name)
"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DIGEST = re.compile(r"[0-9a-f]{64}")


class FleetBooks:
    def __init__(self, folder: Path, silent_s: float = 60.0) -> None:
        self._blobs = folder / "blobs"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._silent_s, self._late_s = silent_s, silent_s / 30  # so often at most is written that one was heard
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            folder / "training.sqlite3", timeout=30, check_same_thread=False, isolation_level=None
        )
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(SCHEMA)
        self._drop(path.name for path in list(self._blobs.iterdir()))  # what a router that was killed left over

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # on a full disk SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise

    # jobs

    def add_job(
        self,
        name: str,
        *,
        rounds: int,
        round_batches: int,
        digest: str,
        tokens: int,
        now_s: float,
        limit_s: float | None = None,
    ) -> None:
        """`tokens`: of a usual micro-batch. `limit_s`: of a round, 0: none; None: not said, the first trainer that
        says it sets it. Of a job that is there nothing changes."""
        if not NAME.fullmatch(name) or rounds < 1 or not 1 <= round_batches <= 1_000_000 or tokens < 1:
            raise LedgerRefused("a job has a name, at least one round, and 1 to 1,000,000 micro-batches a round")
        if limit_s is not None and not 0 <= limit_s < float("inf"):
            raise LedgerRefused("a round's time limit is finite, and at least 0 s")
        with self._change() as db:
            row = db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
            same = (rounds, round_batches, digest)
            if row is not None and (row["rounds"], row["round_batches"], row["digest"]) != same:
                raise LedgerRefused(f"there is another job {name}: its data, rounds or spec differ")
            if limit_s is not None:
                db.execute("INSERT OR IGNORE INTO rounds VALUES (?, ?, ?)", (name, now_s, limit_s))
                (set_s,) = db.execute("SELECT limit_s FROM rounds WHERE job = ?", (name,)).fetchone()
                if set_s != limit_s:
                    said = f"a round of {name} has a time limit of {set_s:g} s, and this trainer says {limit_s:g} s"
                    raise LedgerRefused(f"{said}: give all of them the same --sync-minutes")
            if row is not None:
                return
            text = "INSERT INTO jobs (name, rounds, round_batches, digest, tokens, begun_s) VALUES (?, ?, ?, ?, ?, ?)"
            db.execute(text, (name, rounds, round_batches, digest, tokens, now_s))
            _queue(db, name, 0, now_s)

    def standing(self, job: str, now_s: float) -> RoundStanding:
        with self._lock:
            row = _job(self._db, job)
            counted = _counted(self._db, job, row["version"])
            return RoundStanding(
                version=row["version"],
                tokens=row["tokens"],
                is_done=not counted["whole"],
                queued_s=counted["oldest_s"] if counted["waiting"] and not _is_due(self._db, job, now_s) else None,
                parts=_parts(self._db, job, row["version"], now_s),
            )

    def jobs(self) -> list[dict[str, Any]]:
        """With what waits, is out and is kept in this round."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM jobs ORDER BY name").fetchall()  # `whole`: of all three
            return [{**row, **_counted(self._db, row["name"], row["version"])} for row in map(dict, rows)]

    # trainers

    def join(self, job: str, name: str, now_s: float) -> Joined:
        """A trainer begins, or begins again: the one that had its name is given up."""
        if not NAME.fullmatch(name):
            raise LedgerRefused("a trainer has a name of letters, digits, ., - and _")
        with self._change() as db:
            row = _job(db, job)
            text = "SELECT id FROM trainers WHERE job = ? AND name = ? AND is_valid"
            given_up = tuple(old["id"] for old in db.execute(text, (job, name)))
            for old in given_up:
                _give_up(db, old)
            found = db.execute("INSERT INTO trainers (job, name, seen_s) VALUES (?, ?, ?)", (job, name, now_s))
            text = "SELECT * FROM pushes WHERE job = ? AND version = ? AND name = ? ORDER BY id DESC LIMIT 1"
            push = db.execute(text, (job, row["version"], name)).fetchone()
            return Joined(
                trainer=int(found.lastrowid or 0),
                version=row["version"],
                start=_start(db, job, row["version"]),
                push=push["blob"] if push else "",
                tokens=push["tokens"] if push else 0,
                steps=push["steps"] if push else 0,
                kept=db.execute("SELECT COUNT(kept) FROM batches WHERE job = ?", (job,)).fetchone()[0],
                silent_s=self._silent_s,
                given_up=given_up,
            )

    def sweep(self, now_s: float, heard_since_s: float = 0.0) -> list[int]:
        """Give up trainers that were silent; returns them. None could be heard before `heard_since_s`."""
        with self._change() as db:
            _set_back(db, now_s)
            since_s = now_s - self._silent_s
            found = db.execute("SELECT id FROM trainers WHERE is_valid AND seen_s < ?", (since_s - self._late_s,))
            silent = [row["id"] for row in found] if since_s > heard_since_s else []
            for trainer in silent:
                _give_up(db, trainer)
            return silent

    def seen(self, trainer: int, now_s: float) -> None:
        with self._change() as db:
            _see(db, trainer, now_s, self._late_s)

    # micro-batches

    def take(self, job: str, trainer: int, version: int, now_s: float) -> int | None:
        """The next micro-batch of this round, or None: nothing waits, its time is over, or it is over itself."""
        with self._change() as db:
            _see(db, trainer, now_s, self._late_s)
            if version != _job(db, job)["version"] or _is_due(db, job, now_s):
                return None
            _begin(db, job, version, now_s)
            text = (
                "UPDATE batches SET trainer = ? WHERE job = ? AND number = (SELECT MIN(number) FROM batches "
                "WHERE job = ? AND version = ? AND trainer IS NULL AND kept IS NULL) RETURNING number"
            )
            row = db.execute(text, (trainer, job, job, version)).fetchone()
            return int(row["number"]) if row else None

    def push(self, job: str, trainer: int, version: int, push: Push, now_s: float) -> bool:
        """Keep what the trainer has computed since its last push. False: this very push was kept already."""
        with self._written(push.blob) as (blob, beside), self._change() as db:
            name = _see(db, trainer, now_s, self._late_s)
            if version != _job(db, job)["version"]:
                raise Gone(f"version {version} of {job} is over")
            text = "SELECT * FROM pushes WHERE job = ? AND version = ? AND name = ? ORDER BY id DESC LIMIT 1"
            last = db.execute(text, (job, version, name)).fetchone()
            if last is not None and (last["blob"], last["tokens"], last["steps"]) == (blob, push.tokens, push.steps):
                return False
            if last is not None and push.tokens <= last["tokens"]:
                raise LedgerRefused("a push holds more tokens than the one before it")
            numbers, named = json.dumps(list(push.numbers)), "number IN (SELECT value FROM json_each(?))"
            text = f"SELECT COUNT(*) FROM batches WHERE job = ? AND trainer = ? AND kept IS NULL AND {named}"
            held = db.execute(text, (job, trainer, numbers)).fetchone()[0]
            if not push.numbers or held != len(set(push.numbers)) or held != len(push.numbers):
                raise LedgerRefused("a push names micro-batches that this trainer holds, each once")
            text = "INSERT INTO pushes (job, version, name, blob, tokens, steps) VALUES (?, ?, ?, ?, ?, ?)"
            kept = db.execute(text, (job, version, name, blob, push.tokens, push.steps)).lastrowid
            db.execute(f"UPDATE batches SET kept = ? WHERE job = ? AND {named}", (kept, job, numbers))
            self._put(beside, blob)
        if last is not None:
            self._drop([last["blob"]])
        return True

    # versions

    def publish(self, job: str, version: int, blob: bytes | memoryview, now_s: float) -> int:
        """The average of round `version` becomes the next version. Twice the same is once; another one is refused."""
        with self._written(blob) as (name, beside), self._change() as db:
            row = _job(db, job)
            there = db.execute("SELECT blob FROM versions WHERE job = ? AND version = ?", (job, version + 1)).fetchone()
            if there is not None:
                if there["blob"] != name:
                    raise LedgerRefused(f"version {version + 1} of {job} is another one")
                return version + 1
            parts = _parts(db, job, version, now_s)
            if row["version"] != version or not parts:
                raise LedgerRefused(f"round {version} of {job} is not whole")
            tokens = sum(part["tokens"] for part in parts)
            db.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", (job, version + 1, name, tokens))
            db.execute("UPDATE jobs SET version = ? WHERE name = ?", (version + 1, job))
            text = "UPDATE batches SET version = ?, trainer = NULL WHERE job = ? AND version = ? AND kept IS NULL"
            db.execute(text, (version + 1, job, version))
            _queue(db, job, version + 1, now_s)
            old = _start(db, job, version + 1 - KEPT)
            self._put(beside, name)
        self._drop([part["blob"] for part in parts] + [old] * bool(old))
        return version + 1

    def version(self, job: str, version: int) -> str:
        with self._lock:
            return _start(self._db, job, version)

    def kept_of(self, job: str) -> list[tuple[int, int]]:
        """(micro-batch, push) of all that is kept: what tests count."""
        with self._lock:
            text = "SELECT number, kept FROM batches WHERE job = ? AND kept IS NOT NULL ORDER BY number"
            return [(row["number"], row["kept"]) for row in self._db.execute(text, (job,))]

    # blobs

    def read(self, blob: str) -> bytes:
        if not DIGEST.fullmatch(blob):
            raise LedgerRefused(f"no blob {blob[:64]}")
        try:
            return _whole(self._blobs / blob)
        except FileNotFoundError:
            with self._lock:
                if blob in self._needed():
                    raise LedgerRefused(f"blob {blob} is missing in {self._blobs}: its job cannot go on") from None
            raise Gone(f"blob {blob} is no longer needed: its round is over") from None

    @contextlib.contextmanager
    def _written(self, content: bytes | memoryview) -> Iterator[tuple[str, Path]]:
        """Its name, and a file that is whole on disk: the code that takes the content gives the file its name."""
        name = hashlib.sha256(content).hexdigest()
        beside = self._blobs / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield name, beside
        finally:
            beside.unlink(missing_ok=True)

    def _put(self, beside: Path, blob: str) -> None:
        """Its name is on disk before a row says so."""
        beside.replace(self._blobs / blob)
        folder = os.open(self._blobs, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _needed(self) -> set[str]:
        return {row["blob"] for row in self._db.execute(NEEDED)}

    def _drop(self, blobs: Iterable[str]) -> None:
        """Those that nothing needs. A change waits for another router here that is between a blob and its row."""
        with self._change():
            for blob in set(blobs) - self._needed():
                (self._blobs / blob).unlink(missing_ok=True)


def _whole(path: Path) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != path.name:
        raise LedgerRefused(f"blob {path.name} in {path.parent} is not what was pushed: its job cannot go on")
    return content


def _set_back(db: sqlite3.Connection, now_s: float) -> None:
    """What was seen later than now was seen before the clock was set back."""
    for table, seen in (("trainers", "seen_s"), ("rounds", "begun_s")):
        db.execute(f"UPDATE {table} SET {seen} = ? WHERE {seen} > ?", (now_s, now_s))


def _queue(db: sqlite3.Connection, job: str, version: int, now_s: float) -> None:
    """Fill the round up; what an earlier one left over is in it already."""
    row, left = _job(db, job), _counted(db, job, version)["waiting"]
    queued = db.execute("SELECT COUNT(*) FROM batches WHERE job = ?", (job,)).fetchone()[0]
    count = min(row["round_batches"] - left, row["rounds"] * row["round_batches"] - queued)
    rows = ((job, queued + number, version, now_s) for number in range(count))
    db.executemany("INSERT INTO batches (job, number, version, queued_s) VALUES (?, ?, ?, ?)", rows)


def _counted(db: sqlite3.Connection, job: str, version: int) -> dict[str, Any]:
    """Micro-batches of a round, and when the oldest that waits was queued."""
    text = (
        "SELECT SUM(trainer IS NULL AND kept IS NULL) AS waiting, SUM(trainer IS NOT NULL AND kept IS NULL) AS out, "
        "SUM(kept IS NOT NULL) AS kept, COUNT(*) AS whole, "
        "MIN(CASE WHEN trainer IS NULL AND kept IS NULL THEN queued_s END) AS oldest_s "
        "FROM batches WHERE job = ? AND version = ?"
    )
    return {name: value or 0 for name, value in dict(db.execute(text, (job, version)).fetchone()).items()}


def _is_due(db: sqlite3.Connection, job: str, now_s: float) -> bool:
    """The round's time is over, and there is or will be something to average: nothing more of it is handed out."""
    row = db.execute("SELECT begun_s, limit_s FROM rounds WHERE job = ?", (job,)).fetchone()
    if row is None or not row["limit_s"] or now_s - row["begun_s"] < row["limit_s"]:
        return False  # a job that an older router began has no row until a trainer names it again
    version = _job(db, job)["version"]
    if _has(db, job, version, "kept IS NULL AND trainer IS NOT NULL"):
        return bool(now_s - row["begun_s"] < 2 * row["limit_s"])  # a gate may hold one for hours: the others go on then
    return _has(db, job, version, "kept IS NOT NULL")


def _begin(db: sqlite3.Connection, job: str, version: int, now_s: float) -> None:
    """A round's time begins with its first micro-batch."""
    if not _has(db, job, version, "kept IS NOT NULL OR trainer IS NOT NULL"):
        db.execute("UPDATE rounds SET begun_s = ? WHERE job = ?", (now_s, job))


def _parts(db: sqlite3.Connection, job: str, version: int, now_s: float) -> list[dict[str, Any]] | None:
    """When every micro-batch of the round is kept, or its time is over and none is out; else None."""
    counted = _counted(db, job, version)
    if not counted["kept"] or counted["out"] or (counted["waiting"] and not _is_due(db, job, now_s)):
        return None
    text = (
        "SELECT name, blob, tokens FROM pushes WHERE id IN (SELECT MAX(id) FROM pushes WHERE job = ? "
        "AND version = ? GROUP BY name) ORDER BY name"
    )
    return [dict(row) for row in db.execute(text, (job, version))]


def _has(db: sqlite3.Connection, job: str, version: int, which: str = "1") -> bool:
    text = f"SELECT EXISTS (SELECT 1 FROM batches WHERE job = ? AND version = ? AND ({which}))"
    return bool(db.execute(text, (job, version)).fetchone()[0])


def _job(db: sqlite3.Connection, name: str) -> dict[str, Any]:
    row = db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise LedgerRefused(f"no job {name}")
    return dict(row)


def _start(db: sqlite3.Connection, job: str, version: int) -> str:
    row = db.execute("SELECT blob FROM versions WHERE job = ? AND version = ?", (job, version)).fetchone()
    return str(row["blob"]) if row else ""


def _valid(db: sqlite3.Connection, trainer: int) -> str:
    row = db.execute("SELECT name FROM trainers WHERE id = ? AND is_valid", (trainer,)).fetchone()
    if row is None:
        raise Gone("this trainer was given up")
    return str(row["name"])


def _see(db: sqlite3.Connection, trainer: int, now_s: float, late_s: float) -> str:
    """Its name. One that waits asks five times a second, and each change is forced to disk."""
    db.execute("UPDATE trainers SET seen_s = ?1 WHERE id = ?2 AND seen_s < ?1 - ?3", (now_s, trainer, late_s))
    return _valid(db, trainer)


def _give_up(db: sqlite3.Connection, trainer: int) -> None:
    db.execute("DELETE FROM trainers WHERE id = ?", (trainer,))  # no number comes again
    db.execute("UPDATE batches SET trainer = NULL WHERE trainer = ? AND kept IS NULL", (trainer,))
