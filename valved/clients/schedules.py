"""SCHEDULE calls of applications: such an ioctl would enable channels of a gated GPU again.

So the ACK of SCHEDULE_WAIT is held until the GPU opens. A hold longer than `schedule_hold_s` is answered with EAGAIN
and the shim asks again. SCHEDULE_DONE closes the race of a gate that falls between the ACK and the ioctl: the channels
are stopped once more. A shim that had stopped its own channels asks the same for all of them (no h_client) before it
ends that. Those that valved switches are handed to it: its thread may stand still between our answer and an enable of
its own, which a stop would be too early for. They run at SCHEDULE_DONE, if no stop came in between.

A process that a signal ends waits for an ACK, too (gate/ending.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import valve_abi

from valved.abi.link import Schedule
from valved.clients.accounts import LinkAccount, account_of
from valved.clients.possession import Possession
from valved.config import LinkTable
from valved.gate.wake import GateService
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import GatePort
from valved.model.ids import ClientId, GpuIndex, Role
from valved.state.registry import Books, ClientEntry

SECOND_NS = 1_000_000_000
HANDED = valve_abi.LINK_HANDED
HANDED_NS = 100_000_000  # no client is handed more often: each costs calls of the driver
HELD_PER_CLIENT = 64  # twice the threads of one shim that can wait at once
# Calls of threads, of all clients: to look at them takes 3 ms of the loop, at each wake and each channel that is told
# of. Beside them each client may ask once for its whole process: a shim never repeats that without an answer.
HELD = 1024


@dataclass(slots=True, kw_only=True)
class HeldSchedule:
    client: ClientId
    account: LinkAccount
    seq: int
    body: Schedule
    timer: TimerHandle


@dataclass(eq=False, repr=False)
class Schedules:
    _gate: GatePort
    _books: Books
    _gating: GateService
    _clock: Clock
    _link: LinkTable
    _possession: Possession
    _ack: Callable[[ClientId, int, int], None]

    def __post_init__(self) -> None:
        self._held: dict[ClientId, dict[int, HeldSchedule]] = {}  # by number of the request, oldest first
        self._of: dict[LinkAccount, dict[tuple[ClientId, int], HeldSchedule]] = {}  # those of threads, oldest first
        self._handed: dict[ClientId, int] = {}  # when their channels were last handed to valved
        self._to_run: set[ClientId] = set()  # of them, whose channels valved may not run yet

    def ends(self, entry: ClientEntry, seq: int, number: int) -> None:
        """A signal ends the process, which waits for our leave."""
        entry.ending_seq = seq
        self._gating.client_ends(entry, number, lambda: self.let_end(entry))

    def let_end(self, entry: ClientEntry) -> None:
        """If it waits for that: no channel of it is off, or it stands until that is so."""
        if entry.ending_seq:
            self._ack(entry.id, entry.ending_seq, 0)
            entry.ending_seq = 0

    def wait(self, entry: ClientEntry, seq: int, body: Schedule) -> None:
        gpus = self._gated_gpus(entry, body.h_client)
        if entry.role is not Role.OFFLINE or not (gpus or self._is_untold(entry, body)):
            self._ack(entry.id, seq, self._leave(entry, body))
            return
        mine = self._held.setdefault(entry.id, {})
        if seq in mine:
            self._let_go(mine[seq], None)
        elif len(mine) >= HELD_PER_CLIENT:
            self._let_go(next(iter(mine.values())), errno.EAGAIN)
        if body.h_client:
            self._make_room()
        else:
            for asked in [held for held in mine.values() if not held.body.h_client]:
                self._let_go(asked, errno.EAGAIN)
        until_ns = self._clock.now_ns() + round(self._link.schedule_hold_s * SECOND_NS)
        timer = self._clock.call_at_ns(until_ns, lambda: self._let_go(held, errno.EAGAIN))
        account = account_of(entry.uid, entry.cgroup)
        held = HeldSchedule(client=entry.id, account=account, seq=seq, body=body, timer=timer)
        self._held.setdefault(entry.id, {})[seq] = held
        if body.h_client:
            self._of.setdefault(account, {})[entry.id, seq] = held
        self._gating.want_prompt("schedules", True)

    def _make_room(self) -> None:
        """The oldest of the account that has most gets no answer: its thread asks again after 10 s, and not at once."""
        if sum(map(len, self._of.values())) >= HELD:
            self._let_go(next(iter(max(self._of.values(), key=len).values())), None)

    def _gated_gpus(self, entry: ClientEntry, h_client: int) -> frozenset[GpuIndex]:
        """Gated GPUs that this call may concern: the one of its RM client if known, else all of the process. A process
        that ends its own stop waits out a grant as well: the grant may end between our answer and its enable."""
        known = entry.rm_gpus.get(h_client)
        of_channels = {channel.gpu for key, channel in entry.channels.items() if key[0] == h_client}
        gpus = of_channels or ({known} if known is not None else entry.gpus() | set(entry.rm_gpus.values()))
        gpus = gpus or set(self._gating.gpus)  # one that has told of none may use any
        is_shut = self._gating.is_stopped if h_client else lambda gpu: self._gating.is_held((gpu,))
        return frozenset(filter(is_shut, gpus))

    def release(self) -> None:
        """A GPU may have opened, or a channel was judged. Whatever reads the books on the way may call this again."""
        for held in [held for mine in self._held.values() for held in mine.values()]:
            entry = self._books.clients.get(held.client)
            if entry is None or self._gated_gpus(entry, held.body.h_client) or self._is_untold(entry, held.body):
                continue
            if self._held.get(held.client, {}).get(held.seq) is held:
                self._let_go(held, self._leave(entry, held.body))

    def _is_untold(self, entry: ClientEntry, body: Schedule) -> bool:
        """It asks for all its channels, and some are not armed yet: run now, they would meet no gate."""
        return not body.h_client and self._possession.is_judging(entry.id)

    def _leave(self, entry: ClientEntry, body: Schedule) -> int:
        """What says that it may run, or may have valved run its channels."""
        now_ns = self._clock.now_ns()
        is_often = now_ns - self._handed.get(entry.id, -HANDED_NS) < HANDED_NS
        if entry.role is not Role.OFFLINE or body.h_client or is_often or not self._gate.channels.switches(entry.id):
            return 0
        self._handed[entry.id] = now_ns
        self._to_run.add(entry.id)
        return HANDED

    def _let_go(self, held: HeldSchedule, status: int | None) -> None:
        held.timer.cancel()
        del self._held[held.client][held.seq]
        if not self._held[held.client]:
            del self._held[held.client]
        if held.body.h_client:
            del self._of[held.account][held.client, held.seq]
            if not self._of[held.account]:
                del self._of[held.account]
        self._gating.want_prompt("schedules", bool(self._held))
        if status is not None:
            self._ack(held.client, held.seq, status)

    def forget(self, client: ClientId) -> None:
        """The client is gone: it waits for no answers any more."""
        self._handed.pop(client, None)
        self._to_run.discard(client)
        for held in list(self._held.get(client, {}).values()):
            self._let_go(held, None)

    def done(self, entry: ClientEntry, body: Schedule) -> None:
        """That call came back, and a gate may have fallen in between; or the process switches its channels no more."""
        if entry.role is not Role.OFFLINE:
            return
        if self._gated_gpus(entry, body.h_client):
            of_all = {h_client for h_client, _ in entry.channels}
            for h_client in {body.h_client} if body.h_client else of_all:
                self._gate.channels.stop_again(entry.id, h_client)
        if not body.h_client and entry.id in self._to_run:
            self._to_run.discard(entry.id)
            self._gate.channels.run_again(entry.id)
