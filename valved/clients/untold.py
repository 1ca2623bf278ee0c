"""Finds registered processes that use a card past their shim: the card lists them, and no book has a channel of theirs.

Their CUDA was loaded where the shim's hooks are not (`dlmopen`, raw system calls), or their channels were refused. No
bell tells of their launches, and nothing stops their work. A process is listed from its first channel on, and tells of
it before it runs, so one look is not enough; nor do looks count at a process that stands still between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from valved.machine.ports import GpuInfo, ProcessPort
from valved.model.ids import GpuIndex, ProcessId, Role
from valved.state.registry import Books, ClientEntry

UNTOLD = "by channels of which valved was not told"
NO_SHIM, NO_ROOM = "without the shim", "unregistered, and valved may have had no room for it"
LOOKS_TO_CLOSE = 2  # a moment between a look and the books is no sign
LOOKS_BEFORE_FREEZE = 5  # one that is frozen is not looked at any more: its threads may be many


class Untold:
    def __init__(self, books: Books, processes: ProcessPort, gpus: Sequence[GpuInfo]) -> None:
        self._books, self._processes, self._gpus = books, processes, gpus
        self._looks: dict[tuple[ProcessId, GpuIndex], int] = {}

    def registered(self) -> dict[int, ClientEntry]:
        """Processes with a shim, by number: it is theirs until their client has left. A hook alone stops and hears
        nothing."""
        return {one.process.pid: one for one in self._books.clients.values() if one.role is not Role.HOOK}

    def look(self, cards: Mapping[bytes, Mapping[int, int]]) -> None:
        """Once a second. A card that does not answer says nothing new."""
        registered = self.registered()
        told = {(one.process, gpu) for one in self._books.clients.values() for gpu in one.channels_on}
        looks: dict[tuple[ProcessId, GpuIndex], int] = {}
        for gpu in self._gpus:
            if gpu.uuid not in cards:
                looks.update({key: count for key, count in self._looks.items() if key[1] == gpu.index})
                continue
            for pid in registered.keys() & cards[gpu.uuid].keys():
                key = registered[pid].process, gpu.index
                if key not in told:
                    count = self._looks.get(key, 0)
                    looks[key] = count + (count < LOOKS_BEFORE_FREEZE and not self._processes.is_stopped(pid))
        self._looks = looks

    def looks(self, process: ProcessId, gpu: GpuIndex) -> int:
        """At how many in a row this process was found so."""
        return self._looks.get((process, gpu), 0)

    def found_at(self, looks: int) -> set[ProcessId]:
        """At so many looks in a row, on any card."""
        return {process for (process, _), count in self._looks.items() if count >= looks}
