"""The node as others see it: one snapshot for the API and the metrics, and the answer to "why?"."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path

from valved.abi.link import Feature
from valved.clients.register import Register
from valved.gate.granting import Granting
from valved.gate.online import OnlineService, open_requests
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import ClientView, GatePort, GpuInfo
from valved.model.events import Event, EventKind
from valved.model.ids import ClientId, GpuIndex, Role, ServiceId
from valved.model.plain import plain
from valved.model.states import (
    ClientState,
    CountersState,
    DriverState,
    Explanation,
    GpuState,
    GrantedState,
    MemoryState,
    NodeState,
    ServiceState,
)
from valved.node.brake import Brake
from valved.node.bystanders import Bystanders
from valved.node.kv import Kv
from valved.policy.stopping import Work
from valved.policy.wake import WakeAction, WakeReason
from valved.state.journal import Journal
from valved.state.registry import (
    BRAKE_SERVICE,
    COME_BACK_SERVICE,
    DEAF_SERVICE,
    GUARD_SERVICE,
    MEMORY_SERVICE,
    Books,
    ClientEntry,
    ServiceEntry,
)

EXPLAINED = 50  # events in one explanation
STANDING = {
    BRAKE_SERVICE: "the pause",
    GUARD_SERVICE: "the guard",
    MEMORY_SERVICE: "a move of memory",
    COME_BACK_SERVICE: "the start of valved (until online processes are back)",
    DEAF_SERVICE: "valved's want of descriptors or memory",
}
WORDS = {
    WakeReason.COOLING: "cooling down",
    WakeReason.REFUSED_LATELY: "busy: a launch came just before the wake",
    WakeReason.BUSY: "busy: its GPU work is not proven done",
    WakeReason.OPEN_REQUESTS: "busy: open requests",
    WakeReason.WATCHER_DEAD: "held: its watcher is silent, so the GPU is not proven idle",
    WakeReason.NO_OFFLINE: "alone: there is no offline work on its GPUs",
    WakeReason.BRAKED: "held: offline work may not run here",
}
WORK = {
    Work.RUNNING: "offline work may run beside idle services",
    Work.HELD: "offline work is stopped on every GPU",
    Work.LEAVING: "offline work stays stopped until it ends",
    Work.EMPTY: "offline work is refused",
}


def told_work(brake: Brake) -> str:
    is_blind = brake.work is Work.RUNNING and brake.refusal
    return f"{WORK[Work.EMPTY]}: {brake.refusal}" if is_blind else WORK[brake.work]


MOST_HOLDERS = 3  # each of a hundred jobs would name each of a hundred services


def is_telling(event: Event) -> bool:
    """Whether an event explains anything: a process brings ten channels and more, which drown the decisions."""
    return event.kind not in (EventKind.CHANNEL_ADDED, EventKind.CHANNEL_GONE)


def named(what: str, numbers: Sequence[int | str]) -> str:
    return f"{what} {', '.join(map(str, numbers))}" if numbers else f"no {what} yet"


def granted_facts(granted: GrantedState) -> list[str]:
    refused = ", ".join(f"{reason} {times}" for reason, times in sorted(granted.refused.items()))
    return list(filter(None, [granted.words, granted.worth, f"pauses refused: {refused}" if refused else ""]))


@dataclass(eq=False, repr=False)
class Reporter:
    _gate: GatePort
    _books: Books
    _gating: GateService
    _register: Register
    _brake: Brake
    _journal: Journal
    _clock: Clock
    _: KW_ONLY
    version: str
    run_dir: Path
    lease_ns: int
    driver: DriverState
    bystanders: Bystanders | None = None
    kv: Kv | None = None
    granting: Granting | None = None

    def status(self) -> NodeState:
        self._gating.drain()
        now_ns = self._clock.now_ns()
        brake, counters = self._brake, self._gating.counters
        views = {client: self._gate.view(client) for client in self._books.clients}
        return NodeState(
            version=self.version,
            pid=os.getpid(),
            monotonic_ns=now_ns,
            mode=brake.mode,
            paused=brake.is_paused,
            paused_by=brake.paused_by,
            draining=brake.is_draining,
            driver=replace(self.driver, device_only_lock=self._gating.edges.locks.is_per_gpu),
            gpus=tuple(self._gpu(info, now_ns) for info in self._gate.gpus()),
            services=tuple(self._service(entry, now_ns, views.__getitem__) for entry in self._books.services.values()),
            clients=tuple(self._client(entry, now_ns, views[entry.id]) for entry in self._books.clients.values()),
            counters=CountersState(**asdict(counters)),
            lease_ns=self.lease_ns,
            run_dir=plain(str(self.run_dir)),
            memory=self.kv.state() if self.kv is not None else MemoryState(),
            offline_pids=tuple(sorted(process.pid for process in brake.leaving.present())),
            leavers=brake.leaving.leavers(),
        )

    def _gpu(self, info: GpuInfo, now_ns: int) -> GpuState:
        account = self._gating.gpus[info.index]
        account.advance(now_ns)
        reach, reason = self._gate.channels.reach(info.index)
        kv, bystanders = self.kv, self.bystanders
        return GpuState(
            index=info.index,
            uuid=info.uuid_text,
            name=info.name,
            gated=self._gate.is_gated(info.index),
            channels=account.channels,
            reach=reach.value,
            reach_reason=reason,
            holders=len(account.holders),
            gated_ns=account.gated_ns,
            harvest_ns=account.harvest_ns,
            preemptions=account.gates,
            preempt_latency=account.latency.state(),
            total_bytes=info.total_bytes,
            used_bytes=kv.supply.used_bytes(info.uuid) if kv is not None else 0,
            kept_bytes=kv.supply.kept_bytes(info.index) if kv is not None else 0,
            guarded_because=bystanders.reason(info.index) if bystanders is not None else "",
        )

    def _service(self, entry: ServiceEntry, now_ns: int, view_of: Callable[[ClientId], ClientView]) -> ServiceState:
        online = self._gating.online.get(entry.id)
        requests, most, histogram = online.request_figures() if online is not None else (0, 0, [])
        return ServiceState(
            id=entry.id,
            name=entry.name,
            role=entry.role,
            gpus=tuple(sorted(entry.gpus)),
            busy=online is not None and online.holding,
            since_ns=online.book.since_ns if online is not None else 0,
            cooldown_ns=online.cooldown.cooldown_ns if online is not None else 0,
            hinted=online is not None and online.is_hinted,
            open_requests=open_requests(self._books.clients_of(entry.id), view_of) if online is not None else 0,
            preemptions=online.book.preemptions if online is not None else 0,
            requests=requests,
            max_preemptions_per_request=most,
            delay_ns=online.book.delay_ns if online is not None else 0,
            harvest_ns=self._register.channels.harvest.harvest_ns(entry.id, now_ns),
            useful_tokens=self._register.tokens(entry.id),
            pids=tuple(sorted({client.process.pid for client in self._books.clients_of(entry.id)})),
            state=self._online_words(online, now_ns) if online is not None else self._offline_words(entry),
            preemptions_per_request=tuple(histogram),
            busy_ns=online.busy_ns(now_ns) if online is not None else 0,
            idle_ns=online.idle_ns(now_ns) if online is not None else 0,
            granted=self.granting.state(entry.id) if self.granting is not None else GrantedState(),
        )

    def _online_words(self, online: OnlineService, now_ns: int) -> str:
        if not online.holding:
            return "idle: offline work may run" if not self._brake.switches.is_closed else "idle"
        if online.away:
            return f"held: process {min(process.pid for process in online.away)} has not come back since the restart"
        if now_ns < online.breaker.open_until_ns:
            rest_s = (online.breaker.open_until_ns - now_ns) // 1_000_000_000
            return f"held: delayed beyond its budget, so no offline work runs for another {rest_s} s"
        decision = online.decision
        if decision is None or decision.action is WakeAction.WAKE:
            return "busy: just begun"
        if decision.reason is WakeReason.NO_OFFLINE and not online.gpus:
            return "waiting: it uses no GPU yet"
        return WORDS[decision.reason]

    def _offline_words(self, entry: ServiceEntry) -> str:
        if self._brake.switches.must_leave:
            return f"leaving: {self._brake.refusal}"
        if not entry.clients:
            return "waiting: not connected yet"
        if not entry.compute_on:
            return "waiting: no compute channel yet"
        gated = [gpu for gpu in sorted(entry.compute_on) if self._gate.is_gated(gpu)]
        if not gated:
            return "running"
        holders = set().union(*(self._gating.gpus[gpu].holders for gpu in gated))
        first = sorted(holders, key=lambda holder: (holder not in STANDING, holder))  # the brake hides behind nobody
        names = [self._name(ServiceId(holder)) for holder in first[:MOST_HOLDERS]] or [STANDING[BRAKE_SERVICE]]
        *others, last = [*names, f"{len(first) - MOST_HOLDERS} more"] if first[MOST_HOLDERS:] else names
        who = f"{', '.join(others)} and {last} hold" if others else f"{last} holds"
        return f"stopped: {who} GPU {', '.join(map(str, gated))}"

    def _name(self, service: ServiceId) -> str:
        if service in STANDING:
            return STANDING[service]
        entry = self._books.services.get(service)
        return entry.name if entry is not None else f"service {service}"

    def _shim_notes(self, entry: ClientEntry) -> list[str]:
        if self.kv is None or entry.role is not Role.OFFLINE or entry.features & Feature.KEEP:
            return []
        return ["its shim is older: it may take memory that is kept for online services; start the job anew"]

    def _client(self, entry: ClientEntry, now_ns: int, view: ClientView) -> ClientState:
        online = self._gating.online.get(entry.service)
        alive = True
        if entry.role is Role.ONLINE and online is not None and online.book.watching:
            beat_ns = max(view.watcher_ns, online.book.watch_since_ns)
            alive = now_ns - beat_ns <= self._gating.settings.wake.watcher_lease_ns
        return ClientState(
            id=entry.id,
            pid=entry.process.pid,
            comm=entry.comm,
            role=entry.role,
            service=entry.service,
            abi=entry.abi,
            build=entry.build,
            channels=len(entry.channels),
            notes=(*entry.notes, *self._shim_notes(entry)),
            watcher_alive=alive,
            submitted=view.submitted,
            busy=not view.is_idle,
        )

    # Why?

    def explain_gpu(self, gpu: int) -> Explanation | None:
        account = self._gating.gpus.get(GpuIndex(gpu))
        if account is None:
            return None
        status = self.status()
        state = next(item for item in status.gpus if item.index == gpu)
        if not state.channels:
            summary = f"GPU {gpu}: no offline work here"
        elif state.gated:
            summary = f"GPU {gpu}: offline work is stopped"
        else:
            summary = f"GPU {gpu}: offline work may run"
        here = [service for service in status.services if gpu in service.gpus]
        facts = [f"{service.role.name.lower()} {service.id} {service.name}: {service.state}" for service in here]
        facts.append(
            f"channels are reached by {state.reach}" + (f" ({state.reach_reason})" if state.reach_reason else "")
        )
        if state.guarded_because:
            facts.insert(0, f"not harvested: {state.guarded_because}")
        return Explanation(
            summary=summary,
            facts=(*facts, *self._brake_facts()),
            decisions=tuple(self._journal.recent(lambda event: is_telling(event) and gpu in event.gpus, EXPLAINED)),
        )

    def explain_service(self, service: int) -> Explanation | None:
        entry = self._books.services.get(ServiceId(service))
        if entry is None:
            return self._explain_ended(service)
        self._gating.drain()
        state = self._service(entry, self._clock.now_ns(), self._gate.view)
        claimed = [
            f"{claim.root.pid}, not connected" for claim in self._books.claims.values() if claim.service == service
        ]
        processes = named("process", state.pids or claimed)
        facts = [f"{named('GPU', state.gpus)}, {processes}", *granted_facts(state.granted)]
        if entry.role is Role.OFFLINE:
            facts.append(f"was let run for {state.harvest_ns / 1e9:.3f} s in all")
        online = self._gating.online.get(entry.id)
        if online is not None:
            cooldown, delay_ms = online.cooldown, state.delay_ns / 1e6
            facts.append(f"preempted offline work {state.preemptions} times, delayed by {delay_ms:.3f} ms in all")
            facts.append(
                f"cooldown {cooldown.cooldown_ns / 1e6:.1f} ms, from a largest gap of {cooldown.gap_ns / 1e6:.1f} ms "
                f"({cooldown.reason})"
            )
        return Explanation(
            summary=f"{entry.role.name.lower()} service {entry.id} {entry.name}: {state.state}",
            facts=(*facts, *self._brake_facts()),
            decisions=self._decisions_of(service),
        )

    def _explain_ended(self, service: int) -> Explanation | None:
        """As far as the journal knows."""
        decisions = self._decisions_of(service)
        if not (ends := [event for event in decisions if event.kind is EventKind.ENDED]):
            return None
        ago_s = (self._clock.now_ns() - ends[-1].t_ns) / 1e9
        summary = f"{ends[-1].reason} service {service} {ends[-1].detail['name']}: ended {ago_s:.0f} s ago"
        return Explanation(summary=summary, facts=self._brake_facts(), decisions=decisions)

    def _decisions_of(self, service: int) -> tuple[Event, ...]:
        return tuple(self._journal.recent(lambda event: is_telling(event) and event.service == service, EXPLAINED))

    def explain_reclaim(self, number: int) -> Explanation | None:
        return self.kv.report.explain_reclaim(number) if self.kv is not None else None

    def explain_pid(self, pid: int) -> Explanation | None:
        clients = [entry for entry in self._books.clients.values() if entry.process.pid == pid]
        if clients:
            return self.explain_service(clients[0].service)

        past = self._journal.recent(lambda event: event.detail.get("pid") == pid, EXPLAINED)
        is_told = past and past[-1].kind is EventKind.REFUSED
        why = past[-1].reason if is_told else self._register.admission.why_untold(pid)
        if not past and not why:
            return None
        summary = f"process {pid}: {'refused: ' + why if why else 'not connected'}"
        return Explanation(summary=summary, facts=self._brake_facts(), decisions=tuple(past))

    def _brake_facts(self) -> tuple[str, ...]:
        brake = self._brake
        words = [f"mode {brake.mode.value}"]
        if brake.is_paused:
            words.append(f"paused by {brake.paused_by}")
        if brake.is_draining:
            words.append("draining")
        words.append(told_work(brake))
        return (", ".join(words),)
