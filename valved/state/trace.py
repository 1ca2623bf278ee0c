"""Events on their way out of the process: JSON lines in a file of bounded size, and the form that Perfetto opens."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from valved.fds import Fds
from valved.model.events import Event, EventKind

log = logging.getLogger("valved")

BUFFER_BYTES = 64 * 1024


class LineFile:
    """Appends events to a file; at `max_bytes` the file becomes NAME.1 and a new one begins.

    A full disk must not stop gating: a failure closes the file and the log says why. `look` opens it, the first time
    and after a failure. One that was moved or deleted is begun anew. All of this may wait for a disk: the journal does
    it in a thread.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.failure = ""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._file: TextIO | None = None

    def write(self, event: Event) -> None:
        if self._file is None:
            return
        line = json.dumps(event.as_record(), separators=(",", ":")) + "\n"
        try:
            self._file.write(line)
            self._bytes += len(line)
            if self._bytes > self._max_bytes:
                self._turn()
        except OSError as error:
            self._give_up(error)

    def look(self) -> None:
        """See whether it can be written now."""
        if self._file is None:
            self._file = self._open()

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
                if not self._is_at_its_place(self._file):
                    self._file.close()
                    self._file = self._open()
            except OSError as error:
                self._give_up(error)

    def _is_at_its_place(self, file: TextIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO | None:
        try:
            self._put_aside()
            file = _open_plain(self.path)
            self._bytes = self.path.stat().st_size
            file.write(
                "\n" * (_is_torn(self.path) or bool(self.failure))
            )  # a disk that is full opens files all the same
            file.flush()
            self.failure = ""
            return file
        except OSError as error:
            self._give_up(error)
            return None

    def _turn(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = self._open()

    def _put_aside(self) -> None:
        """One that has its size, and before it is opened: where that fails nothing more is written to it."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > self._max_bytes:
                self.path.replace(self.path.with_name(self.path.name + ".1"))

    def _give_up(self, error: OSError) -> None:
        words = error.strerror or str(error)
        before, self.failure = self.failure, f"{error.filename2}: {words}" if error.filename2 else words
        self._file = None
        if self.failure != before:
            log.warning("events are not written", extra={"facts": {"error": f"{self.path}: {self.failure}"}})


def read_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    """Records of a recorded trace, oldest first. A line that a crash or a full disk cut short costs itself alone."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _open_plain(path: Path) -> TextIO:
    """For its owner alone: it names the work of all users. A pipe has a reader, who could keep the loop waiting."""
    with Fds() as fds:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        fd = fds.own(os.open(path, flags, 0o600))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        file = os.fdopen(fd, "a", encoding="utf-8", buffering=BUFFER_BYTES)
        fds.keep()
    return file


def _is_torn(path: Path) -> bool:
    """Its last line has no end: the next one would be a part of it."""
    with path.open("rb") as file:
        return bool(file.seek(0, os.SEEK_END)) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"


def to_trace_events(records: Iterable[Mapping[str, Any]], names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The trace-event form that Perfetto and chrome://tracing open.

    Two processes. `GPUs` has a track per GPU: "stopping" from the online launch until the driver call came back, while
    offline work may still run, then "offline stopped". `services` has a track per online service that shows when it
    held its GPUs. Everything else is an instant on its service's track. `names`: of services, beyond those claimed
    here.
    """
    timeline = _Timeline(dict(names or {}))
    for record in records:
        timeline.take(record)
    return {"traceEvents": timeline.finish(), "displayTimeUnit": "ms"}


_GPUS, _SERVICES = 1, 2


class _Timeline:
    """Spans that are open, and events that are finished."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._out: list[dict[str, Any]] = [_named(_GPUS, "GPUs"), _named(_SERVICES, "services")]
        self._closed: dict[int, tuple[float, int]] = {}
        self._held: dict[int, float] = {}
        self._holders: dict[int, set[int]] = {}
        self._gpus: set[int] = set()
        self._services: set[int] = set()
        self._last_us = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        kind, service, at_us = record["kind"], int(record["service"]), record["t_ns"] / 1e3
        gpus = [int(gpu) for gpu in record["gpus"]]
        self._last_us = max(self._last_us, at_us)
        self._gpus.update(gpus)
        self._services.add(service)
        if kind == EventKind.CLAIMED.value and "name" in record["detail"]:
            self._names[service] = str(record["detail"]["name"])
        if kind in (EventKind.GATE.value, EventKind.HOLD.value):
            self._held.setdefault(service, _moment_us(record, "launch_ns"))
            for gpu in gpus:
                self._holders.setdefault(gpu, set()).add(service)
                if kind == EventKind.GATE.value and gpu not in self._closed:
                    self._stop(record, gpu, service)
        elif kind == EventKind.WAKE.value:
            self._end_hold(service)
            for gpu in gpus:
                self._holders.get(gpu, set()).discard(service)
                if not self._holders.get(gpu):
                    self._end_stop(gpu)
        else:
            self._out.append(_instant(record))

    def finish(self) -> list[dict[str, Any]]:
        for service in list(self._held):
            self._end_hold(service)
        for gpu in list(self._closed):
            self._end_stop(gpu)
        tracks = [_track(_GPUS, gpu, f"GPU {gpu}") for gpu in sorted(self._gpus)]
        return [*self._out, *tracks, *(_track(_SERVICES, one, self._name(one)) for one in sorted(self._services))]

    def _name(self, service: int) -> str:
        return self._names.get(service, f"service {service}" if service else "valved")

    def _stop(self, record: Mapping[str, Any], gpu: int, service: int) -> None:
        launch_us, done_us = _moment_us(record, "launch_ns"), _moment_us(record, "done_ns")
        self._out.append(_span(_GPUS, gpu, "stopping", launch_us, done_us, self._name(service)))
        self._closed[gpu] = done_us, service

    def _end_stop(self, gpu: int) -> None:
        if gpu in self._closed:
            since_us, service = self._closed.pop(gpu)
            self._out.append(_span(_GPUS, gpu, "offline stopped", since_us, self._last_us, self._name(service)))

    def _end_hold(self, service: int) -> None:
        if service in self._held:
            since_us = self._held.pop(service)
            self._out.append(_span(_SERVICES, service, "holds", since_us, self._last_us, self._name(service)))


def _moment_us(record: Mapping[str, Any], name: str) -> float:
    """A moment that the event's detail names, or the time of the event itself."""
    return int(record["detail"].get(name, 0) or record["t_ns"]) / 1e3


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _track(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(pid: int, tid: int, what: str, start_us: float, until_us: float, by: str) -> dict[str, Any]:
    length = max(0.0, until_us - start_us)
    return {"ph": "X", "name": what, "pid": pid, "tid": tid, "ts": start_us, "dur": length, "args": {"by": by}}


def _instant(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": f"{record['kind']} {record['reason']}".strip(),
        "pid": _SERVICES,
        "tid": int(record["service"]),
        "ts": record["t_ns"] / 1e3,
        "args": {"client": record["client"], **record["detail"]},
    }
