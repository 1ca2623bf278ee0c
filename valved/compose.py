"""Puts the daemon together from its outside: read it to see what the daemon is made of. Main and tests both use it.

Each part gets the parts below it by its constructor. News go up by one listener a room (node/news.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from valved import paths
from valved.clients.consents import Consents, PodWords
from valved.clients.exits import Reactor
from valved.clients.identity import ClaimSource
from valved.clients.register import Register
from valved.clients.sharing import SharedWeights
from valved.clients.welcomes import Welcomes
from valved.config import Config
from valved.gate.ending import Endings
from valved.gate.freeze import Ladder
from valved.gate.granting import Granting
from valved.gate.permits import GateSettings
from valved.gate.slices import Slices
from valved.gate.wake import GateService
from valved.gate.worth import Worths
from valved.kv.lend import Shares
from valved.machine.clock import Clock
from valved.machine.ports import CloserPort, GatePort, OutsidePort, ProcessPort, PromptPort, ProverPort, WorkPort
from valved.machine.signals import SignalPort
from valved.model.events import EventKind
from valved.model.states import DriverState
from valved.node.api import Node
from valved.node.brake import Brake
from valved.node.bystanders import Bystanders
from valved.node.comeback import ComeBack
from valved.node.handover import Handover
from valved.node.kv import Kv, put_together
from valved.node.leaving import Leaving
from valved.node.news import ClientsNews, GateNews
from valved.node.status import Reporter
from valved.state.journal import Journal
from valved.state.lived import Lived
from valved.state.registry import Books
from valved.state.stats import NodeCounters
from valved.state.trace import LineFile


class Pods(ClaimSource, PodWords, Protocol):
    """What a Kubernetes node says of a peer's pod: its role, its trust domain, and what it consents to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """What the daemon needs of the machine."""

    gate: GatePort
    processes: ProcessPort
    clock: Clock
    reactor: Reactor
    prover: ProverPort
    uvm: OutsidePort
    work: WorkPort
    disk: WorkPort  # for what may wait for a disk: one job at a time, in order
    prompt: PromptPort
    event_disk: WorkPort  # of trace and audit: another disk, maybe
    closer: CloserPort  # of memory alone: descriptors of strangers may hang for ever, and memory must go back
    signals: SignalPort
    fd_limit: int
    driver: DriverState
    boot: str
    stop: Callable[[], None]
    version: str
    pods: Pods | None = None  # on a Kubernetes node
    shares: Shares | None = None  # there, too
    is_ours: Callable[[], bool] = lambda: True  # whether the run folder is still this daemon's
    kept_bytes: Callable[[], int | None] = lambda: (
        None
    )  # of valved's memory, by files that it gave away (machine/kept.py)
    files: Sequence[tuple[LineFile, bool]] = ()  # events are written there


@dataclass(slots=True, kw_only=True)
class Daemon:
    """Everything that lives as long as the process does."""

    gate: GatePort
    clock: Clock
    journal: Journal
    books: Books
    gating: GateService
    register: Register
    handover: Handover
    come_back: ComeBack
    brake: Brake
    leaving: Leaving
    ladder: Ladder
    endings: Endings
    node: Node
    reporter: Reporter
    consents: Consents
    granting: Granting
    sharing: SharedWeights
    worths: Worths
    kv: Kv | None
    bystanders: Bystanders | None

    def note(self, text: str) -> None:
        self.journal.emit(EventKind.NOTED, reason=text)


def build(config: Config, run_dir: Path, outer: Outer) -> Daemon:
    gate, processes, clock, driver = outer.gate, outer.processes, outer.clock, outer.driver
    journal = Journal(clock, config.ring_events, outer.files, outer.event_disk)
    books = Books()
    gating = GateService(gate, books, journal, clock, _settings(config), NodeCounters())
    rooms = (gate, books, gating, journal, clock, processes)
    slices = Slices(gate.granting, books, config.granted.slices(), gate.driver_version())
    limits = (outer.reactor, config.quota, config.link, outer.prover, Lived(run_dir, outer.prompt))
    register = Register(*rooms, *limits, outer.pods, _welcomes(outer), keeps_files=slices.is_on)
    endings = Endings(gating, journal, clock, processes, outer.signals, register.let_die)
    ladder = Ladder(books, gating, journal, clock, config.ladder, outer.signals, processes, endings)
    kv = _memory(config, outer, books, gating, register, ladder, journal)
    leaving = Leaving(config, books, register, journal, clock, processes, outer.signals, endings, ladder)
    brake = Brake(gating, register, ladder, leaving, journal, run_dir / paths.PAUSE_FILE, outer.prompt, driver, kv)
    handover = Handover(
        run_dir / paths.STATE_FILE,
        gate,
        books,
        gating,
        register,
        journal,
        clock,
        processes,
        outer.boot,
        ladder,
        outer.disk,
        outer.prompt,
        kv,
        is_ours=outer.is_ours,
    )
    leftovers, waits = register.channels.leftovers, register.admission.waits_for_room
    bystanders = None
    if config.guard_bystanders and not config.kube.node:  # on a Kubernetes node valved/kube looks, with pods
        bystanders = Bystanders(books, gating, processes, journal, gate.gpus(), ladder, leftovers.expected, waits)
    consents = Consents(books, gating, journal, config.granted.said(), outer.pods)
    worths = Worths(gate.granting, gating, books, clock)
    granting = Granting(gate.granting, gating, books, consents.of, leftovers.bar_grants, slices, worths)
    sharing = SharedWeights(books, gating, consents.of, run_dir / paths.WEIGHTS_FILE, outer.prompt)
    reporter = Reporter(
        gate,
        books,
        gating,
        register,
        brake,
        journal,
        clock,
        version=outer.version,
        run_dir=run_dir,
        lease_ns=config.lease_ns,
        driver=driver,
        bystanders=bystanders,
        kv=kv,
        granting=granting,
    )
    switches = (gating, register, brake, reporter, handover, journal, consents)
    node = Node(*switches, lease_ns=config.lease_ns, stop=outer.stop)
    gating.listener = GateNews(books, register, ladder, granting, sharing, handover, kv, leaving)
    register.listener = ClientsNews(handover, node, journal, run_dir, outer.prompt, kv)
    return Daemon(
        gate=gate,
        clock=clock,
        journal=journal,
        books=books,
        gating=gating,
        register=register,
        handover=handover,
        come_back=ComeBack(books, gating, register, journal, clock, processes, bystanders),
        brake=brake,
        leaving=leaving,
        ladder=ladder,
        endings=endings,
        node=node,
        reporter=reporter,
        consents=consents,
        granting=granting,
        sharing=sharing,
        worths=worths,
        kv=kv,
        bystanders=bystanders,
    )


def _welcomes(outer: Outer) -> Welcomes:
    return Welcomes(outer.clock, outer.work, outer.kept_bytes)


def _settings(config: Config) -> GateSettings:
    return GateSettings(
        cooldown=config.cooldown_settings(),
        wake=config.wake_settings(),
        breaker=config.breaker_settings(),
        by_arrivals=config.cooldown.arrivals,
    )


def _memory(
    config: Config,
    outer: Outer,
    books: Books,
    gating: GateService,
    register: Register,
    ladder: Ladder,
    journal: Journal,
) -> Kv | None:
    if not config.memory.enabled:
        return None
    return put_together(
        outer.gate,
        books,
        gating,
        register,
        ladder,
        journal,
        outer.clock,
        outer.processes,
        outer.reactor,
        config,
        fd_limit=outer.fd_limit,
        outside_port=outer.uvm,
        work=outer.work,
        closer=outer.closer,
        shares=outer.shares,
    )
