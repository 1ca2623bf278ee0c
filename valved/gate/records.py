"""What the gate writes into the journal: edges, decisions, and what an operator should know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from valved.gate.online import OnlineService
from valved.machine.stamps import Stamp, StampKind, Stamps
from valved.model.events import Event, EventKind
from valved.model.ids import GpuIndex, ServiceId
from valved.model.statuses import status_text
from valved.policy.breaker import BreakerDecision
from valved.policy.wake import WakeAction, WakeDecision, WakeReason
from valved.state.journal import Journal

Gpus = Iterable[GpuIndex]
# As enum valve_wake_reason of native/gate.h counts them. 0: not looked at yet.
REASONS = (
    None,
    WakeReason.NO_OPEN_REQUESTS,
    WakeReason.COOLDOWN_OVER,
    WakeReason.COOLING,
    WakeReason.REFUSED_LATELY,
    WakeReason.BUSY,
    WakeReason.OPEN_REQUESTS,
    WakeReason.WATCHER_DEAD,
)


class GateRecords:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.edge = journal.put_unmade  # with one of the functions below

    def edges(self, stamps: Stamps, gpus: Mapping[ServiceId, Gpus], told: Iterable[int]) -> None:
        """Those of `stamps` that stand at `told`, none of them a failed stop."""
        self._journal.put_many_unmade(_event_of, (stamps, gpus), told)

    def failed(self, stamp: Stamp) -> None:
        """A stop that the driver refused, or that did not come back."""
        event = _switched(
            0, stamp, EventKind.GATE_FAILED, (stamp.gpu,), f"the stop failed: {status_text(stamp.status)}"
        )
        self._journal.put(*event[2:7], event.t_ns, event.detail)

    def lost(self, stamps: int) -> None:
        self._journal.emit(
            EventKind.NOTED,
            reason="stops and wakes were not booked: nobody had read what happened for too long",
            lost=stamps,
        )

    def leak(self, online: OnlineService, leaked: int) -> None:
        before, online.book.leaked = online.book.leaked, leaked
        if leaked > before:
            self._journal.emit(
                EventKind.NOTED,
                service=online.id,
                reason="its engine reports open requests that it does not serve, so the cooldown decides",
                leaked=leaked,
            )

    def change(self, online: OnlineService, before: WakeDecision | None, now: WakeDecision) -> None:
        self.leak(online, now.leaked)
        if now.action is WakeAction.WAKE:
            return  # the wake, or its refusal, is an event of its own
        if before is None or before.reason is not now.reason:
            self._journal.emit(
                EventKind.DECIDED,
                service=online.id,
                gpus=tuple(online.gpus),
                reason=now.reason.value,
                action=now.action.value,
                quiet_us=now.quiet_ns // 1000,
                cooldown_us=online.cooldown.cooldown_ns // 1000,
                hinted=int(now.is_hinted),
                open_requests=online.open_requests,
            )

    def breaker(self, online: OnlineService, decision: BreakerDecision, budget_share: float, rest_ns: int) -> None:
        self._journal.emit(
            EventKind.BREAKER,
            service=online.id,
            gpus=tuple(online.gpus),
            reason="delay exceeds the budget of this service",
            share_ppm=round(decision.share * 1e6),
            budget_ppm=round(budget_share * 1e6),
            gates=decision.gates,
            rest_s=rest_ns // 1_000_000_000,
        )


def _event_of(seq: int, told: tuple[Stamps, Mapping[ServiceId, Gpus]], at: int) -> Event:
    stamps, gpus = told
    stamp = stamps[at]
    return EVENTS[stamp.kind](seq, stamp, gpus[stamp.service])


def held_event(seq: int, stamp: Stamp, gpus: Gpus) -> Event:
    return _passing(seq, stamp, EventKind.HOLD, gpus, _why(stamp))


def woken_event(seq: int, stamp: Stamp, gpus: Gpus) -> Event:
    reason = reason_of(stamp.status)
    return _passing(seq, stamp, EventKind.WAKE, gpus, reason.value if reason else "")


def _passing(seq: int, stamp: Stamp, kind: EventKind, gpus: Gpus, reason: str) -> Event:
    """No driver call belongs to it."""
    detail = {"epoch": stamp.epoch}
    if stamp.launch_ns:
        detail["launch_ns"] = stamp.launch_ns
    return Event(seq, stamp.done_ns, kind, stamp.service, stamp.client, tuple(gpus), reason, detail)


def stopped_event(seq: int, stamp: Stamp, _: Gpus) -> Event:
    return _switched(seq, stamp, EventKind.GATE, (stamp.gpu,), _why(stamp))


def refused_event(seq: int, stamp: Stamp, _: Gpus) -> Event:
    return _switched(seq, stamp, EventKind.WAKE_REFUSED, (), "a launch slipped in")


def _switched(seq: int, stamp: Stamp, kind: EventKind, gpus: tuple[GpuIndex, ...], reason: str) -> Event:
    names = ("epoch", "channels", "status", "launch_ns", "seen_ns", "ioctl_ns", "done_ns")
    detail = {name: getattr(stamp, name) for name in names}
    at_ns = stamp.done_ns or stamp.seen_ns
    return Event(seq, at_ns, kind, stamp.service, stamp.client, gpus, reason, detail)


# How stamps that need no more than a record are told.
EVENTS: Mapping[StampKind, Callable[[int, Stamp, Gpus], Event]] = {
    StampKind.GATE: stopped_event,
    StampKind.HOLD: held_event,
    StampKind.WAKE: woken_event,
    StampKind.WAKE_REFUSED: refused_event,
}


def reason_of(code: int) -> WakeReason | None:
    return REASONS[code] if 0 <= code < len(REASONS) else None


def _why(stamp: Stamp) -> str:
    return "launch" if stamp.client else "asked by valved"
