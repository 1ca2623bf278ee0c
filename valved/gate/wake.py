"""Says where offline work may run again; books how long each GPU was open or stopped.

The native side closes gates by itself, and opens them while it is permitted to. This service gives the permissions and
takes them back, learns the cooldown, and keeps the books of time and delay from stamps: a few times a second, and
whenever somebody reads the books. Nothing here waits: everything is a call from the loop, a timer or a registration.

The hold of a service follows the order of stamps alone, never the return value of a call: a ring may fall between the
two. Only a service's birth (held by contract) and its end are booked directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from valved.abi.link import Feature
from valved.gate.online import OnlineService
from valved.gate.permits import decision_of, is_news, no_permit, reason_of, rule_of
from valved.gate.records import GateRecords, why
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import GRANT_CAUSES, ClientView, GatePort, Stamp, StampKind
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Reach, Role, ServiceId
from valved.policy.breaker import BreakerSettings, BreakerState, Tally, step_breaker
from valved.policy.cooldown import CooldownSettings, first_cooldown, read_cooldown
from valved.policy.locks import LockState, Stop, step_locks
from valved.policy.wake import WakeReason, WakeSettings
from valved.state.journal import Journal
from valved.state.registry import MEMORY_SERVICE, STANDING, Books, ClientEntry
from valved.state.stats import GpuAccount, NodeCounters

TICK_NS = 250_000_000  # how often stamps of ordinary edges are read when nobody asks for them
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
        self._is_braked = False
        self.locks = LockState()  # what the stops told of the driver's locks
        self._askers: set[str] = set()
        self._waiting: set[str] = set()
        self._cooldown = settings.cooldown  # that all permissions rest on
        self._ticker = Ticker(clock, self._tick_over)
        self._is_reading = False
        self.after_wake: list[Callable[[], None]] = []  # a GPU may have opened
        self.after_drain: list[Callable[[], None]] = []  # a GPU may have stopped
        self.standing_changed: list[Callable[[], None]] = []  # other holds than those of services and moves
        self.on_failure: Callable[[Stamp], None] = lambda stamp: None  # ladder: freeze what cannot be gated
        self.clients_changed: Callable[[], None] = lambda: None  # before any of them is answered
        self._let: frozenset[GpuIndex] = frozenset()
        self._gate = gate
        self._books = books
        self._records = GateRecords(journal)
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
        online = self.online[service]
        self._withdraw(online)
        self._gate.put_service(service, gpus)
        self.drain()
        held = {gpu for gpu, account in self.gpus.items() if service in account.holders}
        for gpu in held - gpus:
            self.gpus[gpu].release(service, now_ns)
        online.gpus = gpus
        if gpus - held and not online.holding:
            online.begin_hold(now_ns)
        if online.holding:
            self._book_hold(service, gpus, now_ns)
        self.drain()
        self.look_soon(online)

    def remove_service(self, service: ServiceId) -> None:
        now_ns = self._clock.now_ns()
        self.drain()
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
        self.clients_changed()
        online = self.online.get(client.service)
        if online is None:
            return
        if client.process.pid in online.away:  # a predecessor's: the service is not braked on its account any more
            online.away.discard(client.process.pid)
            online.back_ns = self._clock.now_ns()
        if client.role is Role.ONLINE:
            self._gate.set_watch(client.id, online.watching)
        elif client.features & Feature.HINT:
            self._gate.set_hints(client.id)
        self.look_soon(online)

    def client_left(self, client: ClientEntry) -> None:
        online = self.online.get(client.service)
        if online is not None:
            online.forget(client)
            self.look_soon(online)

    def is_stopped(self, gpu: GpuIndex) -> bool:
        """Offline channels are to be off here. After a wake the driver may need another moment to say so itself."""
        self.drain()
        return bool(self.gpus[gpu].holders) and self._gate.is_gated(gpu)

    def set_offline_channels(self, gpu: GpuIndex, channels: int) -> None:
        """Offline work came to this GPU or left it."""
        self.drain()
        account = self.gpus[gpu]
        came_or_went = (channels > 0) != (account.channels > 0)
        account.set_channels(channels, self._clock.now_ns())
        self.clients_changed()
        if came_or_went:
            self.look_at_all()

    def shared(self) -> frozenset[GpuIndex]:
        """GPUs that online services use."""
        return frozenset[GpuIndex]().union(*(online.gpus for online in self.online.values()))

    def set_moving(self, gpus: frozenset[GpuIndex]) -> None:
        """GPUs on which memory moves right now."""
        self.want_prompt("moving", bool(gpus))
        self.set_standing(MEMORY_SERVICE, gpus)

    def is_held(self, gpus: Iterable[GpuIndex]) -> bool:
        self.drain()
        return any(self.gpus[gpu].holders for gpu in gpus)

    def may_let(self, gpus: Iterable[GpuIndex]) -> bool:
        """Something is stopped here, and by online services alone: no brake, no guard, no mapping under the gate."""
        return any(map(self.is_stopped, gpus)) and all(self.gpus[gpu].holders <= self.online.keys() for gpu in gpus)

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        """Offline work runs there, and nowhere else, though services hold it: a hit for requests open at its end."""
        ended, self._let = self._let - gpus, gpus
        self.want_prompt("letting", bool(gpus))
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
        self.drain()
        return bool(self.gpus[gpu].holders) and not self._gate.is_stopped(gpu)

    def set_standing(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """One of STANDING, a service without clients, holds these GPUs and no others, until told differently."""
        self.drain()
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
        for call in self.standing_changed if service is not MEMORY_SERVICE else ():
            call()

    def ask_idleness(self, asker: str, on: bool) -> None:
        """Somebody wants to know how idle GPUs are although no offline work is there to gain by it."""
        (self._askers.add if on else self._askers.discard)(asker)
        self.look_at_all()

    # Stamps: what the native side did

    def drain(self) -> None:
        """Bring the books up to this moment: stamps of ordinary edges wait until somebody reads."""
        if self._is_reading:  # what a stamp sets off reads the books as they are
            return
        self._is_reading = True
        try:
            stamps = self._gate.drain_stamps()
            for stamp in stamps:
                self._take(stamp)
        finally:
            self._is_reading = False
        for call in self.after_drain if stamps else ():
            call()

    def _take(self, stamp: Stamp) -> None:
        online = self.online.get(stamp.service)
        match stamp.kind:
            case StampKind.GATE:
                self._closed(online, stamp)
            case StampKind.HOLD:
                self._held(online, stamp)
                self._records.edge(EventKind.HOLD, stamp, tuple(self._gpus_of(stamp.service)), why(stamp))
            case StampKind.WAKE:
                self._woken(online, stamp)
            case StampKind.WAKE_REFUSED:
                self.counters.wake_refused += 1
                self._records.edge(EventKind.WAKE_REFUSED, stamp, (), "a launch slipped in")
            case StampKind.GATE_FAILED:
                self.counters.gate_failures += 1
                self._held(online, stamp)  # the hold is as good as any other: only the stop is bad
                self._records.edge(EventKind.GATE_FAILED, stamp, (stamp.gpu,), f"status {stamp.status}")
                self.on_failure(stamp)
            case StampKind.LEARN:
                if online is not None:
                    online.rule = None  # it waits for a new one
                    self.look_soon(online)

    def _closed(self, online: OnlineService | None, stamp: Stamp) -> None:
        self.counters.gates += 1
        account = self.gpus.get(stamp.gpu)
        if online is not None:
            self._held(online, stamp)
        if stamp.client and stamp.launch_ns:
            self._count_preemption(online, account, stamp)
        if online is not None and len(online.gpus) > 1 and stamp.ioctl_ns:
            self._learn_lock(stamp)
        self._records.edge(EventKind.GATE, stamp, (stamp.gpu,), why(stamp))

    def _learn_lock(self, stamp: Stamp) -> None:
        if self._gate.reach(stamp.gpu)[0] in DRIVER_CALLS:
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
            self._count_on_requests(online, stamp)
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

    def _woken(self, online: OnlineService | None, stamp: Stamp) -> None:
        self.counters.wakes += 1
        at_ns = stamp.done_ns or self._clock.now_ns()
        for gpu in self._gpus_of(stamp.service):
            self.gpus[gpu].release(stamp.service, at_ns)
        if online is not None:
            online.end_hold(at_ns)
            online.woken_epoch = stamp.epoch
            for client, requests in online.tallies.items():
                if client == stamp.teller:
                    requests.report(stamp.requests_started, stamp.requests_ended)
                requests.woken()
            self._records.leak(online, stamp.channels)
        reason = reason_of(stamp.status)
        self._records.edge(EventKind.WAKE, stamp, tuple(self._gpus_of(stamp.service)), reason.value if reason else "")
        self._may_have_opened()

    def _may_have_opened(self) -> None:
        for call in self.after_wake:
            call()

    def _book_hold(self, service: ServiceId, gpus: Iterable[GpuIndex], at_ns: int) -> None:
        for gpu in gpus:
            if gpu in self.gpus:
                self.gpus[gpu].hold(service, at_ns)

    # Looks: may the native side wake it, and with what numbers?

    def look_at_all(self) -> None:
        for online in list(self.online.values()):
            self.look_soon(online)

    def look_soon(self, online: OnlineService) -> None:
        self._arm(online, self._clock.now_ns())

    def _arm(self, online: OnlineService, when_ns: int) -> None:
        if online.timer is not None:
            online.timer.cancel()
        online.timer = self._clock.call_at_ns(when_ns, lambda: self._look(online))

    def _look(self, online: OnlineService) -> None:
        """Learn from the clients' regions; permit, or not; note what the last answer was."""
        if online.timer is not None:
            online.timer.cancel()
            online.timer = None
        self.drain()
        if online.id not in self.online:
            return
        now_ns, before = self._clock.now_ns(), online.decision
        obstacle = self._obstacle(online, now_ns)
        self._set_watch(online, obstacle is None)
        if online.holding:
            online.observe(self._views(online.id), now_ns, self.settings.cooldown)
        else:
            online.cooldown = read_cooldown(online.cooldown_state, self.settings.cooldown)
        if obstacle is None:
            self._permit(online)
            online.decision = decision_of(self._gate.look(online.id), before)
        else:
            self._withdraw(online)
            online.decision = no_permit(obstacle, before)
        if self.is_resting(online, now_ns):
            self._arm(online, online.breaker.open_until_ns)
        if online.holding and online.decision is not None:
            self._records.change(online, before, online.decision)

    def _obstacle(self, online: OnlineService, now_ns: int) -> WakeReason | None:
        """What stands in the way that the native side does not know of."""
        if self.is_braked or online.away or self.is_resting(online, now_ns):
            return WakeReason.BRAKED
        return None if self._has_offline(online) else WakeReason.NO_OFFLINE

    def _permit(self, online: OnlineService) -> None:
        rule = rule_of(online, self.settings.wake)
        if is_news(online.rule, rule):
            online.rule = rule
            self._gate.permit(online.id, rule)
        self._ticker.start(TICK_NS)

    def _withdraw(self, online: OnlineService) -> None:
        """Whatever is to hold from here on is said to the native side before anything else."""
        if online.rule is not None:
            online.rule = None
            self._gate.permit(online.id, None)

    def _tick_over(self) -> None:
        """Read what happened, and look at who is busy."""
        self.drain()
        is_new, self._cooldown = self._cooldown is not self.settings.cooldown, self.settings.cooldown
        permitted = [online for online in self.online.values() if online.rule is not None]
        if not permitted:
            self._ticker.stop()
        for online in permitted:
            if online.holding or is_new:
                self._look(online)

    @property
    def is_braked(self) -> bool:
        """Paused, off or draining: nobody is woken."""
        return self._is_braked

    @is_braked.setter
    def is_braked(self, on: bool) -> None:
        self._is_braked = on
        for online in self.online.values() if on else ():
            self._withdraw(online)

    def want_prompt(self, asker: str, on: bool) -> None:
        """Somebody waits for a stop or a wake: what happens is read at once, not a few times a second."""
        (self._waiting.add if on else self._waiting.discard)(asker)
        self._gate.set_prompt(bool(self._waiting))

    def _woken_unseen(self, online: OnlineService, now_ns: int) -> None:
        """Our book said it holds and the native side knows better: a stamp was lost."""
        for gpu in online.gpus:
            self.gpus[gpu].release(online.id, now_ns)
        online.end_hold(now_ns)

    def resync(self) -> None:
        """Find a hold whose stamp was lost (the ring is bounded): else its offline work would never be woken."""
        self.drain()
        for online in self.online.values():
            if online.holding:
                if not self._gate.look(online.id).holds:
                    self._woken_unseen(online, self._clock.now_ns())
                continue
            closed = [gpu for gpu in online.gpus if self._gate.is_gated(gpu)]
            if closed and not any(self.gpus[gpu].holders for gpu in closed):
                online.begin_hold(self._clock.now_ns())
                self._book_hold(online.id, online.gpus, self._clock.now_ns())
                self.look_soon(online)

    def _views(self, service: ServiceId) -> list[tuple[ClientEntry, ClientView]]:
        clients = self._books.clients_of(service)
        return [(client, self._gate.view(client.id, with_gaps=True)) for client in clients]

    def _count_on_requests(self, online: OnlineService, stamp: Stamp | None = None) -> None:
        online.hit_requests(self._books.clients_of(online.id), self._gate.view, stamp)

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
            rest_ns = decision.open_until_ns - now_ns
            self._records.breaker(online, decision, self.settings.breaker.budget_share, rest_ns)
            self._withdraw(online)
            self._gate.hold(online.id, int(StampKind.GATE))  # no more than a word if it holds
            self.look_soon(online)

    def _has_offline(self, online: OnlineService) -> bool:
        return bool(self._askers) or any(self.gpus[gpu].channels for gpu in online.gpus)

    def is_resting(self, online: OnlineService, now_ns: int) -> bool:
        return now_ns < online.breaker.open_until_ns

    def _gpus_of(self, service: ServiceId) -> frozenset[GpuIndex]:
        online = self.online.get(service)
        return online.gpus if online is not None else frozenset()


def _is_before(epoch: int, other: int) -> bool:
    """Epochs are 32 bits wide and wrap."""
    return (epoch - other) & 0xFFFFFFFF >= 1 << 31
