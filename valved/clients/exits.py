"""Tells when a process ends: pidfds, by who asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from valved.machine.ports import ProcessPort


class Reactor(Protocol):
    """The part of the asyncio loop that watches descriptors."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None: ...

    def remove_reader(self, fd: int, /) -> bool: ...


@dataclass(slots=True)
class Exits:
    """Pidfds of clients and of claimed processes, by who asked."""

    reactor: Reactor
    processes: ProcessPort
    _fds: dict[object, int] = field(default_factory=dict)

    def watch(self, key: object, pid: int, gone: Callable[[], None]) -> bool:
        """False: the process is gone already."""
        fd = self.processes.open_pidfd(pid)
        if fd < 0:
            return False
        self._fds[key] = fd
        self.reactor.add_reader(fd, gone)
        return True

    def hand_on(self, key: object, to: object, gone: Callable[[], None]) -> None:
        """The same process, asked for by somebody else from now on; who asks already is not asked twice."""
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
        fd = self._fds.pop(key, -1)
        if fd >= 0:
            self.reactor.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for key in list(self._fds):
            self.forget(key)
