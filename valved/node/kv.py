"""The parts of KV memory, put together: each gets the parts below it by its constructor. kv/service.py is on top."""

from __future__ import annotations

from dataclasses import dataclass

from valved.clients.attaching import AttachBounds
from valved.clients.complaints import Complaints
from valved.clients.exits import Exits, Reactor
from valved.clients.register import Register
from valved.config import Config, MemoryTable
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.kv.account import ReclaimLog, ReclaimTeller
from valved.kv.beside import Beside, Latecomers
from valved.kv.books import KvBooks
from valved.kv.changes import Changes
from valved.kv.first import Firsts
from valved.kv.grow import Growth
from valved.kv.layouts import Layouts
from valved.kv.lend import Lender, Lending, Shares
from valved.kv.looks import Looks
from valved.kv.moves import Moves
from valved.kv.outside import Outside
from valved.kv.ranges import Ranges
from valved.kv.reclaim import Reclaimer
from valved.kv.report import MemoryReport
from valved.kv.reserve import Reserve
from valved.kv.rungs import Rungs
from valved.kv.service import KvService
from valved.kv.supply import Supply
from valved.kv.tables import Tables
from valved.kv.turn import GateTurn
from valved.kv.unheeded import UnheededRanges
from valved.kv.ways import Ways
from valved.kv.whole import WholeRanges
from valved.machine.clock import Clock
from valved.machine.ports import CloserPort, GatePort, OutsidePort, ProcessPort, WorkPort
from valved.model.ids import ProcessId, ServiceId
from valved.model.states import MemoryState
from valved.state.full import FullCards
from valved.state.journal import Journal
from valved.state.registry import Books
from valved.state.stats import MemoryCounters

RANGES_NS = 2_000_000_000  # a process that comes back tells its ranges within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    books: KvBooks
    supply: Supply
    turn: GateTurn
    ways: Ways
    outside: Outside
    moves: Moves
    reclaimer: Reclaimer
    lending: Lending
    lender: Lender
    reserve: Reserve
    looks: Looks
    service: KvService
    log: ReclaimLog
    report: MemoryReport
    settings: MemoryTable

    def state(self) -> MemoryState:
        return self.report.state(self.settings)

    def allow(self, on: bool) -> None:
        """Whether memory may be taken from offline work."""
        self.supply.is_allowed = on

    def check_integrity(self) -> None:
        self.books.check_integrity()

    def close(self) -> None:
        self.service.close()


def _away(gating: GateService, now_ns: int) -> dict[ServiceId, frozenset[ProcessId]]:
    """Online services of a predecessor that have not told all of theirs, and which of their processes are not back."""
    return {
        online.id: frozenset(online.away)
        for online in gating.online.values()
        if online.away or (online.back_ns and now_ns - online.back_ns < RANGES_NS)
    }


def put_together(
    gate: GatePort,
    registry: Books,
    gating: GateService,
    register: Register,
    ladder: Ladder,
    journal: Journal,
    clock: Clock,
    processes: ProcessPort,
    reactor: Reactor,
    config: Config,
    *,
    fd_limit: int,
    outside_port: OutsidePort,
    work: WorkPort,
    closer: CloserPort,
    shares: Shares | None,
) -> Kv:
    settings, costs, send = config.memory, config.eviction_settings(), register.send
    uuids = {info.index: info.uuid for info in gate.gpus()}
    counters, changes = MemoryCounters(), Changes()
    log, told = ReclaimLog(counters), Complaints(registry, journal, clock)
    # Names of pods are new each time. What a pod needs again is the scheduler's to know.
    remember_ns = 0 if config.kube.node else round(settings.remember_s * 1e9)
    books = KvBooks(registry, gate, clock, settings, send, fd_limit, closer)
    unheeded = UnheededRanges(books, journal, clock, changes)
    ranges = Ranges(books, unheeded, gating, told, changes)
    bounds = AttachBounds(registry, clock)
    tables = Tables(books, unheeded, gating, journal, clock, send, changes, bounds, told)
    layouts = Layouts(books, tables, clock, work)

    full = FullCards(journal, clock, counters)
    supply = Supply(books, clock, full, remember_ns, lambda: _away(gating, clock.now_ns()))
    turn = GateTurn(gate, gating, clock, supply)
    outside = Outside(books.orders, turn, journal, told, clock, outside_port, settings, counters, closer)
    ways = Ways(books, outside, gate, journal)
    moves = Moves(books, supply, ways, outside, clock, counters)
    beside = Beside(gating, clock, round(settings.let_ms * 1e6), counters)
    firsts = Firsts(books, supply, turn, ways, moves, clock, costs)
    teller = ReclaimTeller(journal, log, books.pool.handle_bytes)
    reclaimer = Reclaimer(books, supply, turn, ways, moves, firsts, beside, teller, clock, costs)
    growth = Growth(books, supply, turn, moves, firsts, reclaimer)
    whole = WholeRanges(books, supply, turn, moves, reclaimer, ranges, unheeded, clock)
    lending = Lending(books, supply, turn, ways, moves, beside, gating, journal, clock, counters)
    rungs = Rungs(books, ways, settings)
    reserve = Reserve(books, supply, firsts, growth, lending, rungs, journal, clock, config, uuids, changes)
    lender = Lender(books, supply, lending, clock, changes, shares)
    latecomers = Latecomers(books, supply, beside, clock)
    looks = Looks(books, supply, rungs, reserve, lender, latecomers, clock, costs, work)
    parts = (books, ranges, layouts, tables, unheeded, outside, supply, reserve, lender, looks, whole)
    service = KvService(
        *parts, log, gate, clock, outside_port, Exits(reactor, processes, clock), register, ladder, changes
    )
    return Kv(
        books=books,
        supply=supply,
        turn=turn,
        ways=ways,
        outside=outside,
        moves=moves,
        reclaimer=reclaimer,
        lending=lending,
        lender=lender,
        reserve=reserve,
        looks=looks,
        service=service,
        log=log,
        report=MemoryReport(books, supply, ways, outside, reserve, log, journal, sorted(uuids)),
        settings=settings,
    )
