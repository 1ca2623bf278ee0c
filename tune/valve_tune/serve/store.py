"""The service's memory in SQLite: files, jobs, events, checkpoints. Service and workers open the same database.

Every change is one transaction and names the states it may start from, so that a process that dies leaves a whole row,
and two that change one job at once leave the state of one of them."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WAITING = ("validating_files", "queued")
LIVE = (*WAITING, "running", "paused")
ENDED = ("succeeded", "failed", "cancelled")
IS_LIVE = f"status IN {LIVE}"
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, created INTEGER NOT NULL, bytes INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, finished INTEGER,
  base TEXT NOT NULL, file TEXT NOT NULL, wish TEXT NOT NULL, weight REAL NOT NULL,
  status TEXT NOT NULL, wanted TEXT NOT NULL DEFAULT 'go', spec TEXT, step INTEGER NOT NULL DEFAULT 0,
  deaths INTEGER NOT NULL DEFAULT 0, deaths_at INTEGER NOT NULL DEFAULT -1, tokens INTEGER NOT NULL DEFAULT 0,
  error TEXT, adapter TEXT, result TEXT);
CREATE TABLE IF NOT EXISTS turns (base TEXT PRIMARY KEY, job TEXT, looked INTEGER);
CREATE TABLE IF NOT EXISTS events (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job TEXT NOT NULL, created INTEGER NOT NULL,
  level TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, data TEXT, step INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS one_event_a_step ON events (job, step) WHERE step IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_of ON events (job, number);
CREATE TABLE IF NOT EXISTS checkpoints (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job TEXT NOT NULL, created INTEGER NOT NULL,
  step INTEGER NOT NULL, metrics TEXT NOT NULL, UNIQUE (job, step));
"""
Row = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}{'' if kind.endswith('-') else '_'}{secrets.token_hex(12)}"


class TuneStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("files", "jobs", "workers"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(folder / "tune.sqlite3", timeout=30, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _all(self, text: str, *values: Any) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(text, values).fetchall()]

    def _one(self, text: str, *values: Any) -> Row | None:
        return next(iter(self._all(text, *values)), None)

    def _change(self, text: str, *values: Any) -> bool:
        """Whether a row was changed."""
        with self._lock:
            return self._db.execute(text, values).rowcount > 0

    # files

    def file_path(self, file: str) -> Path:
        return self.folder / "files" / file

    def add_file(self, file: str, size: int, filename: str, purpose: str) -> Row:
        self._change("INSERT INTO files VALUES (?, ?, ?, ?, ?)", file, int(time.time()), size, filename, purpose)
        return self.file(file) or {}

    def sweep_files(self) -> None:
        """What a service that died left of uploads: files that have no row. No other process may be uploading."""
        known = {row["id"] for row in self.files()}
        for path in (self.folder / "files").iterdir():
            if path.name not in known:
                path.unlink()

    def file(self, file: str) -> Row | None:
        return self._one("SELECT * FROM files WHERE id = ?", file)

    def files(self) -> list[Row]:
        return self._all("SELECT * FROM files ORDER BY created DESC, id")

    def drop_file(self, file: str) -> bool:
        """False while a job that has not ended needs it."""
        text = (
            "DELETE FROM files WHERE id = ? AND NOT EXISTS (SELECT 1 FROM jobs WHERE "
            f"(file = ? OR json_extract(wish, '$.validation_file') = ?) AND {IS_LIVE})"
        )
        dropped = self._change(text, file, file, file)
        if dropped:
            self.file_path(file).unlink(missing_ok=True)
        return dropped

    # jobs

    def out(self, job: str) -> Path:
        return self.folder / "jobs" / job

    def add_job(self, base: str, file: str, wish: Row, weight: float) -> Row:
        """`wish` is what the caller said, as it will be shown again."""
        job = new_id("ftjob-")
        text = "INSERT INTO jobs (id, created, base, file, wish, weight, status) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._change(text, job, int(time.time()), base, file, json.dumps(wish), weight, WAITING[0])
        self.say(job, "The job is accepted; its file is checked next.")
        return self.job(job) or {}

    def job(self, job: str) -> Row | None:
        return self._one("SELECT * FROM jobs WHERE id = ?", job)

    def jobs(self, after: str | None, limit: int) -> list[Row]:
        """Newest first."""
        return self._page("jobs", "1 = 1", (), after, limit)

    def live(self, base: str | None = None) -> list[Row]:
        text = f"SELECT * FROM jobs WHERE {IS_LIVE} AND (? IS NULL OR base = ?) ORDER BY number"
        return self._all(text, base, base)

    def move(self, job: str, status: str, since: Iterable[str] = LIVE, **columns: Any) -> bool:
        """To another state, from one of `since` alone. An ended job stays as it is."""
        since = tuple(since)
        if status in ENDED:
            columns["finished"] = int(time.time())
        sets = "".join(f", {name} = ?" for name in columns)
        text = f"UPDATE jobs SET status = ?{sets} WHERE id = ? AND status IN ({','.join('?' * len(since))})"
        return self._change(text, status, *columns.values(), job, *since)

    def wish(self, job: str, wanted: str) -> bool:
        """go, pause or cancel: what the worker is asked for. A cancelled job is never taken back."""
        text = f"UPDATE jobs SET wanted = ? WHERE id = ? AND wanted != 'cancel' AND {IS_LIVE}"
        return self._change(text, wanted, job)

    def hold(self, base: str, job: str) -> None:
        """Which job a base's worker works on: it alone is charged if the worker dies. Kept at the base, so that one
        job takes it over from another at once.
        """
        text = "INSERT INTO turns (base, job) VALUES (?, ?) ON CONFLICT (base) DO UPDATE SET job = excluded.job"
        self._change(text, base, job)

    def let_go(self, base: str, job: str) -> None:
        self._change("UPDATE turns SET job = NULL WHERE base = ? AND job = ?", base, job)

    def looked(self, base: str, pid: int) -> None:
        """A worker came so far that it looks at its jobs."""
        text = (
            "INSERT INTO turns (base, looked) VALUES (?, ?) ON CONFLICT (base) DO UPDATE SET looked = excluded.looked"
        )
        self._change(text, base, pid)

    def has_looked(self, base: str, pid: int) -> bool:
        return self._one("SELECT 1 FROM turns WHERE base = ? AND looked = ?", base, pid) is not None

    def died(self, base: str) -> bool:
        """A worker died: the job whose turn it was may be why. What got further since is not. Whether there was one."""
        text = (
            "UPDATE jobs SET deaths = CASE WHEN deaths_at = step THEN deaths + 1 ELSE 1 END, deaths_at = step "
            f"WHERE id = (SELECT job FROM turns WHERE base = ?) AND wanted != 'cancel' AND {IS_LIVE}"
        )
        charged = self._change(text, base)
        self._change("UPDATE turns SET job = NULL WHERE base = ?", base)
        return charged

    def fail(self, job: str, message: str) -> None:
        error = json.dumps({"code": "training_failed", "message": message, "param": None})
        if self.move(job, "failed", error=error):
            self.say(job, message, "error")

    def keep_result(self, job: str, file: str, metrics: Path) -> None:
        """The metrics of a finished job as a file that clients can fetch. Doing it twice changes nothing."""
        content = metrics.read_bytes()
        self.file_path(file).write_bytes(content)
        text = "INSERT OR IGNORE INTO files VALUES (?, ?, ?, 'metrics.jsonl', 'fine-tune-results')"
        self._change(text, file, int(time.time()), len(content))
        self._change("UPDATE jobs SET result = ? WHERE id = ?", file, job)

    # events and checkpoints

    def say(self, job: str, message: str, level: str = "info") -> None:
        text = "INSERT INTO events (id, job, created, level, type, message) VALUES (?, ?, ?, ?, 'message', ?)"
        self._change(text, new_id("ftevent-"), job, int(time.time()), level, message)

    def stepped(self, job: str, step: int, tokens: int, message: str, data: Row) -> None:
        """A step that a resumed job repeats takes the place of the first, and its tokens count once."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                text = (
                    "INSERT INTO events (id, job, created, level, type, message, data, step) "
                    "VALUES (?, ?, ?, 'info', 'metrics', ?, ?, ?) ON CONFLICT (job, step) WHERE step IS NOT NULL "
                    "DO UPDATE SET created = excluded.created, message = excluded.message, data = excluded.data"
                )
                values = (new_id("ftevent-"), job, int(time.time()), message, json.dumps(data), step)
                self._db.execute(text, values)
                text = "UPDATE jobs SET tokens = tokens + ?, step = ? WHERE id = ? AND step < ?"
                self._db.execute(text, (tokens, step, job, step))
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def saved(self, job: str, step: int, metrics: Row) -> None:
        text = "INSERT OR IGNORE INTO checkpoints (id, job, created, step, metrics) VALUES (?, ?, ?, ?, ?)"
        self._change(text, new_id("ftckpt"), job, int(time.time()), step, json.dumps(metrics))

    def events(self, job: str, after: str | None, limit: int) -> list[Row]:
        return self._page("events", "job = ?", (job,), after, limit)

    def checkpoints(self, job: str, after: str | None, limit: int) -> list[Row]:
        return self._page("checkpoints", "job = ?", (job,), after, limit)

    def _page(self, table: str, where: str, values: tuple[Any, ...], after: str | None, limit: int) -> list[Row]:
        """Newest first; one more than asked for where there is more. An unknown `after` gives nothing."""
        beyond = f" AND number < (SELECT number FROM {table} WHERE id = ?)" if after else ""
        text = f"SELECT * FROM {table} WHERE {where}{beyond} ORDER BY number DESC LIMIT ?"
        return self._all(text, *values, *((after,) if after else ()), limit + 1)
