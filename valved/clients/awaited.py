"""Says which processes valved expects, before it reads what they have to say: from the books and a few files of /proc.

Whose turn a HELLO is depends on it, and nothing else: the role of a process is found out anew when its HELLO is read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from valved.machine.ports import ProcessPort
from valved.model.ids import ProcessId, Role
from valved.state.lived import Lived
from valved.state.registry import Books, ProcessClaim, is_inside

LOOKS = 4  # the process itself and three above it: a launcher and a shell may stand between; each costs a file


class Awaited:
    def __init__(self, books: Books, lived: Lived, processes: ProcessPort) -> None:
        self.expected: Counter[int] = Counter()  # clients to come of offline processes of a predecessor, by number
        self._books = books
        self._lived = lived
        self._processes = processes

    def expect(self, pid: int) -> None:
        """A client of a predecessor comes back: its HELLO is none of those that a flood can have more of."""
        self.expected[pid] += 1

    def came(self, pid: int) -> None:
        self.expected[pid] -= 1
        if self.expected[pid] <= 0:
            del self.expected[pid]

    def pids(self) -> set[int]:
        """Of processes claimed as online, or welcomed as such once."""
        return {process.pid for process in self._known()}

    def _known(self) -> Iterator[ProcessId]:
        yield from (claim.root for claim in self._online())
        yield from self._lived.known

    def _online(self) -> Iterator[ProcessClaim]:
        return (claim for claim in self._books.claims.values() if claim.role is Role.ONLINE)

    def cgroup(self, pid: int) -> str:
        """Empty where it cannot be told."""
        with contextlib.suppress(OSError):
            return self._processes.cgroup(pid) or ""
        return ""

    def root_of(self, pid: int, cgroup: str, known: set[int]) -> int:
        """The awaited process to which this one belongs, by descent or by control group. 0: there is none."""
        with contextlib.suppress(OSError):
            for ancestor in self._processes.ancestors(pid, LOOKS):
                if ancestor.pid in known:
                    return ancestor.pid
        inside = (claim.root.pid for claim in self._online() if claim.cgroup and is_inside(cgroup, claim.cgroup))
        return next(inside, 0)
