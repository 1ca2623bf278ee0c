"""What a process of the emulated node publishes of itself (emu.h, struct emu_process): how long it stood in the driver,
by kind of call, and the settings of its stand-in libcuda, which may be changed while it runs.

A bench that wants a program's own share of some stretch of time subtracts `inside_ns` of that stretch."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# emu.h, in the order of struct emu_process
_MAGIC = 0x434F525055444D45
_HEAD = struct.Struct("<QII")
_SETTING = struct.Struct("<24sQ")
_SPENT = struct.Struct("<24sQQQQ")
_INTERVAL = struct.Struct("<QQII")
_SETTINGS, _SPENTS, _INTERVALS = 16, 32, 16384
_SPENT_AT = _HEAD.size + _SETTINGS * _SETTING.size
_COUNT_AT = _SPENT_AT + _SPENTS * _SPENT.size
_INTERVALS_AT = _COUNT_AT + 8
_BYTES = _INTERVALS_AT + _INTERVALS * _INTERVAL.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Calls of one kind since the process began. Of the time in them (`wall_ns`) the model asked for `model_ns`; the
    rest is what the emulator itself takes. `cpu_ns` is the calling threads' time of a core, without the server's."""

    count: int
    model_ns: int
    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCall:
    """One call of a thread, as CLOCK_MONOTONIC saw it."""

    begin_ns: int
    end_ns: int
    kind: str
    thread: int


def union_ns(intervals: Iterable[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """How much of a stretch lies in at least one of the intervals: calls of several processes overlap."""
    total, reached = 0, begin_ns
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end_ns)
        if last > first:
            total += last - first
            reached = last
    return total


class ProcessPage:
    """The page of one process. It stays after the process has ended, until its number is taken again."""

    def __init__(self, directory: Path, pid: int) -> None:
        with (directory / f"process-{pid}").open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES)
        magic, self.pid, self._kinds = _HEAD.unpack_from(self._page, 0)
        if magic != _MAGIC:
            raise ValueError(f"process-{pid} in {directory} is no page of an emulated process")

    def _spent(self) -> list[tuple[str, Spent]]:
        rows = [_SPENT.unpack_from(self._page, _SPENT_AT + i * _SPENT.size) for i in range(self._kinds)]
        return [
            (name.rstrip(b"\0").decode(), Spent(count=count, model_ns=model, wall_ns=wall, cpu_ns=cpu))
            for name, count, model, wall, cpu in rows
        ]

    def spent(self) -> dict[str, Spent]:
        """By kind of call: `create`, `map`, `access`, `unmap`, ... and `... ioctl` for what was asked without CUDA."""
        return dict(self._spent())

    def intervals(self, since_ns: int = 0) -> list[ThreadCall]:
        """The calls that ended after some moment, in the order in which they ended. Only the last 16,384 are kept: when
        some of those asked for are gone, that is an error."""
        kinds = [name for name, _ in self._spent()]
        (count,) = struct.unpack_from("<Q", self._page, _COUNT_AT)
        first = max(0, count - _INTERVALS)
        rows = (
            _INTERVAL.unpack_from(self._page, _INTERVALS_AT + i % _INTERVALS * _INTERVAL.size)
            for i in range(first, count)
        )
        calls = [
            ThreadCall(begin_ns=begin, end_ns=end, kind=kinds[kind], thread=thread)
            for begin, end, kind, thread in rows
            if end
        ]
        if first and since_ns and calls[0].end_ns > since_ns:
            raise LookupError(
                f"process {self.pid} made more than {_INTERVALS} calls since then: ask for less at a time"
            )
        return [call for call in calls if call.end_ns > since_ns]

    def settings(self) -> dict[str, int]:
        rows = (_SETTING.unpack_from(self._page, _HEAD.size + i * _SETTING.size) for i in range(_SETTINGS))
        return {name.rstrip(b"\0").decode(): value for name, value in rows if name.rstrip(b"\0")}

    def set(self, **settings: int) -> None:
        """Change settings of its libcuda, e.g. `set(unmap_waits=1)`; they exist once it has called cuInit."""
        names = list(self.settings())
        for name, value in settings.items():
            if name not in names:
                raise ValueError(f"process {self.pid} has no setting {name}; it has: {', '.join(names) or 'none yet'}")
            at = _HEAD.size + names.index(name) * _SETTING.size + 24
            self._page[at : at + 8] = struct.pack("<Q", value)


def inside_ns(
    pages: Sequence[ProcessPage],
    begin_ns: int,
    end_ns: int,
    counts: Callable[[ThreadCall], bool] = lambda call: True,
) -> int:
    """How much of a stretch at least one of the processes stood in a driver call that counts. Leave out what only waits
    elsewhere, e.g. an engine's thread that is blocked for its gated work: `lambda call: call.kind != "wait"`, or by
    `call.thread`."""
    calls = (call for page in pages for call in page.intervals(begin_ns))
    return union_ns(((call.begin_ns, call.end_ns) for call in calls if counts(call)), begin_ns, end_ns)
