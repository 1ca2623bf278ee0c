"""Books what the native gate did, stamp by stamp: holds, wakes, and the delay of each preemption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from valved.gate.accounts import book_hold
from valved.gate.online import OnlineService
from valved.gate.permits import GateSettings, Permits, reason_of
from valved.gate.records import GateRecords, why
from valved.machine.clock import Clock
from valved.machine.ports import GRANT_CAUSES, GatePort, Stamp, StampKind
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Reach, ServiceId
from valved.model.statuses import status_text
from valved.policy.breaker import Tally, step_breaker
from valved.policy.locks import LockState, Stop, step_locks
from valved.state.registry import Books
from valved.state.stats import GpuAccount, NodeCounters

DRIVER_CALLS = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)  # made by valved itself; the other rungs ask the process


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
    _online: Mapping[ServiceId, OnlineService]
    _gpus: Mapping[GpuIndex, GpuAccount]

    def __post_init__(self) -> None:
        self.locks = LockState()  # what the stops told of the driver's locks

    def take(self, stamp: Stamp) -> None:
        online = self._online.get(stamp.service)
        gpus = online.gpus if online is not None else frozenset[GpuIndex]()
        match stamp.kind:
            case StampKind.GATE:
                self._closed(online, stamp)
            case StampKind.HOLD:
                self._held(online, stamp)
                self._records.edge(EventKind.HOLD, stamp, tuple(gpus), why(stamp))
            case StampKind.WAKE:
                self._woken(online, stamp)
                reason = reason_of(stamp.status)
                self._records.edge(EventKind.WAKE, stamp, tuple(gpus), reason.value if reason else "")
            case StampKind.WAKE_REFUSED:
                self._counters.wake_refused += 1
                self._records.edge(EventKind.WAKE_REFUSED, stamp, (), "a launch slipped in")
            case StampKind.GATE_FAILED:
                self._counters.gate_failures += 1
                self._held(online, stamp)  # the hold is as good as any other: only the stop is bad
                self._records.edge(
                    EventKind.GATE_FAILED, stamp, (stamp.gpu,), f"the stop failed: {status_text(stamp.status)}"
                )
            case StampKind.LEARN:
                if online is not None:
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
        self._records.edge(EventKind.GATE, stamp, (stamp.gpu,), why(stamp))

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
        tally = online.count_preemption(stamp.epoch, delay_ns)
        if tally.gates:
            online.hit_requests(self._books.clients_of(online.id), self._gate.view, stamp)
        self._judge(online, tally)

    def _held(self, online: OnlineService | None, stamp: Stamp) -> None:
        if online is None:
            return
        if online.woken_epoch is not None and _is_before(stamp.epoch, online.woken_epoch):
            return  # a slow issuer reports a stop after the wake that undid it
        at_ns = stamp.launch_ns or stamp.seen_ns or self._clock.now_ns()
        book_hold(self._gpus, online.id, online.gpus, stamp.done_ns or at_ns)
        if not online.holding:
            online.begin_hold(at_ns)

    def _woken(self, online: OnlineService | None, stamp: Stamp) -> None:
        self._counters.wakes += 1
        at_ns = stamp.done_ns or self._clock.now_ns()
        if online is None:
            return
        for gpu in online.gpus:
            self._gpus[gpu].release(stamp.service, at_ns)
        online.end_hold(at_ns)
        online.woken_epoch = stamp.epoch
        for client, requests in online.tallies.items():
            if client == stamp.teller:
                requests.report(stamp.requests_started, stamp.requests_ended)
            requests.woken()
        if stamp.channels != online.leaked:
            self._records.leak(online, stamp.channels)

    def _judge(self, online: OnlineService, tally: Tally) -> None:
        now_ns = self._clock.now_ns()
        online.breaker, decision = step_breaker(online.breaker, tally, now_ns, self._settings.breaker)
        if decision.tripped:
            rest_ns = decision.open_until_ns - now_ns
            self._records.breaker(online, decision, self._settings.breaker.budget_share, rest_ns)
            self._permits.withdraw(online)
            self._gate.hold(online.id, int(StampKind.GATE))  # no more than a word if it holds
            self._permits.look_soon(online)


def _is_before(epoch: int, other: int) -> bool:
    """Epochs are 32 bits wide and wrap."""
    return (epoch - other) & 0xFFFFFFFF >= 1 << 31
