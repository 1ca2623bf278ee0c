"""Takes KV memory from outside its process: which processes may be treated so, the trial, and the reclaim.

A shim that is asked (VALVE_FEATURE_SPARSE) passes a descriptor of its uvm file and some scratch memory. Nothing is
relied upon before it was tried there, on that very process (kv/trial.py). A process that fails is asked between its
steps; the reason is in the status, the journal and the audit file.

A reclaim tells the shim first and makes the memory sparse then. The shim only corrects its books, whenever it
comes to it; a valved that dies in between leaves a process that thinks its memory gone. Backing such slots again is
ordinary mapping work between two steps of the engine.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain

import numpy as np

from valved.abi.kv_link import KvHow, KvOp, KvScratch
from valved.clients.complaints import Complaints
from valved.clients.turns import Buckets
from valved.config import MemoryTable
from valved.fds import is_scarce
from valved.kv.engines import Engine
from valved.kv.journey import start
from valved.kv.orders import Draft, Order, Orders
from valved.kv.slots import NO_HANDLE, NOTHING, Ints, KvRangeBook, RangeKey, RangeSlots
from valved.kv.trial import NOT_STOPPED, TrialResult, Trials
from valved.kv.turn import GateTurn
from valved.machine.clock import Clock
from valved.machine.ports import CloserPort, Door, OutsidePort, SparseResult
from valved.model.events import EventKind
from valved.model.ids import ClientId, GpuIndex, Remap, TrialOutcome
from valved.model.states import TrialState
from valved.model.statuses import status_text
from valved.state.journal import Journal
from valved.state.registry import ClientEntry
from valved.state.stats import MemoryCounters

UNHEARD = 512  # orders of one client that it has not heard of yet; it keeps room for twice as many
UNTRIED = TrialResult(outcome=TrialOutcome.UNTRIED, reason="not tried yet")
RETRY_NS = 5_000_000_000  # also between trials of one process, after as many at once as it may have contexts
TRIALS_AT_ONCE = 4
Runs = list[tuple[int, int]]


@dataclass(slots=True, kw_only=True)
class Packed:
    """Slots of one process on one GPU, and the packets for them."""

    slots: RangeSlots
    drafts: list[Draft]
    rows: Ints = field(default_factory=lambda: NOTHING)  # of the handles that will be mapped there ...
    names: Ints = field(default_factory=lambda: NOTHING)  # ... and their names
    runs: list[Runs] = field(default_factory=list)  # of each draft, where valved makes the memory sparse itself
    given: list[Order] = field(default_factory=list)  # what they became when its handles were passed on


@dataclass(slots=True, kw_only=True, eq=False)
class Way:
    """Into one process on one GPU."""

    entry: ClientEntry
    gpu: GpuIndex
    door: Door
    scratch: KvRangeBook  # stands for the shim's scratch memory, and is in no book of the pool
    best: Remap = Remap.COOPERATIVE
    result: TrialResult = UNTRIED
    is_open: bool = True


@dataclass(eq=False, repr=False)
class Outside:
    _orders: Orders
    _turn: GateTurn
    _journal: Journal
    _told: Complaints
    _clock: Clock
    _port: OutsidePort
    _settings: MemoryTable
    _counters: MemoryCounters
    _closer: CloserPort

    def __post_init__(self) -> None:
        self._waiting: dict[tuple[ClientId, GpuIndex], tuple[KvRangeBook, int]] = {}  # for room, or their turn
        self._tried = Buckets(share=1.0, burst_ns=TRIALS_AT_ONCE * RETRY_NS)  # each stops the GPU for other jobs, too
        self._trials = Trials(self._orders, self._turn, self._clock, self._settings)
        self._ways: dict[tuple[ClientId, GpuIndex], Way] = {}

    # Which processes may be treated so

    def offer(self, entry: ClientEntry, gpu: GpuIndex, uuid: bytes, body: KvScratch, fd: int) -> bool:
        """KV_SCRATCH. Of several contexts of a process the last counts. False: there is no way in by it, and the uvm
        descriptor stays the caller's."""
        self._forget_waiting((entry.id, gpu))
        scratch = KvRangeBook(
            key=RangeKey(entry.id, body.place),
            gpu=gpu,
            base=body.base,
            handle_bytes=body.bytes,
            is_elastic=False,
            at=np.full(1, NO_HANDLE, np.int64),
        )
        return self._come_in(entry, gpu, uuid, scratch, fd)

    def _come_in(self, entry: ClientEntry, gpu: GpuIndex, uuid: bytes, scratch: KvRangeBook, fd: int) -> bool:
        """Whether it is ours: now, or as soon as there is room for it."""
        key, now_ns = (entry.id, gpu), self._clock.now_ns()
        if wait_ns := self._tried.wait_ns((entry.process, gpu), now_ns):  # also if it has connected anew
            if key in self._ways:
                self._close(self._ways.pop(key))
            return self._wait(entry, scratch, uuid, fd, wait_ns)
        try:
            door = self._port.open(fd, uuid)
        except OSError as error:
            if is_scarce(error):
                return self._wait(entry, scratch, uuid, fd, RETRY_NS)
            reason = f"memory of the process cannot be taken from outside it: {error.strerror}"
            self._told.tell(entry, reason, (gpu,))
            return False
        self._tried.took((entry.process, gpu), RETRY_NS, now_ns)
        before = self._ways.pop(key, None)
        if before is not None:
            self._close(before)
        way = Way(entry=entry, gpu=gpu, door=door, scratch=scratch)
        self._ways[key] = way
        start(self._try(way))
        return True

    def _wait(self, entry: ClientEntry, scratch: KvRangeBook, uuid: bytes, fd: int, wait_ns: int) -> bool:
        self._waiting[entry.id, scratch.gpu] = scratch, fd
        self._clock.call_at_ns(self._clock.now_ns() + wait_ns, lambda: self._come_later(scratch, uuid, entry))
        return True

    def _come_later(self, scratch: KvRangeBook, uuid: bytes, entry: ClientEntry) -> None:
        waiting, fd = self._waiting.get((entry.id, scratch.gpu), (None, -1))
        if waiting is scratch:
            del self._waiting[entry.id, scratch.gpu]
            if not self._come_in(entry, scratch.gpu, uuid, scratch, fd):
                self._closer.close_in_turn([fd])

    def _forget_waiting(self, key: tuple[ClientId, GpuIndex]) -> None:
        if key in self._waiting:
            self._closer.close_in_turn([self._waiting.pop(key)[1]])

    def forget(self, client: ClientId) -> None:
        """Never holds a descriptor longer than its process has a link."""
        for key in [key for key in self._ways if key[0] == client]:
            self._close(self._ways.pop(key))
        for key in [key for key in self._waiting if key[0] == client]:
            self._forget_waiting(key)

    def _close(self, way: Way) -> None:
        if way.is_open:
            way.is_open = False
            way.door.close()

    def best(self, client: ClientId, gpu: GpuIndex) -> Remap:
        way = self._ways.get((client, gpu))
        return way.best if way is not None else Remap.COOPERATIVE

    def why_not(self, engine: Engine) -> str:
        """Why memory is not taken from it so; empty if it is."""
        reasons = (self._why_not(book.key.client, book.gpu) for book in engine.places)
        return min(filter(None, reasons), default="")

    def _why_not(self, client: ClientId, gpu: GpuIndex) -> str:
        way = self._ways.get((client, gpu))
        if way is None:
            return "the process's shim passed no uvm descriptor"
        return "" if way.best is Remap.SPARSE else way.result.reason

    def trials(self) -> tuple[TrialState, ...]:
        """Of every process that has passed a descriptor and has a link."""
        return tuple(
            TrialState(
                service=way.entry.service,
                pid=way.entry.process.pid,
                gpu=way.gpu,
                rung=way.best.value,
                outcome=way.result.outcome.value,
                reason=way.result.reason,
                took_ns=way.result.took_ns,
            )
            for way in self._ways.values()
        )

    # The trial

    async def _try(self, way: Way) -> None:
        result = await self._trials.attempt(way.door, way.scratch, lambda: way.is_open)
        if not way.is_open:
            return
        way.result = result
        if result is NOT_STOPPED:  # a brake is on, or the gate failed: that says nothing about this way
            self._clock.call_at_ns(self._clock.now_ns() + RETRY_NS, lambda: start(self._retry(way)))
        elif result.outcome is TrialOutcome.PASSED:
            self._counters.trials_passed += 1
            way.best = Remap.SPARSE
            self._note(way, EventKind.NOTED, f"its memory can be taken from outside: {result.took_ns / 1e3:.0f} us")
        else:
            self._counters.trials_failed += 1
            self._demote(way)

    async def _retry(self, way: Way) -> None:
        if way.is_open:
            await self._try(way)

    # At work

    def plan(self, stages: list[tuple[RangeSlots, bytes]], *, is_ours: bool) -> list[Packed]:
        """What `take` needs, for each stage: slots of a client, and their runs. `is_ours`: valved makes them sparse."""
        knows_runs = bool(stages) and self._orders.takes_runs(stages[0][0].owner.key.client)
        planned: list[Packed] = []
        for slots, raw in stages:
            drafts = self._orders.draft_away(slots, raw if knows_runs else None)
            runs = [one.slots.spans() for one in drafts] if is_ours else []
            planned.append(Packed(slots=slots, drafts=drafts, rows=NOTHING, names=NOTHING, runs=runs))
        return planned

    def take(self, part: Packed) -> list[Order]:
        """Precondition: `best` says SPARSE, the GPU stands, and the engine's table has said that they are lost. None
        where that needs more packets than its client has room for."""
        slots = part.slots
        client = slots.owner.key.client
        way = self._ways[client, slots.owner.gpu]
        if len(part.drafts) > UNHEARD - self._orders.unheard(client):
            return []
        orders = self._orders.take_away(KvOp.QUARANTINE, slots, KvHow.OUTSIDE, part.drafts)
        if orders and all(order.is_sent for order in orders):  # else it would believe what reads as zero
            runs = part.runs or [order.slots.spans() for order in orders]
            orders[-1].arrived.then(lambda: self._make(way, orders, runs))
        return orders

    def _make(self, way: Way, orders: list[Order], runs: list[Runs]) -> None:
        """The shim hears of it now whatever becomes of us. One that was slow to read may have kept its orders from
        arriving until its reclaim was over: it may run, and is asked to do it itself. Half of the time is the driver's:
        what is begun later could still be under way when the GPU opens.
        """
        in_time = self._clock.now_ns() - orders[0].sent_ns < self._settings.order_s * 1e9 / 2
        if way.is_open and in_time and self._turn.is_stopped(way.gpu):
            ends = list(accumulate(map(len, runs)))
            way.door.make_sparse(list(chain(*runs)), lambda result: self._made(way, orders, ends, result))
        else:
            self._ask_instead(way, orders)

    def _made(self, way: Way, orders: list[Order], ends: list[int], result: SparseResult) -> None:
        """`ends`: each order's last run. What was made before the driver refused is taken."""
        taken = bisect_right(ends, result.runs) if result.status else len(orders)
        for order in orders[:taken]:
            self._orders.taken(order)
        if not result.status:
            return
        if way.is_open:
            why = f"the driver refused: {status_text(result.status)}"
            way.result = TrialResult(outcome=TrialOutcome.REFUSED, reason=why, took_ns=result.took_ns)
            self._demote(way)
        self._ask_instead(way, orders[taken:])

    def _ask_instead(self, way: Way, orders: list[Order]) -> None:
        for order in orders:
            if not order.settled.is_set:  # else its client has left
                [instead] = self._orders.take_away(KvOp.QUARANTINE, order.slots, KvHow.AT_STEP)
                instead.settled.then(partial(self._asked, way, instead))
                self._orders.refused(order, instead)

    def _asked(self, way: Way, instead: Order) -> None:
        """What the client did not do either may be sparse or not: the driver may have done a part before it refused."""
        if instead.status != errno.ECONNRESET:
            self._orders.doubt(instead, way.entry.process)

    def _demote(self, way: Way) -> None:
        """It is asked between its steps from now on, and nothing of it is held that only this way needs."""
        way.best = Remap.COOPERATIVE
        self._close(way)
        self._counters.demotions += 1
        self._note(way, EventKind.REMAP_UNSAFE, f"{way.result.reason}: {way.best.value} from now on")

    def _note(self, way: Way, kind: EventKind, reason: str) -> None:
        self._journal.emit(
            kind,
            service=way.entry.service,
            client=way.entry.id,
            gpus=(way.gpu,),
            reason=reason,
            pid=way.entry.process.pid,
        )

    def close(self) -> None:
        for way in self._ways.values():
            self._close(way)
        self._ways.clear()
        for key in list(self._waiting):
            self._forget_waiting(key)
