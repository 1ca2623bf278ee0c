"""The parts of KV memory, put together: books (memory), movement (reclaim), decisions (reserve)."""

from __future__ import annotations

from dataclasses import dataclass

from valved.clients.register import Reactor, Register
from valved.config import Config
from valved.gate.wake import GateService
from valved.kv.memory import Memory
from valved.kv.outside import Outside
from valved.kv.reclaim import Mover
from valved.kv.report import MemoryReport
from valved.kv.reserve import Reserve
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, OutsidePort, ProcessPort
from valved.node.api import Node
from valved.node.brake import Brake
from valved.node.handover import Handover
from valved.node.status import Reporter
from valved.state.journal import Journal
from valved.state.registry import Books


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
    kv.memory.unheeded.fail = brake.ladder.end
    brake.allow_reclaim, brake.when_still = kv.mover.allow, kv.mover.when_still


def put_together(
    gate: GatePort,
    books: Books,
    gating: GateService,
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
    memory = Memory(gate, books, gating, journal, clock, processes, reactor, config, register.send, fd_limit)
    outside = Outside(memory.orders, journal, clock, outside_port, config.memory)
    mover = Mover(memory, outside, gate, gating, journal, clock, config.eviction_settings())
    uuids = {info.index: info.uuid for info in gate.gpus()}
    reserve = Reserve(memory, mover, journal, clock, config, uuids)
    report = MemoryReport(memory, mover, reserve, journal, sorted(uuids))
    register.memory = memory
    memory.hang_up = register.leave
    memory.is_handle = outside_port.is_handle
    memory.offer, memory.shim_left = outside.offer, outside.forget
    return Kv(memory=memory, mover=mover, outside=outside, reserve=reserve, report=report)
