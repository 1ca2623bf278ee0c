"""Engines attach: when their hook gets its table, and when an engine is one no more."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from valved.abi.kv_files import MODES, KvTable, check_sizes
from valved.abi.kv_link import KV_ABI, KvAttach, KvMode, KvTableMessage
from valved.abi.link import LinkType
from valved.clients.attaching import AttachBounds, Cost
from valved.clients.complaints import Complaints
from valved.gate.wake import GateService
from valved.kv.books import KvBooks
from valved.kv.changes import Changes, EngineLeft, HookLost, Look
from valved.kv.columns import Rank
from valved.kv.engines import Engine
from valved.kv.journey import all_of
from valved.kv.orders import Send
from valved.kv.unheeded import UnheededRanges
from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import ClientId, ServiceId
from valved.model.memory import LayoutRefused
from valved.state.journal import Journal
from valved.state.registry import ClientEntry

TABLE_NS = 4_000_000_000  # a hook waits five seconds; its ranks look for a new valved every two
YOUNG_NS = 10_000_000_000  # shims of a predecessor may still be on their way back
MAX_RANKS = 64


@dataclass(eq=False, repr=False)
class Tables:
    _books: KvBooks
    _unheeded: UnheededRanges
    _gating: GateService
    _journal: Journal
    _clock: Clock
    _send: Send
    _changes: Changes
    _bounds: AttachBounds
    _told: Complaints

    def __post_init__(self) -> None:
        self._born_ns = self._clock.now_ns()
        # Attached, and wait for their table; and what that costs valved if they keep it.
        self._untold: dict[ServiceId, tuple[ClientEntry, int, KvAttach, Cost]] = {}
        self._bare: dict[ClientId, KvTable] = {}  # of hooks that bring its memory and attach then

    # Ranks

    def put_rank(self, shim: ClientEntry, rank: Rank) -> None:
        """Raises LayoutRefused when it is not cut like its siblings."""
        engine = self._books.engines.get(shim.service)
        if engine is not None:
            engine.join(rank)
        self._books.ranks[shim.id] = rank
        if engine is not None:
            self._books.tell(engine)
            self._hand(engine)
        self._changes.put(Look())

    def drop_rank(self, shim: ClientEntry) -> None:
        rank = self._books.ranks.pop(shim.id, None)
        engine = self._books.engines.get(shim.service)
        if engine is not None:
            engine.leave(shim.id)
        if rank is not None:
            hooks = {rank.hook} | ({engine.hook} if engine is not None else set())
            for hook in sorted(hooks):
                self._changes.put(HookLost(hook))

    # Engines

    def make(self, entry: ClientEntry, seq: int, body: KvAttach) -> None:
        """KV_MAKE. The answer is a table without a page, whose hook attaches when it has made them."""
        try:
            self._check(entry, body)
            self._bounds.admit_bare(entry)
            table = KvTable(body.blocks, body.block_tokens, is_bare=True)
        except OSError as error:  # KV_ATTACH comes all the same, and tells
            self._books.ack(entry.id, seq, error.errno or errno.ENOMEM)
            return
        self._bare[entry.id] = table
        told = KvTableMessage(abi=KV_ABI, table_bytes=table.bytes, book_bytes=0)
        self._send(entry.id, LinkType.KV_TABLE, told, seq, (table.fd,))

    def forget(self, hook: ClientId) -> None:
        self._bare.pop(hook, None)

    def _brought(self, entry: ClientEntry, body: KvAttach) -> KvTable | None:
        """The table that this hook has brought the memory of."""
        table = self._bare.pop(entry.id, None)
        is_right = table is not None and (table.blocks, table.block_tokens) == (body.blocks, body.block_tokens)
        return table if table is not None and is_right and table.take_pages() else None

    def attach(self, entry: ClientEntry, seq: int, body: KvAttach) -> None:
        """KV_ATTACH. The answer is the table, as soon as all ranks are known."""
        role = self._books.registry.services[entry.service].role
        try:
            table = self._brought(entry, body)
            self._check(entry, body)
            cost = self._admit(entry, body, is_brought=table is not None)
            engine = Engine(entry.id, entry.service, role, body, table)
            if table is not None:
                table.begin()
        except OSError as error:
            self.refuse(entry, f"engine refused: {error.strerror}")
            self._books.ack(entry.id, seq, error.errno or errno.ENOMEM)
            return
        engines = self._books.engines
        if entry.service in engines:
            self.detach(engines[entry.service])
        engines[entry.service] = engine
        for client in list(self._books.registry.clients_of(entry.service)):
            rank = self._books.ranks.get(client.id)
            if rank is not None:
                self._join(engine, client, rank)
        self._books.tell(engine)
        self._untold[entry.service] = (entry, seq, body, cost)
        is_young = self._clock.now_ns() - self._born_ns < YOUNG_NS
        if not is_young and not self._books.has_ranges(entry.service):
            self._send_table(engine)  # its memory is not ours: there will never be a rank
        self._hand(engine)
        self._clock.call_at_ns(self._clock.now_ns() + TABLE_NS, lambda: self._hand_late(engine))

    def _check(self, entry: ClientEntry, body: KvAttach) -> None:
        """OSError: it may not attach, and why."""
        known = self._books.engines.get(entry.service)
        why = check_sizes(body.blocks, body.block_tokens, body.rows, body.row_blocks)
        if not body.abi_min <= KV_ABI <= body.abi_max:
            raise OSError(errno.EPROTONOSUPPORT, f"it speaks KV ABI {body.abi_min} to {body.abi_max}, we {KV_ABI}")
        if known is not None and known.hook != entry.id:
            raise OSError(errno.EBUSY, "another engine of this service has attached")
        if why or not 0 < body.ranks <= MAX_RANKS:
            raise OSError(errno.EINVAL, why or f"{body.ranks} ranks, 1 to {MAX_RANKS} are possible")

    def _admit(self, entry: ClientEntry, body: KvAttach, *, is_brought: bool) -> Cost:
        known = self._books.engines.get(entry.service)
        others = {engine.hook: engine.table.blocks for engine in self._books.engines.values() if engine is not known}
        return self._bounds.admit(entry, body.blocks, others, is_brought=is_brought)

    def _join(self, engine: Engine, shim: ClientEntry, rank: Rank) -> None:
        try:
            engine.join(rank)
        except LayoutRefused as refused:
            self._books.ranks.pop(shim.id, None)
            self.refuse(shim, f"KV layout refused: {refused}")

    def refuse(self, entry: ClientEntry, why: str) -> None:
        self._gating.counters.refuse("kv-engine")
        self._told.tell(entry, why)

    # The table

    def _hand(self, engine: Engine) -> None:
        """Only a table of all ranks says what has memory: told too early, an engine believes that all of it has.

        Nor one that is made while an earlier table's losses are carried out: it would call those blocks backed.
        """
        if not self._books.is_attached(engine):
            return
        leaving = all_of([order.through for order in self._books.orders.leaving(frozenset(engine.ranks))])
        if not leaving.is_set:
            leaving.then(lambda: self._hand(engine))
            return
        self._books.tell(engine)
        self._send_table(engine)

    def _hand_late(self, engine: Engine) -> None:
        waiting = self._untold.get(engine.service)
        if waiting is None or self._books.engines.get(engine.service) is not engine:
            return
        if not self._books.has_ranges(engine.service):
            self._send_table(engine)
            return
        entry, seq, _, _ = waiting
        self.detach(engine)
        self._books.ack(entry.id, seq, errno.EAGAIN)

    def _send_table(self, engine: Engine) -> None:
        waiting = self._untold.pop(engine.service, None)
        if waiting is None:
            return
        entry, seq, body, _ = waiting
        self._unheeded.heed(engine)
        told = KvTableMessage(abi=KV_ABI, table_bytes=engine.table.bytes, book_bytes=engine.book.bytes)
        self._send(entry.id, LinkType.KV_TABLE, told, seq, (engine.table.fd, engine.book.fd))
        self._journal.emit(
            EventKind.ATTACHED,
            service=entry.service,
            client=entry.id,
            reason=body.engine,
            blocks=body.blocks,
            ranks=body.ranks,
            mode=MODES.get(body.mode, KvMode.NONE).name.lower(),
        )
        self._changes.put(Look())

    def detach(self, engine: Engine) -> None:
        del self._books.engines[engine.service]
        if (waiting := self._untold.pop(engine.service, None)) is not None:
            self._bounds.was_untold(waiting[0], waiting[3])
        engine.table.detach()
        self._changes.put(EngineLeft(engine))
        for rank in engine.ranks.values():
            for book in rank.books:
                if book.is_elastic and book.key in self._books.pool.ranges:
                    self._unheeded.expect(book)
        engine.close()
