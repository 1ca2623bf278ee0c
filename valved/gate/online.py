"""One online service at run time: its hold, its cooldown, its requests, its breaker. Effects are in gate/wake.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from valved.abi.link import Feature
from valved.gate.requests import RequestTally
from valved.machine.clock import TimerHandle
from valved.machine.ports import ClientView, WakeRule
from valved.machine.stamps import Stamp
from valved.model.consent import SILENT, Said
from valved.model.ids import ClientId, GpuIndex, ProcessId, Role, ServiceId
from valved.policy.breaker import BreakerState, Tally
from valved.policy.cooldown import (
    Cooldown,
    CooldownObservation,
    CooldownSettings,
    CooldownState,
    gaps_inside_hold,
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


@dataclass(slots=True, kw_only=True)
class OnlineService:
    id: ServiceId
    gpus: frozenset[GpuIndex] = frozenset()
    read_state: CooldownState  # of the cooldown, when it was last read off
    cooldown: Cooldown
    aged_ns: int = 0  # what the mark has aged since
    seen_ns: int = 0  # up to when
    looked_ns: int = 0  # when its clients' regions were last read
    read_ns: int = 0  # when the cooldown was last read off its state
    breaker: BreakerState
    holding: bool = True  # from birth, so that no launch precedes its gate
    since_ns: int = 0  # of the present state
    watching: bool = False
    watch_since_ns: int = 0  # earlier gaps prove nothing
    rule: WakeRule | None = None  # by which the native side may wake it; None: it may not
    decision: WakeDecision | None = None
    timer: TimerHandle | None = None
    away: set[ProcessId] = field(default_factory=set)  # a predecessor's clients that have not come back yet
    back_ns: int = 0  # when the last of them did: its channels follow its HELLO
    preemptions: int = 0
    delay_ns: int = 0
    held_ns: int = 0  # in finished holds
    unseen_ns: int = 0  # of these, while valved did not look whether it was idle
    freed_ns: int = 0  # between holds
    judged_ns: int = 0  # held_ns at the breaker's last judgement
    woken_epoch: int | None = None  # of the last wake
    epoch: int = -1  # of the last preemption: k GPUs bring k stamps of one epoch
    epoch_delay_ns: int = 0
    latency: Histogram = field(default_factory=Histogram)
    tallies: dict[ClientId, RequestTally] = field(default_factory=dict)
    left: dict[tuple[ProcessId, Role], RequestTally] = field(default_factory=dict)  # they may come back and count on
    past_requests: RequestTally = field(default_factory=RequestTally)  # what a predecessor had counted
    open_requests: int = 0
    leaked: int = 0  # of them, that are not believed any more
    said: Said = SILENT  # its launcher's words on granted time

    def __post_init__(self) -> None:
        self.seen_ns = self.read_state.seen_ns

    def begin_hold(self, at_ns: int) -> None:
        if not self.holding and at_ns > self.since_ns:
            self.freed_ns += at_ns - self.since_ns
        self.holding = True
        self.since_ns = at_ns
        self.seen_ns = max(self.seen_ns, at_ns)  # quiet time does not age the mark

    def watch(self, on: bool, now_ns: int) -> None:
        """From now on the native side looks whether it is idle, or does so no more."""
        self.unseen_ns = self._unseen_ns(now_ns)
        self.watching, self.watch_since_ns = on, now_ns

    def end_hold(self, at_ns: int) -> None:
        if not self.watching:
            self.unseen_ns = self._unseen_ns(at_ns)
        if at_ns > self.since_ns:
            self.held_ns += at_ns - self.since_ns
        self.holding = False
        self.since_ns = at_ns
        if at_ns > self.seen_ns:
            self.aged_ns += at_ns - self.seen_ns
            self.seen_ns = at_ns

    def hold_ns(self, now_ns: int) -> int:
        """Time in which it held its GPUs, the hold under way included."""
        return self.held_ns + (max(0, now_ns - self.since_ns) if self.holding else 0)

    def busy_ns(self, now_ns: int) -> int:
        """Of this, the time in which it would have left them had it been idle. In the rest valved did not look: without
        offline work, say, or while it was paused."""
        return max(0, self.hold_ns(now_ns) - self._unseen_ns(now_ns))

    def _unseen_ns(self, now_ns: int) -> int:
        is_unseen = self.holding and not self.watching
        return self.unseen_ns + (max(0, now_ns - max(self.since_ns, self.watch_since_ns)) if is_unseen else 0)

    def idle_ns(self, now_ns: int) -> int:
        """Time in which it left its GPUs to others."""
        return self.freed_ns + (0 if self.holding else max(0, now_ns - self.since_ns))

    @property
    def cooldown_state(self) -> CooldownState:
        """As step_cooldown ages it without gaps. Each edge moves two numbers, and few ask."""
        return replace(self.read_state, age_ns=self.read_state.age_ns + self.aged_ns, seen_ns=self.seen_ns)

    @cooldown_state.setter
    def cooldown_state(self, state: CooldownState) -> None:
        self.read_state, self.aged_ns, self.seen_ns = state, 0, state.seen_ns

    def count_preemption(self, epoch: int, delay_ns: int) -> Tally:
        """Book one GPU's stop: one preemption over all GPUs of the service, as slow as the slowest of them.

        Returns what the breaker has not judged yet: this, and the holds since the last preemption.
        """
        first = epoch != self.epoch
        added_ns = delay_ns if first else max(0, delay_ns - self.epoch_delay_ns)
        self.epoch_delay_ns = delay_ns if first else max(delay_ns, self.epoch_delay_ns)
        self.epoch = epoch
        self.preemptions += first
        self.delay_ns += added_ns
        held_ns, self.judged_ns = self.held_ns - self.judged_ns, self.held_ns
        return Tally(delay_ns=added_ns, held_ns=held_ns, gates=int(first))

    def observe(self, looks: Sequence[tuple[ClientEntry, ClientView]], now_ns: int, settings: CooldownSettings) -> None:
        """Take in what the clients' regions say: requests, and gaps to learn the cooldown from."""
        hints: list[int] = []
        gaps: list[tuple[int, int]] = []
        for client, view in looks:
            if is_hinting(client, view):
                self.hear(client, view)
                hints.append(view.open_requests)
            if client.role is not Role.HOOK:
                gaps.extend((gap.end_ns, gap.gap_ns) for gap in view.gaps)
        open_before, self.open_requests = self.open_requests, sum(hints)
        counted = not hints or (open_before > 0 and self.open_requests > 0)
        since_ns = max(self.since_ns, self.watch_since_ns)
        inside = gaps_inside_hold(gaps, since_ns, now_ns) if counted and gaps and self.holding else ()
        if inside or now_ns - self.read_ns > AGE_NS:
            self.read_ns = now_ns
            observation = CooldownObservation(gaps_ns=inside)
            self.cooldown_state, self.cooldown = step_cooldown(self.cooldown_state, observation, now_ns, settings)

    def hear(self, client: ClientEntry, view: ClientView) -> None:
        """What an engine counts: requests."""
        self.tally_of(client).report(view.requests_started, view.requests_ended)

    def hit_requests(
        self, clients: Iterable[ClientEntry], view_of: Callable[[ClientId], ClientView], stamp: Stamp | None
    ) -> None:
        """Every request open at this preemption was hit by it, also the first one of which an engine will ever tell."""
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

    def tally_of(self, client: ClientEntry) -> RequestTally:
        tally = self.tallies.get(client.id)
        if tally is None:
            tally = self.left.pop((client.process, client.role), None) or RequestTally()
            self.tallies[client.id] = tally
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
