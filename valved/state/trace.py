"""Events on their way out of the process: JSON lines in a file of bounded size, and the form that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from valved.model.events import Event, EventKind

BUFFER_BYTES = 64 * 1024


class LineFile:
    """Appends events to a file; at `max_bytes` the file becomes NAME.1 and a new one begins.

    A full disk must not stop gating: the first failure closes the file and is kept in `failure`.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.failure = ""
        self._max_bytes = max_bytes
        self._file: TextIO | None = self._open()
        self._bytes = path.stat().st_size if self._file else 0

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

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO | None:
        try:
            return self.path.open("a", encoding="utf-8", buffering=BUFFER_BYTES)
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"
            return None

    def _turn(self) -> None:
        assert self._file is not None
        self._file.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self._open()
        self._bytes = 0

    def _give_up(self, error: OSError) -> None:
        self.failure = f"{self.path}: {error.strerror}"
        self._file = None


def read_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    """Records of a recorded trace, oldest first. A line cut short by a crash ends the trace."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def to_trace_events(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The trace-event form that Perfetto and chrome://tracing open.

    Two processes: `gpus`, with one track per GPU that shows when offline work was stopped, and `services`, with one
    track per online service that shows when it held its GPUs. Everything else is an instant on its service's track.
    """
    out: list[dict[str, Any]] = [_named(_GPUS, "gpus"), _named(_SERVICES, "services")]
    closed: dict[int, tuple[float, str]] = {}
    held: dict[int, tuple[float, str]] = {}
    holders: dict[int, set[int]] = {}
    last_us = 0.0
    for record in records:
        last_us = max(last_us, record["t_ns"] / 1e3)
        kind, service = record["kind"], int(record["service"])
        gpus = [int(gpu) for gpu in record["gpus"]]
        if kind in (EventKind.GATE.value, EventKind.HOLD.value):
            held.setdefault(service, (_launch_us(record), record["reason"]))
            for gpu in gpus:
                holders.setdefault(gpu, set()).add(service)
                if kind == EventKind.GATE.value:
                    closed.setdefault(gpu, (_launch_us(record), f"service {service}"))
        elif kind == EventKind.WAKE.value:
            out.extend(_span(_SERVICES, service, held.pop(service, None), last_us))
            for gpu in gpus:
                holders.get(gpu, set()).discard(service)
                if not holders.get(gpu):
                    out.extend(_span(_GPUS, gpu, closed.pop(gpu, None), last_us))
        else:
            out.append(_instant(record))
    for service, since in held.items():
        out.extend(_span(_SERVICES, service, since, last_us))
    for gpu, since in closed.items():
        out.extend(_span(_GPUS, gpu, since, last_us))
    return {"traceEvents": out, "displayTimeUnit": "ms"}


_GPUS, _SERVICES = 1, 2


def _launch_us(record: Mapping[str, Any]) -> float:
    launch_ns = int(record["detail"].get("launch_ns", 0))
    return (launch_ns or int(record["t_ns"])) / 1e3


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _span(pid: int, tid: int, since: tuple[float, str] | None, until_us: float) -> list[dict[str, Any]]:
    if since is None:
        return []
    start_us, name = since
    what = "offline stopped" if pid == _GPUS else "holds"
    length = max(0.0, until_us - start_us)
    return [{"ph": "X", "name": what, "pid": pid, "tid": tid, "ts": start_us, "dur": length, "args": {"by": name}}]


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
