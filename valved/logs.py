"""Structured logs: one JSON object per line on standard error, an event name plus its facts.

A thread writes them, so code that logs never waits for the reader of the log. Lines that find the queue full are
counted, and so are lines that one user or process causes again and again. The counts stand in the log once there is
room.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from valved.model.events import Event, EventKind

MOST_LINES = 4096
MOST_BYTES = 16 << 20  # of the file that `valve up` makes, in a folder that is in memory on most machines
PARTING_S = 1.0  # how long the end of the process waits for a reader
BURST = 20.0  # lines of one kind that one user, or one process, may cause at once
MOST_SHARES = 1024  # a process of root's may be a user after the other, without end
# By whose lines, and how many a second: any process can make valved refuse something, and one whom valved cannot hear
# whole comes and goes five times a second, for life.
CAUSED_BY_PEERS = {
    EventKind.MALFORMED: ("uid", 2.0),
    EventKind.REFUSED: ("uid", 2.0),
    EventKind.JOINED: ("pid", 0.1),
    EventKind.LEFT: ("pid", 0.1),
}
CLIENT_FACTS = ("path", "error")  # of the API client, which valved shares with the scheduler


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            line.update({name: value for name, value in event.as_record().items() if value and name != "kind"})
        line.update(getattr(record, "facts", {}))
        line.update({name: getattr(record, name) for name in CLIENT_FACTS if hasattr(record, name)})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@dataclass(slots=True)
class _Share:
    per_second: float
    seen_s: float
    left: float = BURST
    silenced: int = 0

    def left_at(self, now_s: float) -> float:
        return min(BURST, self.left + (now_s - self.seen_s) * self.per_second)


class Limiter:
    """Lines that peers cause come at a bounded rate: of each kind, each user's or each process's."""

    def __init__(self) -> None:
        self._shares: dict[tuple[EventKind, object], _Share] = {}
        self._most = MOST_SHARES

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, "event", None)
        if not isinstance(event, Event) or event.kind not in CAUSED_BY_PEERS:
            return True
        now_s = time.monotonic()
        if len(self._shares) > self._most:  # one that is full again says no more than none
            self._shares = {who: share for who, share in self._shares.items() if share.left_at(now_s) < BURST}
            self._most = max(MOST_SHARES, 2 * len(self._shares))  # else each new one would cost a look at all
        by, per_second = CAUSED_BY_PEERS[event.kind]
        share = self._shares.setdefault((event.kind, event.detail.get(by)), _Share(per_second, now_s))
        share.left, share.seen_s = share.left_at(now_s), now_s
        if share.left < 1:
            share.silenced += 1
            return False
        share.left -= 1
        if share.silenced:
            record.facts = {"like_this_before": share.silenced}
            share.silenced = 0
        return True


class LogSink(Protocol):
    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


class LogFile:
    """Standard error, where it is a file that nobody else bounds: at `most` bytes the file becomes NAME.1, and standard
    output and error go to a new one. One that was deleted is begun anew, too."""

    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self._path = path
        self._most = most

    def write(self, text: str) -> None:
        found = os.fstat(2)
        if found.st_size > self._most or not found.st_nlink:
            self._turn()
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def _turn(self) -> None:
        try:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        except FileNotFoundError:
            pass
        except OSError:  # a folder has that name, say. A log without its past goes on
            os.ftruncate(2, 0)
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for number in (1, 2):
            os.dup2(fd, number)
        os.close(fd)


def _stream(path: Path) -> LogSink:
    """`path`: where `valve up` lets standard error go."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(2), path.stat()):
            fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)  # a file that is cut has no hole
            return LogFile(path)
    return sys.stderr


class Writer(logging.Handler):
    """Lines through a bounded queue to a thread that may wait for the reader."""

    def __init__(self, stream: LogSink, most: int = MOST_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._most = most
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._is_writing = False
        threading.Thread(target=self._serve, name="valved-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with self._changed:
            if len(self._lines) >= self._most:
                self._dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """What was logged last, if the log is still read. Called as the process ends (logging.shutdown)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, PARTING_S)

    def _serve(self) -> None:
        while True:
            text = self._take()
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more: what is said to nobody need not be said twice
                continue

    def _take(self) -> str:
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines)
            self._is_writing = True
            lines = [*self._lines]
            self._lines.clear()
            dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(json.dumps({"level": "warning", "event": "log lines dropped", "count": dropped}))
        return "".join(line + "\n" for line in lines)


def set_up(level: str, path: Path) -> None:
    handler = Writer(_stream(path))
    handler.setFormatter(JsonFormatter())
    handler.addFilter(Limiter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("valved").setLevel(level.upper())
