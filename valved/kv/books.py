"""The books of KV memory: handles, orders, engines and their ranks. Questions change nothing.

kv/ranges.py, kv/layouts.py and kv/tables.py write them by what clients say, kv/moves.py by what is ordered.

Trust: a shim or hook can lose its own memory by lying, or keep what it has; it cannot get at another's. A handle goes
to another process only when its process has said under an order that it is free, or is dead.
"""

from __future__ import annotations

import numpy as np

from valved.abi.link import Ack, Feature, LinkType
from valved.config import MIB, MemoryTable
from valved.gate.launch_holds import LaunchHolds
from valved.kv.columns import Rank
from valved.kv.engines import Engine
from valved.kv.orders import Orders, Send
from valved.kv.pool import Pool
from valved.kv.slots import Ints, RangeKey
from valved.machine.clock import Clock
from valved.machine.ports import CloserPort, GatePort
from valved.model.ids import ClientId, GpuIndex, Role, ServiceId
from valved.state.registry import Books, ClientEntry

RUNS = int(Feature.KV_RUNS)
SPARE_FDS = 4096  # of the limit on descriptors, kept for clients, files and what travels


class KvBooks:
    def __init__(
        self,
        registry: Books,
        gate: GatePort,
        clock: Clock,
        settings: MemoryTable,
        send: Send,
        fd_limit: int,
        closer: CloserPort,
    ) -> None:
        self.settings = settings
        self.pool = Pool(settings.handle_mib * MIB, max(0, fd_limit - SPARE_FDS), clock.now_ns(), closer)
        self.orders = Orders(self.pool, send, clock, self._takes_runs)
        self.holds = LaunchHolds(gate)
        self.engines: dict[ServiceId, Engine] = {}
        self.ranks: dict[ClientId, Rank] = {}  # by shim, whether their engine has attached or not
        self.untold: dict[RangeKey, int] = {}  # slots that a client of a predecessor has still to tell
        self.registry = registry
        self.gpus = tuple(gate.gpus())
        self._clock = clock
        self._send = send

    # Writing

    def ack(self, client: ClientId, seq: int, status: int = 0) -> None:
        self._send(client, LinkType.ACK, Ack(status=status), seq, ())

    def tell(self, engine: Engine) -> None:
        """Write what changed into the table of an engine whose ranks are all known: backed means backed everywhere."""
        if not engine.is_complete:
            return
        now = engine.are_whole(engine.standing_columns())
        before = engine.table.is_backed()
        now_ns = self._clock.now_ns()
        for is_backed in (False, True):
            blocks: Ints = np.flatnonzero((now != before) & (now == is_backed))
            if len(blocks):
                engine.table.record(blocks, is_backed, now_ns)

    # Questions

    def _takes_runs(self, client: ClientId) -> bool:
        entry = self.registry.clients.get(client)
        return entry is not None and bool(entry.features & RUNS)

    def role_of(self, client: ClientId) -> Role:
        entry = self.registry.clients.get(client)
        return entry.role if entry is not None else Role.NONE

    def service_of(self, client: ClientId) -> ServiceId:
        entry = self.registry.clients.get(client)
        return entry.service if entry is not None else ServiceId(0)

    def engine_of(self, client: ClientId) -> Engine | None:
        """The attached engine of which this shim is a rank."""
        engine = self.engines.get(self.service_of(client))
        return engine if engine is not None and client in engine.ranks else None

    def engines_with(self, role: Role) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role is role and engine.is_complete]

    def is_attached(self, engine: Engine) -> bool:
        """It is the engine of its service, and whole."""
        return self.engines.get(engine.service) is engine and engine.is_complete

    def may_take(self, engine: Engine) -> bool:
        """Its hook may have left, or may have said meanwhile that it cannot make good a loss."""
        return self.is_attached(engine) and engine.can_lose

    def has_ranges(self, service: ServiceId) -> bool:
        return any(self.service_of(key.client) == service for key in self.pool.ranges)

    def shim_beside(self, hook: ClientEntry) -> ClientEntry | None:
        """The shim with KV ranges in the process of a hook."""
        for client in self.registry.clients_of(hook.service):
            if client.process == hook.process and client.role is not Role.HOOK:
                return client if self.pool.of_client(client.id) else None
        return None

    def mapped(self, gpu: GpuIndex, role: Role) -> int:
        """Handles of this GPU that clients of a role have mapped."""
        return self.pool.mapped(gpu, (client.id for client in self.registry.with_role(role)))

    @property
    def are_empty(self) -> bool:
        return not (self.engines or self.pool.total or self.pool.ranges)

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.orders.check_integrity()
        for engine in self.engines.values():
            assert engine.hook in self.registry.clients, "an engine without its hook"
            if not engine.is_broken:
                assert all(client in self.registry.clients for client in engine.ranks), "a rank without its shim"
            if engine.is_complete and self.orders.is_idle and not engine.going.any():
                promised = engine.table.is_backed() & ~engine.are_whole(engine.backed_columns())
                assert not promised.any(), "the table promises memory that is not there"

    def close(self) -> None:
        for engine in list(self.engines.values()):
            engine.close()
        self.engines.clear()
        self.pool.close()
