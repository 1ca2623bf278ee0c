"""What becomes of the channels of a client that leaves.

A process that ends must have them enabled at once: the driver would wait seconds for it, under locks that online work
needs. A process that lives on keeps them as they are. If it closed its own link beside a busy service, or took a valved
that hung for dead, its channels stay stopped until it is back, or ends.

That end is looked for as long as there are such channels: a pidfd tells of it only after the driver's teardown, and
that is what waits for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from valved.clients.exits import Exits
from valved.clients.leftovers import Leftovers
from valved.clients.turns import PASS_NS
from valved.gate.ending import KILL
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import GatePort, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ClientId, ProcessId, Role
from valved.state.journal import Journal
from valved.state.registry import ClientEntry
from valved.state.stats import NodeCounters

EXIT = "exit"
LOOK_NS = 100_000_000
LOOKS = 64  # processes looked at in one turn: the others have theirs in the next ones
ANEW = "claimed anew"  # for another role: what its old role had to suffer no longer counts


@dataclass(eq=False, repr=False)
class Departures:
    _gate: GatePort
    _leftovers: Leftovers
    _processes: ProcessPort
    _exits: Exits
    _journal: Journal
    _counters: NodeCounters
    _clock: Clock

    def __post_init__(self) -> None:
        self._ticker = Ticker(self._clock, self._look)
        self._to_look: deque[ProcessId] = deque()
        self._behind: dict[ClientId, ProcessId] = {}  # left while the driver hung

    def remove(self, entry: ClientEntry, reason: str) -> int:
        """Take a client out of the gate. Returns how many channels were enabled."""
        process = entry.process
        lives_on = (
            entry.role is Role.OFFLINE
            and reason not in (EXIT, KILL, ANEW)
            and not self._processes.is_ending(process.pid, process.start_time)
        )
        off = self._gate.remove_client(entry.id, lives_on=lives_on)
        self._behind[entry.id] = process
        self._forget_answered()
        for channel in off if lives_on else ():
            self._leftovers.put(channel, process, has_left=True)
        self.watch()
        if lives_on and off:
            self._exits.hand_on(entry.id, ("left", process), lambda: self._ended(process))
        else:
            self._exits.forget(entry.id)
        if lives_on:
            return 0
        left = self.enable_left(process) if entry.role is Role.OFFLINE else 0
        self._counters.channels_enabled_on_exit += len(off)
        return len(off) + left

    def watch(self) -> None:
        """Look whether owners of leftovers end, for as long as there are any."""
        if len(self._leftovers):
            self._ticker.start(LOOK_NS)

    def _look(self) -> None:
        if on := self._gate.channels.turned_out_on():
            self._leftovers.take_where(lambda left: left.has_left and left.channel in on)
        if not len(self._leftovers):
            self._ticker.stop()
        if not self._to_look:
            self._to_look.extend(self._leftovers.owners())
        until_ns = self._clock.now_ns() + PASS_NS
        for _ in range(min(LOOKS, len(self._to_look))):
            process = self._to_look.popleft()
            if self._processes.is_ending(process.pid, process.start_time):
                self._ended(process)
            if self._clock.now_ns() > until_ns:
                return

    def enable_left(self, process: ProcessId) -> int:
        """What it left off. It ends: else the driver waits for them."""
        left: list[ChannelRef] = self._leftovers.take_of(process)
        if left:
            self._gate.channels.enable_foreign(left)
            self._counters.channels_enabled_on_exit += len(left)
        return len(left)

    def has_all_on(self, process: ProcessId) -> bool:
        """Of one that ends. False: its channels are on once the driver answers."""
        self.enable_left(process)
        self._forget_answered()
        return process not in self._behind.values()

    def _forget_answered(self) -> None:
        behind = self._gate.channels.behind()
        self._behind = {client: process for client, process in self._behind.items() if client in behind}

    def _ended(self, process: ProcessId) -> None:
        """It never came back."""
        self._exits.forget(("left", process))
        if enabled := self.enable_left(process):
            self._journal.emit(
                EventKind.ENABLED_LEFTOVER, reason="their process ended", pid=process.pid, channels=enabled
            )
