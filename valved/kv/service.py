"""KV memory as clients meet it: each message goes to the book it is for, and what that changed is applied here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass

from valved.abi.kv_link import (
    KvAttach,
    KvDone,
    KvEntries,
    KvLayoutPart,
    KvNeed,
    KvRangeMessage,
    KvScratch,
    KvSpan,
    KvStep,
)
from valved.abi.link import Feature, LinkType, Malformed, Packet
from valved.clients.exits import Exits
from valved.clients.register import Register
from valved.config import MIB
from valved.gate.freeze import Ladder
from valved.kv.account import ReclaimLog
from valved.kv.books import KvBooks
from valved.kv.changes import (
    BackHeld,
    BackWhole,
    Changed,
    Changes,
    EndProcess,
    EngineLeft,
    HookLost,
    Look,
    PinCame,
    RangeCame,
    RangeGone,
    RangeTold,
)
from valved.kv.engines import Engine
from valved.kv.journey import start
from valved.kv.layouts import Layouts
from valved.kv.lend import Lender
from valved.kv.looks import Looks
from valved.kv.outside import Outside
from valved.kv.ranges import Ranges
from valved.kv.reserve import Reserve
from valved.kv.supply import Supply
from valved.kv.tables import Tables
from valved.kv.unheeded import UnheededRanges
from valved.kv.whole import WholeRanges
from valved.machine.cards import CardUse
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, OutsidePort
from valved.model.figures import total
from valved.model.ids import TRIED_FIRST, GpuIndex, Role
from valved.state.registry import ClientEntry

REST_BEATS = 5  # while no offline work is here: nobody is hurt, and NVML takes locks of the driver
FROM_HOOK = frozenset({LinkType.KV_LAYOUT, LinkType.KV_MAKE, LinkType.KV_ATTACH, LinkType.KV_NEED})


@dataclass(eq=False, repr=False)
class KvService:
    """Gets what the clients' room reports of KV memory, and listens to the books."""

    _books: KvBooks
    _ranges: Ranges
    _layouts: Layouts
    _tables: Tables
    _unheeded: UnheededRanges
    _outside: Outside
    _supply: Supply
    _reserve: Reserve
    _lender: Lender
    _looks: Looks
    _whole: WholeRanges
    _log: ReclaimLog
    _gate: GatePort
    _clock: Clock
    _port: OutsidePort
    _exits: Exits
    _register: Register
    _ladder: Ladder
    changes: InitVar[Changes]

    def __post_init__(self, changes: Changes) -> None:
        self._uuids = {info.index: info.uuid for info in self._books.gpus}
        self._is_leaving = False  # online processes have left in this turn
        self._told_at: object = None  # what clients were told went by these books, cards and needs
        changes.listener = self.apply

    @property
    def features(self) -> Feature:
        """What clients are told: that KV memory is managed, and whether they are asked for their uvm descriptor."""
        always = Feature.MEMORY | Feature.KV_STEP | Feature.KV_FREE | Feature.KV_RUNS | Feature.KEEP | Feature.KV_MAKE
        return always | Feature.SPARSE if self._books.settings.remap in TRIED_FIRST else always

    # Messages

    def handle(self, entry: ClientEntry, packet: Packet, fds: list[int]) -> None:
        if (packet.type in FROM_HOOK) != (entry.role is Role.HOOK):
            raise Malformed(f"{packet.type.name} from a client of role {entry.role.name}")
        body, seq = packet.body, packet.seq
        match body:
            case KvNeed():
                self._rung(entry, packet.sent_ns, body.wanted_blocks)
            case KvDone():
                self._check_handles(fds)
                self._books.orders.answered(entry.id, body, fds)
                if self._supply.oldest is None:  # else the reclaim that waits for it looks when all are there
                    self._looks.look_soon()
            case KvRangeMessage():
                self._ranges.add(entry, seq, body)
            case KvEntries() if packet.type is LinkType.KV_HELD:
                self._check_handles(fds)
                self._ranges.held(entry, seq, body, fds)
            case KvSpan() if packet.type is LinkType.KV_PIN:
                self._ranges.pin(entry, seq, body)
            case KvSpan():
                self._ranges.drop(entry, body)
            case KvLayoutPart():
                self._layouts.add(entry, seq, body)
            case KvScratch():
                self._scratch(entry, body, fds)
            case KvAttach():
                (self._tables.make if packet.type is LinkType.KV_MAKE else self._tables.attach)(entry, seq, body)
            case KvStep():
                self._books.ack(entry.id, seq, self._unheeded.step(entry, body.range))

    def _rung(self, hook: ClientEntry, sent_ns: int, wanted_blocks: int) -> None:
        engine = self._books.engines.get(hook.service)
        if engine is not None and engine.rung_ns is None:
            engine.rung_ns = sent_ns
        if engine is not None and engine.role is Role.ONLINE and engine.is_complete:
            self._looks.look_now(engine, wanted_blocks)
        else:
            self._looks.look_soon()

    def _check_handles(self, fds: list[int]) -> None:
        if not all(map(self._port.is_handle, fds)):
            raise Malformed("a descriptor that is not memory of the driver")

    def _scratch(self, entry: ClientEntry, body: KvScratch, fds: list[int]) -> None:
        gpu = self._ranges.find_gpu(body.gpu_uuid, body.device_instance)
        if Feature.SPARSE not in self.features or entry.role is not Role.OFFLINE or not fds:
            raise Malformed("KV_SCRATCH that valved did not ask for, or without a descriptor")
        if not 0 < body.bytes <= 1 << 40 or body.base + body.bytes >> 64 or gpu is None:
            raise Malformed(f"KV_SCRATCH of {body.bytes} bytes at {body.base:#x}, device {body.device_instance}")
        if not self._port.is_uvm(fds[-1]):
            raise Malformed("KV_SCRATCH with a descriptor that is not of the uvm file")
        if self._outside.offer(entry, gpu, self._uuids[gpu], body, fds[-1]):
            fds.pop()

    # What follows from a change of the books

    def apply(self, changed: Changed) -> None:
        match changed:
            case Look():
                self._looks.look_soon()
            case RangeCame():
                self._layouts.try_early_soon()
            case RangeTold(shim):
                self._told(shim)
            case RangeGone(shim, book):
                rank = self._books.ranks.get(shim.id)
                if rank is not None and book in rank.books:
                    self._tables.drop_rank(shim)
                self._looks.look_soon()
            case PinCame(client):
                engine = self._books.engine_of(client)
                if engine is not None:
                    engine.heed_pins()
            case BackWhole(book, seq):
                start(self._whole.back_whole(book, seq))
            case BackHeld(book):
                start(self._whole.back_held(book))
            case EngineLeft(engine):
                self._engine_left(engine)
            case HookLost(hook):
                self._soon(lambda: self._register.leave(hook, "its shim left"))
            case EndProcess(client, reason):
                self._ladder.end(client, reason)

    def _told(self, shim: ClientEntry) -> None:
        engine = self._books.engines.get(shim.service)
        if engine is not None:
            self._books.tell(engine)
        self._layouts.try_early()
        self._looks.look_soon()

    def _engine_left(self, engine: Engine) -> None:
        counters = self._log.counters
        counters.lost_tokens = total((counters.lost_tokens, engine.view().lost_tokens))
        self._lender.engine_left(engine)
        self._reserve.engine_left(engine)

    def _soon(self, call: Callable[[], None]) -> None:
        """In the next turn of the loop: a client that leaves now must have left first."""
        self._clock.call_at_ns(self._clock.now_ns(), call)

    # Coming and leaving

    def client_joined(self, entry: ClientEntry) -> None:
        """Before it is welcomed: what its control page says counts from then on."""
        self._supply.make_way(entry)
        self._tell_budget(entry, self._kept())

    def client_left(self, entry: ClientEntry, *, is_dead: bool) -> None:
        """Its channels are on or gone, its link is closed."""
        if entry.role is Role.HOOK:
            self._layouts.forget(entry.id)
            self._tables.forget(entry.id)
            engine = self._books.engines.get(entry.service)
            if engine is not None and engine.hook == entry.id:
                self._tables.detach(engine)
        else:
            self._tables.drop_rank(entry)
            self._outside.forget(entry.id)
            self._ranges.forget(entry.id)
            self._books.orders.client_gone(entry.id, entry.process, is_alive=not is_dead)
            self._books.pool.leave(entry.id, entry.process, is_alive=not is_dead)
            if is_dead:
                self._books.pool.process_gone(entry.process)
            elif self._books.pool.has_orphans(entry.process):
                self._wait_for_end(entry)
        if entry.role is Role.ONLINE and not self._is_leaving:
            self._is_leaving = True
            self._soon(self._have_left)
        self._looks.look_soon()

    def _have_left(self) -> None:
        """Online processes, in this turn of the loop: what they had is kept before offline work can take it."""
        self._is_leaving = False
        self._supply.services_changed()
        kept = self._kept()
        for entry in self._books.registry.with_role(Role.OFFLINE):
            self._tell_free(entry, kept)

    def _kept(self) -> dict[GpuIndex, int]:
        return {gpu: self._supply.kept_bytes(gpu) for gpu in self._uuids}

    def _wait_for_end(self, entry: ClientEntry) -> None:
        """Its link broke first. As a rule the process is ending; else it may come back."""
        process = entry.process

        def gone() -> None:
            self._exits.forget(process)
            self._books.pool.process_gone(process)
            self._looks.look_soon()

        self._exits.await_end(process, gone)

    # The cards

    @property
    def is_in_use(self) -> bool:
        return not self._books.are_empty

    def needs_cards(self, beat: int) -> bool:
        """For what offline work must leave to online services: rarely while there is no offline work, and at the first
        beat, for jobs that a predecessor left."""
        registry, is_rare = self._books.registry, beat % REST_BEATS == 0
        is_wanted = any(registry.with_role(Role.OFFLINE)) or (is_rare and any(registry.with_role(Role.ONLINE)))
        return self._supply.keeps and (is_wanted or not beat)

    def see_cards(self, cards: Mapping[bytes, CardUse]) -> None:
        """What the cards say now. Every client is told, before it has a range, too: it sizes its cache by that."""
        self._supply.see_cards(cards)
        kept = self._kept()
        found = self._books.registry.revision, cards, kept
        if found == self._told_at and not self.is_in_use:
            return
        self._told_at = found
        for entry in self._books.registry.clients.values():
            self._tell_budget(entry, kept)

    def _tell_budget(self, entry: ClientEntry, kept: Mapping[GpuIndex, int]) -> None:
        if entry.role is Role.HOOK:
            return
        pool, rule = self._books.pool, self._books.settings.size_rule_mib * MIB
        self._gate.set_memory(entry.id, pool.handle_bytes, self._supply.budget_bytes(entry), rule)
        self._tell_free(entry, kept)

    def _tell_free(self, entry: ClientEntry, kept: Mapping[GpuIndex, int]) -> None:
        pool, is_offline = self._books.pool, entry.role is Role.OFFLINE
        free = {gpu: pool.free_handles(gpu) * pool.handle_bytes for gpu in self._uuids}
        self._gate.set_free(entry.id, {gpu: (free[gpu], kept[gpu] if is_offline else 0) for gpu in free})

    def close(self) -> None:
        self._exits.close()
        self._outside.close()
        self._books.close()
