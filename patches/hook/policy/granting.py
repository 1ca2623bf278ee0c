"""Whether offline work may run between two steps of a service that is ahead of its stated target, and how long.

    step_hi = predicted step + p95 error + p95 host gap + what a grant adds to the next step
    L       = min( least credit - step_hi - reserve,  oldest stream's last token + gap - now - step_hi )
    grant L if L >= max(5 C, min(20 C, what gap leaves)),   C = all that one grant costs

A decision that must refuse for want of credit compares two numbers; the rest is computed when credit has been earned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from .clients import ClientKind, Clients, ClientSettings
from .credits import PACE, Credits, Served
from .misses import MissSettings, MissStop, Needs, TimeReserve
from .recent import Recent
from .step_model import StepModel
from .worth import busy_share, grants_per_ms, worth

LEAST_COSTS, MOST_COSTS = 5.0, 20.0
"""A grant lasts five times its cost at least; at twenty times more length saves next to nothing."""
KV_SHARE = 0.25
SEQS_SHARE = 0.5
TTFT_SHARE, TTFT_SHARE_FAR, FAR = 0.05, 0.10, 3.3
"""What ending a grant may add to the P99 of the time to the first token: more for targets beyond three times the
natural TPOT, and a tenth above that, for a trial tells the natural TPOT no better."""
KNOWN_STEPS, LEARN_EVERY = 512, 8
"""So many steps are all learnt from, later ones by sample: a known step teaches little."""
REFRESH = 16
"""Decisions after which the credit that a grant needs is computed anew without any event."""


class GrantReason(Enum):
    """Why a decision fell as it did."""

    GRANTED = "granted"
    NO_REQUESTS = "no request decodes: idle time is given by the gate, not by a grant"
    SHORT = "not enough credit yet"
    LATE = "a token is late"
    PREFILL = "a prompt is unfinished"
    WAITING = "a request waits"
    RECLAIM = "memory is being reclaimed"
    KV = "the KV cache is in use beyond its bound"
    SEQUENCES = "more than half of max_num_seqs runs"
    OTHERS = "another holder of a GPU of the domain is busy"
    CLIENTS = "closed-loop or batch clients: latency is throughput"
    CHUNK = "a chunk step is longer than the stated gap"
    GAP = "the stated gap leaves no room for a grant"
    MISSES = "the target is missed too often, or not yet shown to be kept"
    TTFT = "ending a grant would delay a first token too much"
    WORTH = "it would gain too little"
    RATE = "too many grants a second"
    UNKNOWN_STEP = "no step was measured yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the owner of the service consented to."""

    tpot_ms: float
    gap_ms: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.tpot_ms < float("inf") or not 0 < self.gap_ms < float("inf"):
            raise ValueError(f"tpot and gap are times above 0 ms, not {self.tpot_ms} and {self.gap_ms}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantCost:
    """What one grant costs, measured, in ms: twice offline's time, twice the service's."""

    stop_ms: float
    wake_ms: float
    bubble_ms: float
    damage_ms: float

    @property
    def total_ms(self) -> float:
        return self.stop_ms + self.wake_ms + self.bubble_ms + self.damage_ms

    @property
    def after_ms(self) -> float:
        """What the step after a grant is late by."""
        return self.bubble_ms + self.damage_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSettings:
    grants_per_s: float = 20.0
    """The gate rung's budget; the timeslice rung makes no driver call and has none."""
    longest_ms: float = 1000.0
    """A grant to requests that are delivered whole is bound by no gap."""
    least_worth: float = 0.01
    """A hundredth of a GPU: below it nobody is asked."""
    load_ms: float = 300_000.0
    """The time over which load is averaged."""
    misses: MissSettings = field(default_factory=MissSettings)
    clients: ClientSettings = field(default_factory=ClientSettings)


@dataclass(slots=True, kw_only=True)
class EngineFacts:
    """What the engine is doing; the hook writes it in place, so that a step makes no object."""

    running: int = 0
    """Requests that decode."""
    context_tokens: int = 0
    prefilling: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_pool: int = 0
    kv_mapped: int = 0
    """Of the pool, what has memory: a grant must never cause a reclaim."""
    max_num_seqs: int = 0
    reclaim_pending: bool = False
    others_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    grant_ms: float
    reason: GrantReason


REFUSALS = {reason: Decision(grant_ms=0.0, reason=reason) for reason in GrantReason}
SHORT, LATE = REFUSALS[GrantReason.SHORT], REFUSALS[GrantReason.LATE]


class GrantPolicy:
    """One service's granting. The hook tells it every event with its time, and asks once a step."""

    def __init__(
        self, target: Target, cost: GrantCost, model: StepModel | None = None, settings: GrantSettings | None = None
    ) -> None:
        self.target = target
        self.cost = cost
        self.settings = settings or GrantSettings()
        self.model = model or StepModel()
        self.credits = Credits(target.tpot_ms)
        self.reserve = TimeReserve(self.settings.misses)
        self.needs = Needs(PACE * target.tpot_ms)
        self.stop = MissStop(self.settings.misses)
        self.clients = Clients(self.settings.clients)
        self.load = ServiceLoad(self.settings.load_ms)
        self._gaps = Recent(0.95)
        self._chunks = Recent(0.95, size=256, every=16)
        self._burst_ms = 0.0
        self._needed_ms = float("inf")
        self._step_hi_ms = float("inf")
        self._fresh = 0
        self._granted_ms = float("-inf")
        self._arrived: dict[int, float] = {}
        self._firsts = Recent(0.99, every=16)
        self._steps = 0
        self._is_worth = True

    def arrived(self, request: int, now_ms: float) -> None:
        self._arrived[request] = now_ms
        self.clients.arrived(now_ms)
        self.load.arrived(now_ms)
        self._fresh = 0

    def first_token(self, request: int, now_ms: float, *, streamed: bool = True) -> None:
        arrived_ms = self._arrived.pop(request, None)
        if arrived_ms is not None:
            self._firsts.add(now_ms - arrived_ms)
        self.credits.begin(request, now_ms, streamed=streamed)
        self.needs.begin(request)
        self._fresh = 0

    def delivered(self, now_ms: float, skipped: Iterable[int] = (), extra: Mapping[int, int] | None = None) -> None:
        """One step's output was delivered."""
        self.credits.delivered(now_ms, skipped, extra)

    def finished(self, request: int, now_ms: float) -> Served | None:
        served, need_ms = self.credits.end(request, now_ms), self.needs.end(request)
        self.clients.finished(now_ms)
        self._fresh = 0
        if served is not None:
            if not self.stop.is_open:
                self.load.alone(served.tpot_ms)
            self.load.served(served.tokens)
            self._learn_from(served, need_ms)
            self._is_worth = self.expected_worth() >= self.settings.least_worth
        return served

    def _learn_from(self, served: Served, need_ms: float | None) -> None:
        by_grant = served.missed and need_ms is not None
        if need_ms is not None:
            self.reserve.needed(need_ms, is_open=self.stop.is_open)
        self.reserve.finished(by_grant)
        earned_ms = self.load.tokens * (PACE * self.target.tpot_ms - self.load.natural_ms)
        is_heavy = self.reserve.needed_ms > self.settings.misses.heavy * earned_ms
        self.stop.finished(served.missed, by_grant=by_grant, is_heavy=is_heavy)

    def aborted(self, request: int, now_ms: float) -> None:
        """Its client left: it teaches nothing."""
        self._arrived.pop(request, None)
        self.credits.drop(request)
        self.needs.drop(request)
        self.clients.finished(now_ms)
        self._fresh = 0

    def stepped(
        self, batch: int, context: int, ms: float, gap_ms: float, *, prefill: bool = False, granted: bool = False
    ) -> None:
        """A step took `ms` after a host gap of `gap_ms` (without any pause). `granted`: the first after a grant, or
        beside offline work; it teaches nothing about other steps, and what a grant costs it is not its own.
        """
        self.needs.stepped(ms + gap_ms - (self.cost.after_ms if granted else 0.0))
        if prefill:
            self._chunks.add(ms)
            if batch:
                self._burst_ms += ms
            return
        if self._burst_ms:
            self.reserve.burst(self._burst_ms)
            self._burst_ms = 0.0
        if granted:
            return
        self._steps += 1
        if self._steps <= KNOWN_STEPS or self._steps % LEARN_EVERY == 0:
            self._gaps.add(gap_ms)
            self.model.observe(batch, context, ms)
            self.load.stepped(ms, gap_ms)

    def decide(self, now_ms: float, facts: EngineFacts) -> Decision:
        """Called when a step's output has been delivered and nothing is in flight."""
        credit_ms = self.credits.least_due_ms() - now_ms
        if self._fresh and credit_ms < self._needed_ms:
            self._fresh -= 1
            return SHORT if credit_ms >= self._step_hi_ms else LATE
        refused = self._refused_by_facts(facts)
        if refused is None:
            refused = self._refused_by_service(now_ms, facts)
        return REFUSALS[refused] if refused is not None else self._measured_out(now_ms, credit_ms)

    def _refused_by_facts(self, facts: EngineFacts) -> GrantReason | None:
        if facts.running <= 0 or not len(self.credits):
            return GrantReason.NO_REQUESTS
        if facts.prefilling:
            return GrantReason.PREFILL
        if facts.waiting:
            return GrantReason.WAITING
        if facts.reclaim_pending:
            return GrantReason.RECLAIM
        if facts.kv_used > min(KV_SHARE * facts.kv_pool, facts.kv_mapped):
            return GrantReason.KV
        if facts.running > SEQS_SHARE * facts.max_num_seqs:
            return GrantReason.SEQUENCES
        return GrantReason.OTHERS if facts.others_busy else None

    def _refused_by_service(self, now_ms: float, facts: EngineFacts) -> GrantReason | None:
        if not self.stop.is_open:
            return GrantReason.MISSES
        if self.clients.kind is not ClientKind.OPEN:
            return GrantReason.CLIENTS
        if self._chunks.value > self.target.gap_ms:
            return GrantReason.CHUNK
        if self._firsts.count and self.cost.stop_ms + self.cost.after_ms > self._ttft_bound_ms():
            return GrantReason.TTFT
        if not self._is_worth:
            return GrantReason.WORTH
        if now_ms - self._granted_ms < 1e3 / self.settings.grants_per_s:
            return GrantReason.RATE
        predicted = self.model.predict(facts.running, facts.context_tokens)
        self._step_hi_ms = predicted.ms + self.model.late_ms + self._gaps.value + self.cost.after_ms
        return GrantReason.UNKNOWN_STEP if predicted.ms == float("inf") else None

    def _measured_out(self, now_ms: float, credit_ms: float) -> Decision:
        step_hi, cost = self._step_hi_ms, self.cost.total_ms
        room_ms = min(self.credits.oldest_token_ms() + self.target.gap_ms - now_ms - step_hi, self.settings.longest_ms)
        least = max(LEAST_COSTS * cost, min(MOST_COSTS * cost, room_ms))
        self._needed_ms = least + step_hi + self.reserve.ms
        self._fresh = REFRESH
        if credit_ms < step_hi:
            return LATE
        if room_ms < least:
            return REFUSALS[GrantReason.GAP]
        length = min(credit_ms - step_hi - self.reserve.ms, room_ms)
        if length < least:
            return SHORT
        self._granted_ms = now_ms
        return Decision(grant_ms=length, reason=GrantReason.GRANTED)

    def _ttft_bound_ms(self) -> float:
        is_far = self.target.tpot_ms > FAR * self.load.natural_ms
        return (TTFT_SHARE_FAR if is_far else TTFT_SHARE) * self._firsts.value

    def expected_worth(self) -> float:
        """The share of a GPU that granting would give at the measured load; shown before anyone consents."""
        load, cost = self.load, self.cost.total_ms
        natural = load.interval_ms
        room = self.target.gap_ms - natural - self.cost.after_ms
        if not load.is_known:
            return float("inf")
        if room < LEAST_COSTS * cost:
            return 0.0
        # TimeReserve and half a threshold are earned by each request and never spent.
        length = max(LEAST_COSTS * cost, min(MOST_COSTS * cost, room))
        unspent = (self.reserve.ms + length / 2) / max(load.tokens, 1.0)
        paced = max(natural, PACE * self.target.tpot_ms - unspent)
        busy = busy_share(paced, load.requests_per_ms, load.tokens)
        return worth(
            fixed_ms=self.model.fixed_ms + load.gap_ms,
            natural_ms=natural,
            paced_ms=paced,
            requests_per_ms=load.requests_per_ms,
            tokens=load.tokens,
            cost_ms=cost,
            grants_a_ms=grants_per_ms(natural, paced, length, busy),
        )


class ServiceLoad:
    """How busy the service is: requests, tokens, step and host gap, as decaying means."""

    LEAST = 32

    def __init__(self, over_ms: float) -> None:
        self._over_ms = over_ms
        self._weight = 0.0
        self._span_ms = 0.0
        self._last_ms = float("nan")
        self._requests = 0
        self.tokens = 0.0
        self.step_ms = 0.0
        self.gap_ms = 0.0
        self._steps = 0
        self._alone = 0
        self._alone_ms = 0.0

    def arrived(self, now_ms: float) -> None:
        if self._last_ms == self._last_ms:
            passed = max(0.0, now_ms - self._last_ms)
            keep = 0.5 ** (passed / self._over_ms)
            self._weight = self._weight * keep + 1.0
            self._span_ms = self._span_ms * keep + passed
        self._last_ms = now_ms

    def served(self, tokens: int) -> None:
        self._requests += 1
        self.tokens += max(0.01, 1.0 / self._requests) * (tokens - self.tokens)

    def alone(self, tpot_ms: float) -> None:
        """A request was served without any grant."""
        self._alone += 1
        self._alone_ms += max(0.01, 1.0 / self._alone) * (tpot_ms - self._alone_ms)

    def stepped(self, ms: float, gap_ms: float) -> None:
        self._steps += 1
        weight = max(0.01, 1.0 / self._steps)
        self.step_ms += weight * (ms - self.step_ms)
        self.gap_ms += weight * (gap_ms - self.gap_ms)

    @property
    def is_known(self) -> bool:
        return self._requests >= self.LEAST and self._span_ms > 0

    @property
    def requests_per_ms(self) -> float:
        return self._weight / self._span_ms if self._span_ms > 0 else 0.0

    @property
    def interval_ms(self) -> float:
        """From token to token when nothing is granted and no prompt comes between."""
        return self.step_ms + self.gap_ms

    @property
    def natural_ms(self) -> float:
        """TPOT when nothing is granted, with the prompts that come between."""
        return max(self.interval_ms, self._alone_ms)
