"""The parts of KV memory, put together: books (memory), movement (reclaim), decisions (reserve)."""

from __future__ import annotations

from dataclasses import dataclass

from valved.config import Config
from valved.mechanism.clock import Clock
from valved.mechanism.ports import GatePort, OutsidePort, ProcessPort
from valved.service.books import Books
from valved.service.brake import Brake
from valved.service.gate import GateService
from valved.service.handover import Handover
from valved.service.journal import Journal
from valved.service.memory import Memory
from valved.service.memory_report import MemoryReport
from valved.service.node import Node
from valved.service.outside import Outside
from valved.service.reclaim import Mover
from valved.service.register import Reactor, Register
from valved.service.report import Reporter
from valved.service.reserve import Reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    memory: Memory
    mover: Mover
    outside: Outside
    reserve: Reserve
    report: MemoryReport

    def check_integrity(self) -> None:
        self.memory.check_integrity()

    def close(self) -> None:
        self.outside.close()
        self.memory.close()


def tell_others(kv: Kv, reporter: Reporter, node: Node, handover: Handover, brake: Brake, config: Config) -> None:
    """Status, explanations, the state file and the brakes know of it."""
    reporter.memory = lambda: kv.report.state(config.memory)
    reporter.used_bytes = kv.reserve.used_bytes
    node.explain_reclaim = kv.report.explain_reclaim
    handover.memory, handover.restore_memory = kv.report.saved, kv.report.restore
    brake.allow_reclaim, brake.when_still = kv.mover.allow, kv.mover.when_still


def put_together(
    gate: GatePort,
    books: Books,
    keeper: GateService,
    register: Register,
    journal: Journal,
    clock: Clock,
    processes: ProcessPort,
    reactor: Reactor,
    config: Config,
    *,
    fd_limit: int,
    outside_port: OutsidePort,
) -> Kv:
    memory = Memory(gate, books, keeper, journal, clock, processes, reactor, config, register.send, fd_limit)
    outside = Outside(memory.orders, journal, clock, outside_port, config.memory)
    mover = Mover(memory, outside, gate, keeper, journal, clock, config.eviction_settings())
    uuids = {info.index: info.uuid for info in gate.gpus()}
    reserve = Reserve(memory, mover, journal, clock, config, uuids)
    report = MemoryReport(memory, mover, reserve, journal, sorted(uuids))
    register.memory = memory
    memory.hang_up = register.leave
    memory.offer, memory.shim_left = outside.offer, outside.forget
    return Kv(memory=memory, mover=mover, outside=outside, reserve=reserve, report=report)
