"""Books what the native gate did, stamp by stamp: holds, wakes, and the delay of each preemption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from valved.gate.booking import LEAST, Booking, Note
from valved.gate.listener import GateListener
from valved.gate.online import OnlineService
from valved.gate.permits import GateSettings, Permits
from valved.gate.records import GateRecords, held_event, refused_event, stopped_event, woken_event
from valved.machine.clock import Clock
from valved.machine.ports import GatePort
from valved.machine.stamps import GRANT_CAUSES, Stamp, StampKind, Stamps
from valved.model.ids import GpuIndex, Reach, ServiceId
from valved.policy.breaker import step_breaker
from valved.policy.locks import LockState, Stop, step_locks
from valved.state.registry import Books
from valved.state.stats import GpuAccount, NodeCounters

DRIVER_CALLS = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)  # made by valved itself; the other rungs ask the process
GATE, HOLD, WAKE = map(int, (StampKind.GATE, StampKind.HOLD, StampKind.WAKE))


@dataclass(eq=False, repr=False)
class Edges:
    """The hold of a service follows the order of stamps alone, never the return value of a call: a ring may fall
    between the two. `online` and `gpus` are the gate's own books."""

    _gate: GatePort
    _books: Books
    _clock: Clock
    _settings: GateSettings
    _counters: NodeCounters
    _records: GateRecords
    _permits: Permits
    _listener: Callable[[], GateListener]
    _online: Mapping[ServiceId, OnlineService]
    _gpus: Mapping[GpuIndex, GpuAccount]
    least: int = LEAST  # stamps, for which the native booking is worth its begin

    def __post_init__(self) -> None:
        self._record = self._records.edge
        self._booking = Booking(self._online, self._gpus, self._counters)
        self._stopped: dict[ServiceId, OnlineService] = {}  # preempted somebody, and not judged since
        self.locks = LockState()  # what the stops told of the driver's locks

    def take_all(self, stamps: Sequence[Stamp]) -> list[Exception]:
        """Returns the errors that were met: the stamps behind are of other holds, and are not to be had again."""
        errors: list[Exception] = []
        at = 0
        while at < len(stamps):
            begin = at
            if isinstance(stamps, Stamps) and len(stamps) - at >= self.least:
                at = self._take_many(stamps, at, errors)
            alone = 1 if at > begin else self.least  # where it took none, it may take none of the next ones either
            for stamp in map(stamps.__getitem__, range(at, min(at + alone, len(stamps)))):
                self._attempt(errors, self.take, stamp)
                at += 1
        for online in self._stopped.values():
            self._attempt(errors, self._judge, online)
        self._stopped.clear()
        return errors

    def _take_many(self, stamps: Stamps, begin: int, errors: list[Exception]) -> int:
        """Those from `begin` up to the first unusual one. Returns its place."""
        batch = self._booking.take(stamps, begin)
        self._attempt(errors, self._records.edges, stamps, batch.gpus, batch.told())
        for online in batch.stopped:
            self._stopped[online.id] = online
        for at, what in batch.notes:
            self._attempt(errors, self._follow, stamps[at], what)
        return batch.end

    def _attempt(self, errors: list[Exception], act: Callable[..., None], *what: object) -> None:
        try:
            act(*what)
        except Exception as error:
            errors.append(error)

    def _follow(self, stamp: Stamp, what: int) -> None:
        """What the native booking leaves of an ordinary stamp."""
        online = self._online[stamp.service]
        if what == Note.HIT:
            online.hit_requests(self._books.clients_of(online.id), self._gate.view, stamp)
        elif what == Note.LOCKS:
            self._learn_lock(stamp)
        elif what == Note.WOKEN:
            online.end_hit(stamp)
        else:
            self._want_rule(online)

    def take(self, stamp: Stamp) -> None:
        """Holds and wakes come a thousand a second at times, the others seldom."""
        code, online = stamp.code, self._online.get(stamp.service)
        if code == HOLD:
            self._held(online, stamp)
            self._record(held_event, stamp, online.gpus if online is not None else ())
        elif code == WAKE:
            self._woken(online, stamp)
            self._record(woken_event, stamp, online.gpus if online is not None else ())
        elif code == GATE:
            self._closed(online, stamp)
            self._record(stopped_event, stamp, ())
        else:
            self._other(online, stamp)

    def _other(self, online: OnlineService | None, stamp: Stamp) -> None:
        if stamp.kind is StampKind.WAKE_REFUSED:
            self._counters.wake_refused += 1
            self._record(refused_event, stamp, ())
        elif stamp.kind is StampKind.GATE_FAILED:
            self._counters.gate_failures += 1
            try:
                self._held(online, stamp)  # the hold is as good as any other: only the stop is bad
                self._records.failed(stamp)
            finally:
                self._listener().stop_failed(stamp)
        elif stamp.kind is StampKind.LEARN and online is not None:
            self._want_rule(online)

    def _want_rule(self, online: OnlineService) -> None:
        online.rule = None  # it waits for a new one
        self._permits.look_soon(online)

    def _closed(self, online: OnlineService | None, stamp: Stamp) -> None:
        self._counters.gates += 1
        account = self._gpus.get(stamp.gpu)
        if online is not None:
            self._held(online, stamp)
        if stamp.client and stamp.launch_ns:
            self._count_preemption(online, account, stamp)
        if online is not None and len(online.gpus) > 1 and stamp.ioctl_ns:
            self._learn_lock(stamp)

    def _learn_lock(self, stamp: Stamp) -> None:
        if self._gate.channels.reach(stamp.gpu)[0] in DRIVER_CALLS:
            stop = Stop(service=stamp.service, epoch=stamp.epoch, ioctl_ns=stamp.ioctl_ns, done_ns=stamp.done_ns)
            self.locks = step_locks(self.locks, stop)

    def _count_preemption(self, online: OnlineService | None, account: GpuAccount | None, stamp: Stamp) -> None:
        """Only a launch that found offline work running was delayed by us."""
        if not stamp.channels or stamp.cause in GRANT_CAUSES:
            return
        delay_ns = max(0, stamp.done_ns - stamp.launch_ns)
        if account is not None:
            account.gates += 1
            account.latency.add(delay_ns)
        if online is None:
            return
        self._stopped[online.id] = online
        if online.count_preemption(stamp.epoch, delay_ns):
            online.hit_requests(self._books.clients_of(online.id), self._gate.view, stamp)

    def _held(self, online: OnlineService | None, stamp: Stamp) -> None:
        if online is None:
            return
        if online.book.woken_epoch >= 0 and (stamp.epoch - online.book.woken_epoch) & 0xFFFFFFFF >= 1 << 31:
            return  # a slow issuer reports a stop after the wake that undid it (epochs are 32 bits wide and wrap)
        at_ns = stamp.launch_ns or stamp.seen_ns or self._clock.now_ns()
        for gpu in online.gpus:
            self._gpus[gpu].hold(online.id, stamp.done_ns or at_ns)
        if not online.book.holding:
            online.begin_hold(at_ns)

    def _woken(self, online: OnlineService | None, stamp: Stamp) -> None:
        self._counters.wakes += 1
        at_ns = stamp.done_ns or self._clock.now_ns()
        if online is None:
            return
        for gpu in online.gpus:
            self._gpus[gpu].release(stamp.service, at_ns)
        online.end_hold(at_ns)
        online.book.woken_epoch = stamp.epoch
        if online.book.unclaimed or stamp.teller:
            online.end_hit(stamp)
        if stamp.channels != online.book.leaked:
            self._records.leak(online, stamp.channels)

    def _judge(self, online: OnlineService) -> None:
        now_ns = self._clock.now_ns()
        settings = self._settings.breaker
        fresh = online.unjudged(now_ns, settings.window_ns // 2)
        online.breaker, decision = step_breaker(online.breaker, fresh, now_ns, settings)
        if decision.tripped:
            rest_ns = decision.open_until_ns - now_ns
            self._records.breaker(online, decision, settings.budget_share, rest_ns)
            self._permits.withdraw(online)
            self._gate.hold(online.id, int(StampKind.GATE))  # no more than a word if it holds
            self._permits.look_soon(online)
            self._listener().breaker_tripped()
