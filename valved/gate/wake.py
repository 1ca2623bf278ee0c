"""Decides when offline work may run again; books how long each GPU was open or stopped.

The native side closes gates by itself; this service reads its stamps afterwards, keeps the books of time and delay,
and decides when to propose a wake. Nothing here waits: everything is a call from the loop, a timer or a registration.

The hold of a service follows the order of stamps alone, never the return value of a call: a ring may fall between the
two. Only a service's birth (held by contract) and its end are booked directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from valved.gate.online import OnlineService, is_hinting
from valved.machine.clock import Clock
from valved.machine.ports import ClientView, GatePort, Stamp, StampKind, WakeOutcome
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Reach, Role, ServiceId
from valved.policy.breaker import BreakerSettings, BreakerState, Tally, step_breaker
from valved.policy.cooldown import CooldownSettings, first_cooldown, read_cooldown
from valved.policy.locks import LockState, Stop, step_locks
from valved.policy.wake import WakeAction, WakeDecision, WakeReason, WakeSettings, after_refusal, decide_wake
from valved.state.journal import Journal
from valved.state.registry import BRAKE_SERVICE, GUARD_SERVICE, MEMORY_SERVICE, STANDING, Books, ClientEntry
from valved.state.stats import GpuAccount, NodeCounters

DRIVER_CALLS = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)  # made by valved itself; the other rungs ask the process


@dataclass(slots=True, kw_only=True)
class GateSettings:
    """The policies' settings in force. SetPolicy replaces the cooldown's while running."""

    cooldown: CooldownSettings
    wake: WakeSettings
    breaker: BreakerSettings


class GateService:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        journal: Journal,
        clock: Clock,
        settings: GateSettings,
        counters: NodeCounters,
    ) -> None:
        self.settings = settings
        self.counters = counters
        self.online: dict[ServiceId, OnlineService] = {}
        self.gpus: dict[GpuIndex, GpuAccount] = {
            info.index: GpuAccount(since_ns=clock.now_ns(), standing=STANDING) for info in gate.gpus()
        }
        self.is_braked = False  # paused, off or draining: nobody is woken
        self.locks = LockState()  # what the stops told of the driver's locks
        self._askers: set[str] = set()
        self.after_wake: list[Callable[[], None]] = []  # a GPU may have opened
        self.after_drain: list[Callable[[], None]] = []  # a GPU may have stopped
        self.on_failure: Callable[[Stamp], None] = lambda stamp: None  # ladder: freeze what cannot be gated
        self._let: frozenset[GpuIndex] = frozenset()
        self._gate = gate
        self._books = books
        self._journal = journal
        self._clock = clock

    # Services come, change and go

    def add_service(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> OnlineService:
        """Create an online service: it holds from birth."""
        now_ns = self._clock.now_ns()
        state = first_cooldown(now_ns, self.settings.cooldown)
        online = OnlineService(
            id=service,
            cooldown_state=state,
            cooldown=read_cooldown(state, self.settings.cooldown),
            breaker=BreakerState(since_ns=now_ns),
            since_ns=now_ns,
            looking_since_ns=now_ns,
        )
        self.online[service] = online
        try:
            self.set_gpus(service, gpus)
        except Exception:  # a service that is half there would be held by nobody and believed by everybody
            del self.online[service]
            raise
        return online

    def set_gpus(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """The GPUs of a service changed. New ones are held from now on, and so is the service."""
        now_ns = self._clock.now_ns()
        self._gate.put_service(service, gpus)
        held = {gpu for gpu, account in self.gpus.items() if service in account.holders}
        for gpu in held - gpus:
            self.gpus[gpu].release(service, now_ns)
        online = self.online[service]
        online.gpus = gpus
        if gpus - held and not online.holding:
            online.begin_hold(now_ns)
        if online.holding:
            self._book_hold(service, gpus, now_ns)
        self.drain()
        self.look_soon(online)

    def remove_service(self, service: ServiceId) -> None:
        now_ns = self._clock.now_ns()
        online = self.online.pop(service)
        if online.timer is not None:
            online.timer.cancel()
        self._gate.remove_service(service)
        for account in self.gpus.values():
            account.release(service, now_ns)
        self.drain()
        self._may_have_opened()

    def client_joined(self, client: ClientEntry) -> None:
        """A new client of an online service finds its gate word as the service has it: odd, and its launches ring."""
        online = self.online.get(client.service)
        if online is None:
            return
        if client.role is Role.ONLINE:
            self._gate.set_watch(client.id, online.watching)
        self.look_soon(online)

    def client_left(self, client: ClientEntry) -> None:
        online = self.online.get(client.service)
        if online is not None:
            online.forget(client)
            self.look_soon(online)

    def is_stopped(self, gpu: GpuIndex) -> bool:
        """Offline channels are to be off here. After a wake the driver may need another moment to say so itself."""
        return bool(self.gpus[gpu].holders) and self._gate.is_gated(gpu)

    def set_offline_channels(self, gpu: GpuIndex, channels: int) -> None:
        """Offline work came to this GPU or left it."""
        account = self.gpus[gpu]
        came = channels > 0 and account.channels == 0
        account.set_channels(channels, self._clock.now_ns())
        if came:
            self.look_at_all()

    def set_pause(self, gpus: frozenset[GpuIndex]) -> None:
        """The node's own brake: offline work runs on none of these GPUs until told differently."""
        self._set_standing_hold(BRAKE_SERVICE, gpus)

    def shared(self) -> frozenset[GpuIndex]:
        """GPUs that online services use."""
        return frozenset[GpuIndex]().union(*(online.gpus for online in self.online.values()))

    def set_guarded(self, gpus: frozenset[GpuIndex]) -> None:
        """GPUs on which offline work must not run whatever the online services there say."""
        self._set_standing_hold(GUARD_SERVICE, gpus)

    def set_moving(self, gpus: frozenset[GpuIndex]) -> None:
        """GPUs on which memory moves right now."""
        self._set_standing_hold(MEMORY_SERVICE, gpus)

    def is_held(self, gpus: Iterable[GpuIndex]) -> bool:
        return any(self.gpus[gpu].holders for gpu in gpus)

    def may_let(self, gpus: Iterable[GpuIndex]) -> bool:
        """Something is stopped here, and by online services alone: no brake, no guard, no mapping under the gate."""
        return any(map(self.is_stopped, gpus)) and all(self.gpus[gpu].holders <= self.online.keys() for gpu in gpus)

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        """Offline work runs on these GPUs, and on no others, although online services hold them. The requests that
        are open when it is stopped again were hit by it.
        """
        ended, self._let = self._let - gpus, gpus
        self._gate.let(gpus)
        for online in self.online.values():
            if online.holding and online.gpus & ended:
                self._count_on_requests(online)

    def is_proven_stopped(self, gpu: GpuIndex) -> bool:
        """Nothing of offline runs here: the disable came back, and came back well."""
        if not self._gate.is_stopped(gpu):
            return False
        self.drain()  # its stamp lies there by now
        return self._gate.is_stopped(gpu)

    def reach(self, gpu: GpuIndex) -> Reach:
        return self._gate.reach(gpu)[0]

    def is_ungated(self, gpu: GpuIndex) -> bool:
        """Somebody holds this GPU, and offline work may run there all the same: the driver refuses, or hangs."""
        return bool(self.gpus[gpu].holders) and not self._gate.is_stopped(gpu)

    def _set_standing_hold(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """A service without clients holds these GPUs and no others, until told differently."""
        now_ns = self._clock.now_ns()
        held = {gpu for gpu, account in self.gpus.items() if service in account.holders}
        if gpus == held:
            return
        if gpus:
            self.let(self._let - gpus)
            self._gate.put_service(service, gpus)
        else:
            self._gate.remove_service(service)
        for gpu in held - gpus:
            self.gpus[gpu].release(service, now_ns)
        self._book_hold(service, gpus, now_ns)
        self.drain()
        self.look_at_all()
        self._may_have_opened()

    def ask_idleness(self, asker: str, on: bool) -> None:
        """Somebody wants to know how idle GPUs are although no offline work is there to gain by it."""
        (self._askers.add if on else self._askers.discard)(asker)

    # Stamps: what the native side did

    def drain(self) -> None:
        for stamp in self._gate.drain_stamps():
            self._take(stamp)
        for call in self.after_drain:
            call()

    def _take(self, stamp: Stamp) -> None:
        online = self.online.get(stamp.service)
        match stamp.kind:
            case StampKind.GATE:
                self._closed(online, stamp)
            case StampKind.HOLD:
                self._held(online, stamp)
                self._record(EventKind.HOLD, stamp, tuple(self._gpus_of(stamp.service)), _why(stamp))
            case StampKind.WAKE:
                self._woken(online, stamp)
            case StampKind.WAKE_REFUSED:
                self.counters.wake_refused += 1
                self._record(EventKind.WAKE_REFUSED, stamp, (), "a launch slipped in")
            case StampKind.GATE_FAILED:
                self.counters.gate_failures += 1
                self._held(online, stamp)  # the hold is as good as any other: only the stop is bad
                self._record(EventKind.GATE_FAILED, stamp, (stamp.gpu,), f"status {stamp.status}")
                self.on_failure(stamp)

    def _closed(self, online: OnlineService | None, stamp: Stamp) -> None:
        self.counters.gates += 1
        account = self.gpus.get(stamp.gpu)
        if online is not None:
            self._held(online, stamp)
        if stamp.client and stamp.launch_ns:
            self._count_preemption(online, account, stamp)
        if online is not None and len(online.gpus) > 1 and stamp.ioctl_ns:
            self._learn_lock(stamp)
        self._record(EventKind.GATE, stamp, (stamp.gpu,), _why(stamp))

    def _learn_lock(self, stamp: Stamp) -> None:
        if self._gate.reach(stamp.gpu)[0] in DRIVER_CALLS:
            stop = Stop(service=stamp.service, epoch=stamp.epoch, ioctl_ns=stamp.ioctl_ns, done_ns=stamp.done_ns)
            self.locks = step_locks(self.locks, stop)

    def _count_preemption(self, online: OnlineService | None, account: GpuAccount | None, stamp: Stamp) -> None:
        """Only a launch that found offline work running was delayed by us."""
        if not stamp.channels:
            return
        delay_ns = max(0, stamp.done_ns - stamp.launch_ns)
        if account is not None:
            account.gates += 1
            account.latency.add(delay_ns)
        if online is None:
            return
        tally = online.count_preemption(stamp.epoch, delay_ns)
        if tally.gates:
            self._count_on_requests(online)
        self._judge(online, tally)

    def _held(self, online: OnlineService | None, stamp: Stamp) -> None:
        if online is None:
            return
        if online.woken_epoch is not None and _is_before(stamp.epoch, online.woken_epoch):
            return  # a slow issuer reports a stop after the wake that undid it
        at_ns = stamp.launch_ns or stamp.seen_ns or self._clock.now_ns()
        self._book_hold(online.id, online.gpus, stamp.done_ns or at_ns)
        if not online.holding:
            online.begin_hold(at_ns)
            self._set_watch(online, self._has_offline(online))  # at once: the cooldown runs from the proof of idleness
            # Unhinted, nothing can come of a look before the work is proven done and one cooldown has passed; a hinted
            # request may be over in a moment.
            proof_ns = self.settings.wake.look_least_ns
            self.look_soon(online, proof_ns if online.is_hinted else proof_ns + online.cooldown.cooldown_ns)

    def _woken(self, online: OnlineService | None, stamp: Stamp) -> None:
        self.counters.wakes += 1
        at_ns = stamp.done_ns or self._clock.now_ns()
        for gpu in self._gpus_of(stamp.service):
            self.gpus[gpu].release(stamp.service, at_ns)
        if online is not None:
            online.end_hold(at_ns)
            online.woken_epoch = stamp.epoch
            for requests in online.tallies.values():
                requests.woken()
        reason = online.decision.reason.value if online is not None and online.decision is not None else ""
        self._record(EventKind.WAKE, stamp, tuple(self._gpus_of(stamp.service)), reason)
        self._may_have_opened()

    def _may_have_opened(self) -> None:
        for call in self.after_wake:
            call()

    def _book_hold(self, service: ServiceId, gpus: Iterable[GpuIndex], at_ns: int) -> None:
        for gpu in gpus:
            if gpu in self.gpus:
                self.gpus[gpu].hold(service, at_ns)

    # Looks: may offline run again?

    def look_at_all(self) -> None:
        for online in list(self.online.values()):
            self.look_soon(online)

    def look_soon(self, online: OnlineService, delay_ns: int = 0) -> None:
        self._arm(online, self._clock.now_ns() + delay_ns)

    def _arm(self, online: OnlineService, when_ns: int | None) -> None:
        if online.timer is not None:
            online.timer.cancel()
            online.timer = None
        if when_ns is not None and online.holding:
            online.timer = self._clock.call_at_ns(when_ns, lambda: self._look(online))

    def _look(self, online: OnlineService) -> None:
        online.timer = None
        if online.id not in self.online or not online.holding:
            return
        now_ns = self._clock.now_ns()
        previous = online.decision
        if previous is not None and previous.look_again_ns is None and previous.action is WakeAction.HOLD:
            online.looking_since_ns = now_ns  # nobody looked meanwhile
        observation = online.observe(
            self._views(online.id),
            now_ns,
            self.settings.cooldown,
            is_offline_present=self._has_offline(online),
            is_braked=self.is_braked or bool(online.away) or self.is_resting(online, now_ns),
        )
        online.wake_state, decision = decide_wake(online.wake_state, observation, now_ns, self.settings.wake)
        online.decision = decision
        self._note_change(online, previous, decision)
        self._set_watch(online, decision.look_again_ns is not None or decision.action is WakeAction.WAKE)
        if decision.action is WakeAction.WAKE:
            self._propose(online, now_ns)
        elif decision.reason is WakeReason.BRAKED and online.breaker.open_until_ns > now_ns:
            self._arm(online, online.breaker.open_until_ns)
        else:
            self._arm(online, decision.look_again_ns)

    def _propose(self, online: OnlineService, now_ns: int) -> None:
        outcome = self._gate.wake(online.id)
        self.drain()
        if outcome is WakeOutcome.REFUSED:
            cooldown_ns = online.cooldown.cooldown_ns
            online.wake_state = after_refusal(online.wake_state, cooldown_ns, now_ns, self.settings.wake)
            self._arm(online, online.wake_state.blocked_until_ns)
        elif outcome is WakeOutcome.NOT_HOLDING and online.holding:
            self._woken_unseen(online, now_ns)
        if not online.holding:
            self._set_watch(online, False)

    def _woken_unseen(self, online: OnlineService, now_ns: int) -> None:
        """Our book said it holds and the native side knows better: a stamp was lost."""
        for gpu in online.gpus:
            self.gpus[gpu].release(online.id, now_ns)
        online.end_hold(now_ns)

    def resync(self) -> None:
        """Find a hold whose stamp was lost (the ring is bounded): else its offline work would never be woken."""
        for online in self.online.values():
            if online.holding:
                continue
            closed = [gpu for gpu in online.gpus if self._gate.is_gated(gpu)]
            if closed and not any(self.gpus[gpu].holders for gpu in closed):
                online.begin_hold(self._clock.now_ns())
                self._book_hold(online.id, online.gpus, self._clock.now_ns())
                self.look_soon(online)

    def _views(self, service: ServiceId) -> list[tuple[ClientEntry, ClientView]]:
        clients = self._books.clients_of(service)
        return [(client, self._gate.view(client.id, with_gaps=True)) for client in clients]

    def _count_on_requests(self, online: OnlineService) -> None:
        """Every request open at this preemption was hit by it, also the first one of which an engine will ever tell."""
        for client in self._books.clients_of(online.id):
            requests = online.tally_of(client)
            if client.role is Role.HOOK or requests.is_heard:
                view = self._gate.view(client.id)
                if is_hinting(client, view):
                    requests.preempted_amid(view.requests_started, view.requests_ended)
                    continue
            requests.preempted()

    def _set_watch(self, online: OnlineService, on: bool) -> None:
        if online.watching == on:
            return
        online.watching = on
        online.watch_since_ns = self._clock.now_ns()
        for client in self._books.clients_of(online.id):
            if client.role is Role.ONLINE:
                self._gate.set_watch(client.id, on)

    def _judge(self, online: OnlineService, tally: Tally) -> None:
        now_ns = self._clock.now_ns()
        online.breaker, decision = step_breaker(online.breaker, tally, now_ns, self.settings.breaker)
        if decision.tripped:
            self._journal.emit(
                EventKind.BREAKER,
                service=online.id,
                gpus=tuple(online.gpus),
                reason="delay exceeds the budget of this service",
                share_ppm=round(decision.share * 1e6),
                budget_ppm=round(self.settings.breaker.budget_share * 1e6),
                gates=decision.gates,
                rest_s=(decision.open_until_ns - now_ns) // 1_000_000_000,
            )
            if not online.holding:
                self._gate.hold(online.id, int(StampKind.GATE))

    def _has_offline(self, online: OnlineService) -> bool:
        return bool(self._askers) or any(self.gpus[gpu].channels for gpu in online.gpus)

    def is_resting(self, online: OnlineService, now_ns: int) -> bool:
        return now_ns < online.breaker.open_until_ns

    def _gpus_of(self, service: ServiceId) -> frozenset[GpuIndex]:
        online = self.online.get(service)
        return online.gpus if online is not None else frozenset()

    # Records

    def _record(self, kind: EventKind, stamp: Stamp, gpus: tuple[GpuIndex, ...], reason: str) -> None:
        at_ns = stamp.done_ns or stamp.seen_ns
        if kind in (EventKind.HOLD, EventKind.WAKE):  # the many; no driver call belongs to them
            more = {"launch_ns": stamp.launch_ns} if stamp.launch_ns else {}
            service, client = stamp.service, stamp.client
            self._journal.emit(
                kind, service=service, client=client, gpus=gpus, reason=reason, t_ns=at_ns, epoch=stamp.epoch, **more
            )
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

    def _note_change(self, online: OnlineService, before: WakeDecision | None, now: WakeDecision) -> None:
        if now.leaked > (before.leaked if before is not None else 0):
            self._journal.emit(
                EventKind.NOTED,
                service=online.id,
                reason="its engine counts requests as open that nobody serves: the cooldown decides instead",
                leaked=now.leaked,
            )
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


def _why(stamp: Stamp) -> str:
    return "launch" if stamp.client else "asked by valved"


def _is_before(epoch: int, other: int) -> bool:
    """Epochs are 32 bits wide and wrap."""
    return (epoch - other) & 0xFFFFFFFF >= 1 << 31
