"""One online service at run time: its hold, its cooldown, its requests, its breaker. Effects are in gate/wake.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from valved.abi.link import Feature
from valved.gate.doubt import Doubt
from valved.gate.requests import RequestTally
from valved.machine.clock import TimerHandle
from valved.machine.ports import ClientView, WakeRule
from valved.machine.stamps import Stamp
from valved.model.consent import SILENT, Said
from valved.model.ids import ClientId, GpuIndex, ProcessId, Role, ServiceId
from valved.native._booking import ffi
from valved.policy.apart import GapsState, common_gaps, shorten, step_gaps
from valved.policy.breaker import BreakerState, Tally
from valved.policy.cooldown import (
    Cooldown,
    CooldownObservation,
    CooldownSettings,
    CooldownState,
    first_cooldown,
    gaps_inside_hold,
    read_cooldown,
    step_cooldown,
)
from valved.policy.wake import WakeDecision
from valved.state.registry import ClientEntry
from valved.state.stats import Histogram

MOST_LEFT = 256  # when so many have left, those that ended are dropped; if none has, the oldest is not expected back
AGE_NS = 250_000_000  # the mark falls by 0.2 % in this time: ageing it at every look would be work for nothing


def is_hinting(client: ClientEntry, view: ClientView) -> bool:
    """An engine hook that announced it, or an online process that has called valve_hint_open_requests."""
    return bool(client.features & Feature.HINT) if client.role is Role.HOOK else view.hint_ns != 0


def open_requests(clients: Iterable[ClientEntry], view_of: Callable[[ClientId], ClientView]) -> int:
    """As its clients say now: `OnlineService.open_requests` is of the last look, which may be long ago."""
    looks = [(client, view_of(client.id)) for client in clients]
    return sum(view.open_requests for client, view in looks if is_hinting(client, view))


@dataclass(slots=True, kw_only=True)
class ServiceBook:
    """A service's numbers that follow its stamps. In valved a struct valve_book_service (native/books/booking.h) stands
    for it: in that C books most stamps, and no number may leave 64 bits."""

    id: int = 0
    since_ns: int = 0  # of the present state
    seen_ns: int = 0  # up to when the mark has aged
    watch_since_ns: int = 0  # earlier gaps prove nothing
    woken_epoch: int = -1  # of the last wake; -1: none
    epoch: int = -1  # of the last preemption: k GPUs bring k stamps of one epoch
    epoch_delay_ns: int = 0
    freed_ns: int = 0  # between holds
    held_ns: int = 0  # in finished holds
    unseen_ns: int = 0  # of these, while valved did not look whether it was idle
    aged_ns: int = 0  # what the mark has aged since the cooldown was last read
    delay_ns: int = 0
    preemptions: int = 0
    leaked: int = 0  # open requests that are not believed any more
    holding: bool = True  # from birth, so that no launch precedes its gate
    watching: bool = False
    unclaimed: bool = False  # a preemption that no wake has followed
    stopped: bool = False  # the last batch of stamps told of one
    gpus: int = 0  # for one batch, as the last two
    booked: int = 0
    held: int = 0


def native_book(service: ServiceId, now_ns: int) -> ServiceBook:
    first = asdict(ServiceBook(id=service, since_ns=now_ns, seen_ns=now_ns))
    return cast("ServiceBook", ffi.new("struct valve_book_service *", first))


@dataclass(slots=True, kw_only=True)
class OnlineService:
    id: ServiceId
    gpus: frozenset[GpuIndex] = frozenset()
    book: ServiceBook
    read_state: CooldownState  # of the cooldown, when it was last read off
    cooldown: Cooldown
    looked_ns: int = 0  # when its clients' regions were last read
    read_ns: int = 0  # when the cooldown was last read off its state
    gaps: GapsState = field(default_factory=GapsState)  # without a hint, if asked for
    breaker: BreakerState
    rule: WakeRule | None = None  # by which the native side may wake it; None: it may not
    decision: WakeDecision | None = None
    timer: TimerHandle | None = None
    away: set[ProcessId] = field(default_factory=set)  # a predecessor's clients that have not come back yet
    back_ns: int = 0  # when the last of them did: its channels follow its HELLO
    judged: Tally = field(default_factory=Tally)  # what the breaker has been told of, in all
    judged_ns: int = 0  # when
    latency: Histogram = field(default_factory=Histogram)
    tallies: dict[ClientId, RequestTally] = field(default_factory=dict)
    left: dict[tuple[ProcessId, Role], RequestTally] = field(default_factory=dict)  # they may come back and count on
    past_requests: RequestTally = field(default_factory=RequestTally)  # what a predecessor had counted
    open_requests: int = 0
    doubt: Doubt = field(default_factory=Doubt)
    said: Said = SILENT  # its launcher's words on granted time

    @property
    def holding(self) -> bool:
        return self.book.holding

    def begin_hold(self, at_ns: int) -> None:
        if not self.book.holding and at_ns > self.book.since_ns:
            self.book.freed_ns += at_ns - self.book.since_ns
        self.book.holding = True
        self.book.since_ns = at_ns
        self.book.seen_ns = max(self.book.seen_ns, at_ns)  # quiet time does not age the mark

    def watch(self, on: bool, now_ns: int) -> None:
        """From now on the native side looks whether it is idle, or does so no more."""
        self.book.unseen_ns = self._unseen_ns(now_ns)
        self.book.watching, self.book.watch_since_ns = on, now_ns

    def end_hold(self, at_ns: int) -> None:
        if not self.book.watching:
            self.book.unseen_ns = self._unseen_ns(at_ns)
        if at_ns > self.book.since_ns:
            self.book.held_ns += at_ns - self.book.since_ns
        self.book.holding = False
        self.book.since_ns = at_ns
        if at_ns > self.book.seen_ns:
            self.book.aged_ns += at_ns - self.book.seen_ns
            self.book.seen_ns = at_ns

    def hold_ns(self, now_ns: int) -> int:
        """Time in which it held its GPUs, the hold under way included."""
        return self.book.held_ns + (max(0, now_ns - self.book.since_ns) if self.book.holding else 0)

    def busy_ns(self, now_ns: int) -> int:
        """Of this, the time in which it would have left them had it been idle. In the rest valved did not look: without
        offline work, say, or while it was paused."""
        return max(0, self.hold_ns(now_ns) - self._unseen_ns(now_ns))

    def _unseen_ns(self, now_ns: int) -> int:
        is_unseen = self.book.holding and not self.book.watching
        return self.book.unseen_ns + (
            max(0, now_ns - max(self.book.since_ns, self.book.watch_since_ns)) if is_unseen else 0
        )

    def idle_ns(self, now_ns: int) -> int:
        """Time in which it left its GPUs to others."""
        return self.book.freed_ns + (0 if self.book.holding else max(0, now_ns - self.book.since_ns))

    @property
    def cooldown_state(self) -> CooldownState:
        """As step_cooldown ages it without gaps. Each edge moves two numbers, and few ask."""
        return replace(self.read_state, age_ns=self.read_state.age_ns + self.book.aged_ns, seen_ns=self.book.seen_ns)

    @cooldown_state.setter
    def cooldown_state(self, state: CooldownState) -> None:
        self.read_state, self.book.aged_ns, self.book.seen_ns = state, 0, state.seen_ns

    def count_preemption(self, epoch: int, delay_ns: int) -> bool:
        """Book one GPU's stop: one preemption over all GPUs of the service, as slow as the slowest of them. Returns
        whether it is a new one."""
        first = epoch != self.book.epoch
        added_ns = delay_ns if first else max(0, delay_ns - self.book.epoch_delay_ns)
        self.book.epoch_delay_ns = delay_ns if first else max(delay_ns, self.book.epoch_delay_ns)
        self.book.epoch = epoch
        self.book.preemptions += first
        self.book.delay_ns += added_ns
        return first

    def unjudged(self, now_ns: int, most_held_ns: int) -> Tally:
        """What the breaker has not been told of. It is, from now on. A rest is the breaker's own hold, and most of a
        hold of hours is outside of its window: with such time a share says nothing of what Valve costs now."""
        rested_ns = max(0, min(now_ns, self.breaker.open_until_ns) - self.judged_ns)
        before, held_ns = self.judged, self.hold_ns(now_ns)
        self.judged = Tally(delay_ns=self.book.delay_ns, held_ns=held_ns, gates=self.book.preemptions)
        self.judged_ns = now_ns
        fresh = self.judged.minus(before)
        return replace(fresh, held_ns=min(max(0, fresh.held_ns - rested_ns), most_held_ns))

    def observe(
        self,
        looks: Sequence[tuple[ClientEntry, ClientView]],
        now_ns: int,
        settings: CooldownSettings,
        by_arrivals: bool,
    ) -> None:
        """Take in what the clients' regions say: requests, and gaps to learn the cooldown from."""
        hints: list[int] = []
        launchers: list[list[tuple[int, int]]] = []
        for client, view in looks:
            if is_hinting(client, view):
                self.hear(client, view)
                hints.append(view.open_requests)
            if client.role is not Role.HOOK and (view.gaps or not view.is_idle):
                launchers.append([(gap.end_ns, gap.gap_ns) for gap in view.gaps])
        gaps = [gap for of in launchers for gap in of]
        open_before, self.open_requests = self.open_requests, sum(hints)
        counted = not hints or (open_before > 0 and self.open_requests > 0)
        since_ns = max(self.book.since_ns, self.book.watch_since_ns)
        inside = gaps_inside_hold(gaps, since_ns, now_ns) if counted and gaps and self.book.holding else ()
        learns = by_arrivals and not hints
        spread = gaps_inside_hold(common_gaps(launchers), self.book.watch_since_ns, now_ns) if learns else ()
        if inside or spread or now_ns - self.read_ns > AGE_NS:
            self.read_ns = now_ns
            observation = CooldownObservation(gaps_ns=inside)
            self.cooldown_state, _ = step_cooldown(self.cooldown_state, observation, now_ns, settings)
            self.gaps = step_gaps(self.gaps, spread, now_ns, self.hold_ns(now_ns), settings)
            self.read_cooldown(settings)

    def read_cooldown(self, settings: CooldownSettings) -> None:
        self.cooldown = shorten(read_cooldown(self.cooldown_state, settings), self.gaps, settings)

    def hear(self, client: ClientEntry, view: ClientView) -> None:
        """What an engine counts: requests."""
        self.tally_of(client).report(view.requests_started, view.requests_ended)

    def hit_requests(
        self, clients: Iterable[ClientEntry], view_of: Callable[[ClientId], ClientView], stamp: Stamp | None
    ) -> None:
        """Every request open at this preemption was hit by it, also the first one of which an engine will ever tell."""
        self.book.unclaimed = True
        for client in clients:
            requests = self.tally_of(client)
            if stamp is not None and stamp.teller:
                if client.id == stamp.teller:
                    requests.preempted_amid(stamp.requests_started, stamp.requests_ended)
                else:
                    requests.preempted()
                continue
            if client.role is Role.HOOK or requests.is_heard:
                view = view_of(client.id)
                if is_hinting(client, view):
                    requests.preempted_amid(view.requests_started, view.requests_ended)
                    continue
            requests.preempted()

    def end_hit(self, stamp: Stamp) -> None:
        """It was woken: a preemption hits no request that begins from here on."""
        self.book.unclaimed = False
        for client, requests in self.tallies.items():
            if client == stamp.teller:
                requests.report(stamp.requests_started, stamp.requests_ended)
            requests.woken()

    def tally_of(self, client: ClientEntry) -> RequestTally:
        tally = self.tallies.get(client.id)
        if tally is None:
            before = self.left.pop((client.process, client.role), None)
            self.book.unclaimed |= before is not None  # it may have been away at the last wake
            tally = self.tallies[client.id] = before or RequestTally()
        return tally

    def forget(self, client: ClientEntry, is_gone: Callable[[ProcessId], bool]) -> None:
        """A client left. Its process may connect again, and says then what it counted in all."""
        tally, key = self.tallies.pop(client.id, None), (client.process, client.role)
        if tally is None or not tally.is_heard:
            return
        if key in self.left:  # of another engine in the process: which of them comes back could not be told
            self.past_requests.absorb(self.left.pop(key))
        self.left[key] = tally
        if len(self.left) > MOST_LEFT:
            ended = [left for left in self.left if is_gone(left[0])]
            for left in ended or [next(iter(self.left))]:
                self.past_requests.absorb(self.left.pop(left))

    def request_figures(self) -> tuple[int, int, list[int]]:
        """Requests ended, most preemptions of one, and the histogram."""
        all_ = [self.past_requests, *self.left.values(), *self.tallies.values()]
        histogram = [sum(column) for column in zip(*(tally.histogram for tally in all_), strict=True)]
        return sum(tally.ended for tally in all_), max(tally.most for tally in all_), histogram

    @property
    def is_hinted(self) -> bool:
        return self.decision is not None and self.decision.is_hinted


def born(service: ServiceId, now_ns: int, settings: CooldownSettings) -> OnlineService:
    state = first_cooldown(now_ns, settings)
    return OnlineService(
        id=service,
        read_state=state,
        cooldown=read_cooldown(state, settings),
        breaker=BreakerState(since_ns=now_ns),
        book=native_book(service, now_ns),
    )
