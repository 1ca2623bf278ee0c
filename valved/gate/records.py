"""What the gate writes into the journal: edges, decisions, and what an operator should know."""

from __future__ import annotations

from valved.gate.online import OnlineService
from valved.machine.ports import Stamp
from valved.model.events import EventKind
from valved.model.ids import GpuIndex
from valved.policy.breaker import BreakerDecision
from valved.policy.wake import WakeAction, WakeDecision
from valved.state.journal import Journal


class GateRecords:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def edge(self, kind: EventKind, stamp: Stamp, gpus: tuple[GpuIndex, ...], reason: str) -> None:
        at_ns = stamp.done_ns or stamp.seen_ns
        if kind in (EventKind.HOLD, EventKind.WAKE):  # the many; no driver call belongs to them
            detail = {"epoch": stamp.epoch}
            if stamp.launch_ns:
                detail["launch_ns"] = stamp.launch_ns
            self._journal.put(kind, stamp.service, stamp.client, gpus, reason, at_ns, detail)
            return
        self._journal.emit(
            kind,
            service=stamp.service,
            client=stamp.client,
            gpus=gpus,
            reason=reason,
            t_ns=at_ns,
            epoch=stamp.epoch,
            channels=stamp.channels,
            status=stamp.status,
            launch_ns=stamp.launch_ns,
            seen_ns=stamp.seen_ns,
            ioctl_ns=stamp.ioctl_ns,
            done_ns=stamp.done_ns,
        )

    def lost(self, stamps: int) -> None:
        self._journal.emit(
            EventKind.NOTED,
            reason="stops and wakes were not booked: nobody had read what happened for too long",
            lost=stamps,
        )

    def leak(self, online: OnlineService, leaked: int) -> None:
        before, online.leaked = online.leaked, leaked
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


def why(stamp: Stamp) -> str:
    return "launch" if stamp.client else "asked by valved"
