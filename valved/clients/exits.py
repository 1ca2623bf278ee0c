"""Tells when a process ends: pidfds, one for each part that asked.

A pidfd is readable once the last thread of its process has ended, which no file of a first thread tells. That there is
none to be had now (EMFILE) says nothing of the process.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from valved.fds import Fds
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import ProcessPort
from valved.model.ids import ProcessId

AGAIN_NS = 1_000_000_000  # where no descriptor was left


class Reactor(Protocol):
    """The part of the asyncio loop that watches descriptors."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None: ...

    def remove_reader(self, fd: int, /) -> bool: ...


@dataclass(slots=True)
class Exits:
    """Pidfds of clients and of claimed processes, one for each part that asked."""

    reactor: Reactor
    processes: ProcessPort
    clock: Clock
    _fds: dict[object, int] = field(default_factory=dict)
    _again: dict[object, TimerHandle] = field(default_factory=dict)

    def watch(self, key: object, pid: int, gone: Callable[[], None]) -> bool:
        """False: the process is gone already. OSError: it cannot be watched now."""
        self.forget(key)
        fd = self.processes.open_pidfd(pid)
        if fd < 0:
            return False
        with Fds() as fds:
            self.reactor.add_reader(fds.own(fd), gone)
            fds.keep()
        self._fds[key] = fd
        return True

    def await_end(self, process: ProcessId, gone: Callable[[], None]) -> None:
        """`gone` once it has ended, at once if it has. Tried again for as long as it cannot be watched.

        A watch that exists stays, for the first caller: the number may mean another process by now.
        """
        if process in self._fds:
            if self.has_ended(process):
                self.forget(process)
                gone()
            return
        try:
            is_there = self.watch(process, process.pid, gone)
            start_time = self.processes.start_time(process.pid) if is_there else None
        except OSError:
            self.forget(process)
            if self.processes.is_gone(process):  # its number is another's, whom we may not look at
                gone()
                return
            when_ns = self.clock.now_ns() + AGAIN_NS
            self._again[process] = self.clock.call_at_ns(when_ns, lambda: self.await_end(process, gone))
            return
        is_another = start_time not in (None, process.start_time)  # none: the descriptor tells of that end
        if not is_there or is_another or self.has_ended(process):
            self.forget(process)
            gone()

    def has_ended(self, key: object) -> bool:
        """Whether the end of a process that is watched is there, and not told yet."""
        poll = select.poll()
        if key in self._fds:
            poll.register(self._fds[key], select.POLLIN)
        return bool(poll.poll(0))

    def hand_on(self, key: object, to: object, gone: Callable[[], None]) -> None:
        """The same process, watched for another part from now on; no part watches it twice."""
        fd = self._fds.pop(key, -1)
        if fd < 0:
            return
        if to in self._fds:
            self.reactor.remove_reader(fd)
            os.close(fd)
            return
        self._fds[to] = fd
        self.reactor.add_reader(fd, gone)

    def forget(self, key: object) -> None:
        timer = self._again.pop(key, None)
        if timer is not None:
            timer.cancel()
        fd = self._fds.pop(key, -1)
        if fd >= 0:
            self.reactor.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for key in [*self._fds, *self._again]:
            self.forget(key)
