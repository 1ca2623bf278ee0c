"""once-per-request: valved's own gate service on virtual time, 10,000 requests of a bursty service, truth counted here.

The engine is a loop of steps over a batch of open requests, with host gaps between steps and, now and then, a host
stall (facts of the evaluation: gaps are lognormal, median 0.5 ms, p99 5 ms, at most 20 ms). Every request's
preemptions are counted exactly at the moment of the ring, and compared with what valved itself counts.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from valve_tools.bench.row import Row, row_of
from valve_tools.bench.waking import ClientPages, PolicyWaker

from valved.abi.link import Feature
from valved.gate.permits import GateSettings
from valved.gate.wake import GateService
from valved.machine.ports import ClientView, Gap, GpuInfo, WakeLook, WakeOutcome, WakeRule
from valved.machine.stamps import Stamp, StampKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, ProcessId, Role, ServiceId
from valved.policy.breaker import BreakerSettings
from valved.policy.cooldown import MS, SECOND, CooldownSettings
from valved.policy.wake import WakeSettings
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry
from valved.state.stats import NodeCounters

REQUESTS = 10_000
GPU = GpuIndex(0)
STOP_NS = 400_000  # launch to channels off
PROOF_NS = 600_000  # quiet time and probe of the watcher
STEP_NS = 8 * MS  # a decode step of an 8B model on one H100
PREFILL_NS = 40 * MS
BATCH = 8
STALL_SHARE = 2e-4  # of gaps: a garbage collection, a reload of weights
STALL_NS = 700 * MS
NOTHING = ClientView.untouched(is_filled=True)


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    def __init__(self) -> None:
        self._now_ns = SECOND
        self._queue: list[tuple[int, int, Timer]] = []
        self._count = 0

    def now_ns(self) -> int:
        return self._now_ns

    def call_at_ns(self, when_ns: int, call: Callable[[], None]) -> Timer:
        self._count += 1
        timer = Timer(call)
        heapq.heappush(self._queue, (when_ns, self._count, timer))
        return timer

    def run_to(self, until_ns: int) -> None:
        while self._queue and self._queue[0][0] <= until_ns:
            when_ns, _, timer = heapq.heappop(self._queue)
            self._now_ns = max(self._now_ns, when_ns)
            if timer.call is not None:
                timer.call()
        self._now_ns = max(self._now_ns, until_ns)


@dataclass(slots=True)
class VirtualGate:
    """As much of a GatePort as one service with one launcher, one hook and one GPU needs."""

    clock: VirtualClock
    service: ServiceId
    launcher: ClientId
    hook: ClientId
    epoch: int = 0
    watch: bool = False
    has_hook: bool = False
    view_of: ClientView = NOTHING
    hint: ClientView = NOTHING
    stamps: list[Stamp] = field(default_factory=list)
    rang: Callable[[], None] = lambda: None
    tell: Callable[[], None] = lambda: None
    waker: PolicyWaker = field(init=False)

    def __post_init__(self) -> None:
        def ask() -> None:
            self._stamp(StampKind.LEARN, ClientId(0), 0, self.clock.now_ns())
            self.tell()

        self.waker = PolicyWaker(self.clock, self._shown, lambda: self.wake(self.service), ask)

    def _shown(self) -> Iterator[ClientPages]:
        now_ns = self.clock.now_ns()
        yield ClientPages(replace(self.view_of, watcher_ns=now_ns), is_launcher=True, is_hinting=False)
        if self.has_hook:
            yield ClientPages(replace(self.hint, hint_ns=now_ns), is_launcher=False, is_hinting=True)

    def permit(self, service: ServiceId, rule: WakeRule | None) -> None:
        del service
        self.waker.permit(rule)

    def look(self, service: ServiceId) -> WakeLook:
        del service
        return self.waker.look()

    def set_prompt(self, on: bool) -> None:
        """The bench drains at every launch."""

    def set_hints(self, client: ClientId) -> None:
        self.has_hook = client == self.hook

    def gpus(self) -> list[GpuInfo]:
        uuid = bytes(16)
        return [GpuInfo(index=GPU, minor=0, gpu_id=1, device_instance=0, uuid=uuid, name="virtual", total_bytes=0)]

    def launch(self) -> None:
        now_ns, view = self.clock.now_ns(), self.view_of
        if self.watch and view.is_idle and view.idle_ns:
            gap = Gap(end_ns=now_ns, gap_ns=now_ns - view.idle_ns)
            view = replace(view, gaps=(*view.gaps, gap)[-64:])
        self.view_of = replace(view, submitted=view.submitted + 1)
        if self.epoch % 2:
            self.epoch += 1
            self.waker.held(now_ns)
            self.rang()
            self._stamp(StampKind.GATE, self.launcher, now_ns, now_ns + STOP_NS)

    def prove(self, submitted: int) -> None:
        now_ns = self.clock.now_ns()
        self.view_of = replace(self.view_of, watcher_ns=now_ns)
        if self.view_of.submitted == submitted:
            self.view_of = replace(self.view_of, idle_submitted=submitted, idle_ns=now_ns)

    def put_service(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        del service, gpus  # one service, one GPU: held from birth

    def hold(self, service: ServiceId, reason: int) -> None:
        del service, reason
        if self.epoch % 2:
            self.epoch += 1
            self.waker.held(self.clock.now_ns())
            self._stamp(StampKind.GATE, ClientId(0), 0, self.clock.now_ns())

    def wake(self, service: ServiceId) -> WakeOutcome:
        del service
        if self.epoch % 2:
            return WakeOutcome.NOT_HOLDING
        if not self.view_of.is_idle:
            self._stamp(StampKind.WAKE_REFUSED, ClientId(0), 0, self.clock.now_ns())
            return WakeOutcome.REFUSED
        self.epoch += 1
        self.waker.opened()
        self._stamp(StampKind.WAKE, ClientId(0), 0, self.clock.now_ns())
        return WakeOutcome.WOKEN

    def view(self, client: ClientId, *, with_gaps: bool = False) -> ClientView:
        now_ns = self.clock.now_ns()
        if client == self.hook:
            return replace(self.hint, hint_ns=now_ns)
        view = replace(self.view_of, watcher_ns=now_ns)
        if with_gaps:
            self.view_of = replace(self.view_of, gaps=())
        return view

    def is_gated(self, gpu: GpuIndex) -> bool:
        del gpu
        return self.epoch % 2 == 0

    def set_watch(self, client: ClientId, on: bool) -> None:
        del client
        self.watch = on

    def drain_stamps(self) -> list[Stamp]:
        stamps, self.stamps = self.stamps, []
        return stamps

    def stamps_lost(self) -> int:
        return 0

    def _stamp(self, kind: StampKind, client: ClientId, launch_ns: int, done_ns: int) -> None:
        self.stamps.append(
            Stamp(
                code=kind,
                service=self.service,
                client=client,
                gpu=GPU,
                epoch=self.epoch,
                channels=8,
                status=self.waker.look().reason,
                launch_ns=launch_ns,
                seen_ns=launch_ns,
                ioctl_ns=launch_ns,
                done_ns=done_ns,
            )
        )


@dataclass(slots=True)
class Story:
    """The engine and its requests; `counts` is the truth."""

    is_hinted: bool
    stall_share: float
    seed: int = 11
    counts: list[int] = field(default_factory=list)  # preemptions of each request, by arrival
    outside: int = 0  # preemptions while no request was open
    tally: int = 0  # valved's own maximum
    cooldown_ms: float = 0.0
    harvest: float = 0.0

    def run(self) -> None:
        chance = random.Random(self.seed)
        clock, gating, gate = build(self.is_hinted)
        arrivals = bursty(chance, REQUESTS)
        waiting: list[tuple[int, int]] = []  # (request, tokens left)
        began_ns = clock.now_ns()

        def preempted() -> None:
            for request, _ in waiting:
                self.counts[request] += 1
            self.outside += not waiting

        gate.rang = preempted
        position = 0
        while position < len(arrivals) or waiting:
            if not waiting:
                clock.run_to(began_ns + arrivals[position])
            came = 0
            while position < len(arrivals) and began_ns + arrivals[position] <= clock.now_ns():
                waiting.append((position, 1 + min(200, int(chance.lognormvariate(2.5, 0.8)))))
                self.counts.append(0)
                position += 1
                came += 1
            self._tell(gate, position, waiting)
            self._step(clock, gate, gating, PREFILL_NS if came else STEP_NS)
            batch = [(request, left - 1) for request, left in waiting[:BATCH]]
            waiting[:] = [pair for pair in batch if pair[1]] + waiting[BATCH:]
            self._tell(gate, position, waiting)
            if waiting:
                clock.run_to(clock.now_ns() + self._gap_ns(chance))
        online = next(iter(gating.online.values()))
        clock.run_to(clock.now_ns() + SECOND)
        self.tally = online.request_figures()[1]
        self.cooldown_ms = online.cooldown.cooldown_ns / MS
        gating.gpus[GPU].advance(clock.now_ns())
        self.harvest = gating.gpus[GPU].harvest_ns / (clock.now_ns() - began_ns)

    def _step(self, clock: VirtualClock, gate: VirtualGate, gating: GateService, work_ns: int) -> None:
        gate.launch()
        gating.drain()
        clock.run_to(clock.now_ns() + work_ns)
        submitted = gate.view_of.submitted
        clock.call_at_ns(clock.now_ns() + PROOF_NS, lambda: gate.prove(submitted))

    def _tell(self, gate: VirtualGate, started: int, waiting: list[tuple[int, int]]) -> None:
        ended = started - len(waiting)
        gate.hint = replace(NOTHING, open_requests=len(waiting), requests_started=started, requests_ended=ended)

    def _gap_ns(self, chance: random.Random) -> int:
        if chance.random() < self.stall_share:
            return STALL_NS
        return min(20 * MS, int(0.5 * MS * math.exp(chance.gauss(0, 0.99))))


def bursty(chance: random.Random, count: int) -> list[int]:
    """Arrival times: calm at 0.5 a second, bursts at 20 a second, changing about every 10 s."""
    times: list[int] = []
    now_s, rate, until_s = 0.0, 0.5, 10.0
    while len(times) < count:
        now_s += chance.expovariate(rate)
        if now_s > until_s:
            rate = 20.0 if rate < 1 else 0.5
            until_s = now_s + chance.expovariate(0.1)
        times.append(int(now_s * SECOND))
    return times


def build(is_hinted: bool) -> tuple[VirtualClock, GateService, VirtualGate]:
    clock, books = VirtualClock(), Books()
    service = books.claim(ProcessId(pid=1, start_time=1), Role.ONLINE, "bursty").service
    launcher, hook = books.new_client_id(), books.new_client_id()
    gate = VirtualGate(clock, service, launcher, hook)
    # The bench judges the cooldown and hints: the breaker, which would end the harvest altogether, has no say here.
    settings = GateSettings(
        cooldown=CooldownSettings(), wake=WakeSettings(), breaker=BreakerSettings(budget_share=float("inf"))
    )
    journal = Journal(clock, 16)
    gating = GateService(gate, books, journal, clock, settings, NodeCounters())  # type: ignore[arg-type]
    gate.tell = gating.drain
    gating.add_service(service, frozenset())
    members = [(launcher, Role.ONLINE, 0), *([(hook, Role.HOOK, Feature.HINT)] if is_hinted else [])]
    for client, role, features in members:
        process = ProcessId(pid=1, start_time=1)
        entry = ClientEntry(id=client, process=process, uid=0, role=role, service=service, features=int(features))
        books.add_client(entry)
        gating.client_joined(entry)
    channel = ChannelRef(gpu=GPU, h_client=1, h_channel=1, cid=1, h_tsg=1, engine=1, compute=True)
    books.put_channel(books.clients[launcher], channel)
    gating.set_gpus(service, books.services[service].gpus)
    gating.set_offline_channels(GPU, 8)
    return clock, gating, gate


def bench_once() -> Iterator[Row]:
    for metric, is_hinted, stalls, judged in (
        ("hinted", True, STALL_SHARE, "max"),
        ("unhinted", False, 0.0, "p99"),
        ("unhinted-with-stalls", False, STALL_SHARE, "p50"),
    ):
        story = Story(is_hinted, stalls)
        story.run()
        spread = dict(sorted(Counter(story.counts).items()))
        note = (
            f"requests by preemptions {spread}; valved says at most {story.tally}; cooldown at the end "
            f"{story.cooldown_ms:.0f} ms; offline ran {story.harvest:.0%} of the time"
        )
        yield row_of(
            "once-per-request", metric, "preemptions", [float(n) for n in story.counts], 1.0, judged=judged, note=note
        )
