"""What clients say about KV memory: ranges, what they hold, layouts, engines that attach. It keeps the books.

Nothing is moved here. Who gets what: kv/reserve.py; how it moves: kv/reclaim.py. Both hear of every change by
`changed` and `wants_whole`.

Trust: a shim or hook can lose its own memory by lying, or keep what it has; it cannot get at another's. A handle is
somebody else's again only when its process has said so under an order, or is dead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np

from valved.abi.kv_files import check_sizes
from valved.abi.kv_link import (
    ELASTIC,
    HEEDED,
    KV_ABI,
    KvAttach,
    KvDone,
    KvEntries,
    KvLayoutPart,
    KvNeed,
    KvRangeMessage,
    KvScratch,
    KvSpan,
    KvStep,
    KvTableMessage,
)
from valved.abi.link import Ack, Feature, LinkType, Malformed, Packet
from valved.clients.register import Exits, Reactor
from valved.config import MIB, Config
from valved.gate.wake import GateService
from valved.kv.engines import Engine, LayoutParts, Rank
from valved.kv.journey import all_of
from valved.kv.launch_holds import LaunchHolds
from valved.kv.orders import Orders, Send
from valved.kv.pool import NO_HANDLE, Ints, KvRangeBook, Pool, RangeKey
from valved.kv.unheeded import Unheeded
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ClientId, GpuIndex, Remap, Role, ServiceId
from valved.model.memory import LayoutRefused
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry

NO_UUID = bytes(16)
SPARE_FDS = 4096  # of the limit on descriptors, kept for clients, files and what travels
LAYOUT_NS = 500_000_000  # hooks wait a second or more for an answer
TABLE_NS = 4_000_000_000  # a hook waits five seconds; its ranks look for a new valved every two
YOUNG_NS = 10_000_000_000  # shims of a predecessor may still be on their way back
FROM_HOOK = frozenset({LinkType.KV_LAYOUT, LinkType.KV_ATTACH, LinkType.KV_NEED})


Offer = Callable[[ClientEntry, GpuIndex, bytes, KvScratch, int], None]
"""Takes the descriptor over."""


class Memory:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        gating: GateService,
        journal: Journal,
        clock: Clock,
        processes: ProcessPort,
        reactor: Reactor,
        config: Config,
        send: Send,
        fd_limit: int,
    ) -> None:
        self.settings = config.memory
        most = max(0, fd_limit - SPARE_FDS)
        self.pool = Pool(config.memory.handle_mib * MIB, most, clock.now_ns())
        self.orders = Orders(self.pool, send, clock)
        self.engines: dict[ServiceId, Engine] = {}
        self.changed: Callable[[], None] = lambda: None
        self.wants_whole: Callable[[KvRangeBook, int], None] = lambda book, seq: None  # back it, then `ack` it
        self.budget_bytes: Callable[[ClientEntry], int] = lambda entry: 0  # what it may hope for; 0: no limit is told
        self.make_way: Callable[[ClientEntry], None] = lambda entry: None  # it is about to make ordinary allocations
        self.engine_left: Callable[[Engine], None] = lambda engine: None
        self.offer: Offer = lambda entry, gpu, uuid, body, fd: os.close(fd)
        self.is_handle: Callable[[int], bool] = lambda fd: True  # whether a descriptor may be one of the driver's
        self.shim_left: Callable[[ClientId], None] = lambda client: None
        self.hang_up: Callable[[ClientId, str], None] = lambda client, reason: None
        self.holds = LaunchHolds(gate)
        self.unheeded = Unheeded(self.pool, books, journal, clock, self.holds, self._engine_of, config.memory.attach_s)
        self._gate = gate
        self._books = books
        self._gating = gating
        self._journal = journal
        self._clock = clock
        self._send = send
        self._exits = Exits(reactor, processes)
        self._born_ns = clock.now_ns()
        self._ranks: dict[ClientId, Rank] = {}  # by shim, whether their engine has attached or not
        self._parts: dict[ClientId, LayoutParts] = {}  # by hook
        self._early: dict[ClientId, tuple[ClientEntry, int, KvLayoutPart]] = {}  # layouts that wait for their shim
        self._untold: dict[ServiceId, tuple[ClientEntry, int, KvAttach]] = {}  # attached, and waiting for their table
        self._held_left: dict[RangeKey, int] = {}  # slots that a client of a predecessor has still to tell
        self._gpu_of_uuid = {info.uuid: info.index for info in gate.gpus()}
        self._uuid_of_gpu = {info.index: info.uuid for info in gate.gpus()}
        self._gpu_of_instance = {info.device_instance: info.index for info in gate.gpus()}

    # Messages

    def handle(self, entry: ClientEntry, packet: Packet, fds: list[int]) -> None:
        if (packet.type in FROM_HOOK) != (entry.role is Role.HOOK):
            raise Malformed(f"{packet.type.name} from a client of role {entry.role.name}")
        body, seq = packet.body, packet.seq
        match body:
            case KvRangeMessage():
                self._range(entry, seq, body)
            case KvEntries() if packet.type is LinkType.KV_HELD:
                self._held(entry, seq, body, fds)
            case KvDone():
                self._check_handles(fds)
                self.orders.answered(entry.id, body, fds)
                self.changed()
            case KvSpan() if packet.type is LinkType.KV_PIN:
                self._pin(entry, seq, body)
            case KvSpan():
                self._range_del(entry, body)
            case KvLayoutPart():
                self._layout(entry, seq, body)
            case KvScratch():
                self._scratch(entry, body, fds)
            case KvAttach():
                self._attach(entry, seq, body)
            case KvStep():
                self.ack(entry.id, seq, self.unheeded.step(entry, body.range))
            case KvNeed():
                self.changed()

    def ack(self, client: ClientId, seq: int, status: int = 0) -> None:
        self._send(client, LinkType.ACK, Ack(status=status), seq, ())

    @property
    def features(self) -> Feature:
        """What clients are told: that KV memory is managed, and whether they are asked for their uvm descriptor."""
        always = Feature.MEMORY | Feature.KV_STEP | Feature.KV_FREE
        return always | Feature.SPARSE if self.settings.remap is Remap.SPARSE else always

    # Ranges

    def _range(self, entry: ClientEntry, seq: int, body: KvRangeMessage) -> None:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        status = errno.ENODEV if gpu is None else self._why_not(entry, body)
        if gpu is None or status:
            self._journal.emit(
                EventKind.NOTED,
                service=entry.service,
                client=entry.id,
                reason=f"KV range refused: {os.strerror(status)}",
                pid=entry.process.pid,
                slots=body.slots,
                handle_bytes=body.handle_bytes,
            )
            self._gating.counters.refuse("kv-range")
            self.ack(entry.id, seq, status)
            return
        book = KvRangeBook(
            key=RangeKey(entry.id, body.range),
            gpu=gpu,
            domain="" if self.settings.one_domain else entry.domain,
            base=body.base,
            handle_bytes=body.handle_bytes,
            is_elastic=bool(body.flags & ELASTIC),
            is_heeded=bool(body.flags & HEEDED),
            at=np.full(body.slots, NO_HANDLE, np.int64),
        )
        self.pool.add_range(book)
        self._clock.call_at_ns(self._clock.now_ns(), self._try_early)
        if body.held:
            self._held_left[book.key] = body.held
            self.ack(entry.id, seq)
        elif book.is_elastic and self.unheeded.may_begin(entry):
            self.ack(entry.id, seq)  # it is lent memory when its engine has attached
            self.unheeded.expect(book)
        else:
            self.wants_whole(book, seq)

    def _find_gpu(self, uuid: bytes, instance: int) -> GpuIndex | None:
        return self._gpu_of_instance.get(instance) if uuid == NO_UUID else self._gpu_of_uuid.get(uuid)

    def _why_not(self, entry: ClientEntry, body: KvRangeMessage) -> int:
        """An errno value, 0 if the range can be."""
        mine = self.pool.of_client(entry.id)
        stop = body.base + body.slots * body.handle_bytes
        if body.handle_bytes != self.pool.handle_bytes or body.slots == 0 or body.held > body.slots or stop >> 64:
            return errno.EINVAL
        if RangeKey(entry.id, body.range) in self.pool.ranges:
            return errno.EEXIST
        if any(book.base < stop and body.base < book.base + book.slots * book.handle_bytes for book in mine):
            return errno.EEXIST
        slots = sum(book.slots for book in mine) + body.slots
        if len(mine) >= self.settings.ranges_per_client or slots > self.settings.slots_per_client:
            return errno.ENOSPC
        return 0

    def _engine_of(self, client: ClientId) -> Engine | None:
        """The attached engine of which this shim is a rank."""
        engine = self.engines.get(self.service_of(client))
        return engine if engine is not None and client in engine.ranks else None

    def _find(self, entry: ClientEntry, number: int) -> KvRangeBook:
        book = self.pool.ranges.get(RangeKey(entry.id, number))
        if book is None:
            raise Malformed(f"range {number} of client {entry.id} does not exist")
        return book

    def _range_del(self, entry: ClientEntry, body: KvSpan) -> None:
        book = self._find(entry, body.range)
        self.pool.drop_range(book.key)
        self.unheeded.may_go(entry.id)
        self._held_left.pop(book.key, None)
        rank = self._ranks.get(entry.id)
        if rank is not None and book in rank.books:
            self._drop_rank(entry)
        self.changed()

    def _pin(self, entry: ClientEntry, seq: int, body: KvSpan) -> None:
        """Where memory is taken from outside, nothing leaves the process before this is answered."""
        book = self._find(entry, body.range)
        if body.offset + body.bytes > book.slots * book.handle_bytes or not body.bytes:
            raise Malformed(f"a pin of {body.bytes} bytes at {body.offset} lies outside range {body.range}")
        first, last = body.offset // book.handle_bytes, (body.offset + body.bytes - 1) // book.handle_bytes
        if Feature.SPARSE in self.features:
            is_going = self.orders.is_unheard(book, first, last)
            self.ack(entry.id, seq, errno.EBUSY if is_going else 0)
            if is_going:
                return
        book.pinned[first : last + 1] = True
        engine = self._engine_of(entry.id)
        if engine is not None:
            engine.heed_pins()

    def _scratch(self, entry: ClientEntry, body: KvScratch, fds: list[int]) -> None:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        if Feature.SPARSE not in self.features or entry.role is not Role.OFFLINE or not fds:
            raise Malformed("KV_SCRATCH that nobody asked for, or without a descriptor")
        if not 0 < body.bytes <= 1 << 40 or body.base + body.bytes >> 64 or gpu is None:
            raise Malformed(f"KV_SCRATCH of {body.bytes} bytes at {body.base:#x}, device {body.device_instance}")
        self.offer(entry, gpu, self._uuid_of_gpu[gpu], body, fds.pop())

    def _held(self, entry: ClientEntry, seq: int, body: KvEntries, fds: list[int]) -> None:
        """A client of a predecessor, or one whose link broke, says what it has mapped."""
        self._check_handles(fds)
        book = self._find(entry, body.range)
        names, slots = body.entries["handle"].astype(np.int64), body.entries["slot"].astype(np.int64)
        left = self._held_left.get(book.key, 0)
        if len(slots) != len(fds) or len(slots) > left:
            raise Malformed(f"KV_HELD of {len(slots)} slots with {len(fds)} descriptors, {left} were announced")
        if len(np.unique(slots)) != len(slots) or len(np.unique(names)) != len(names):
            raise Malformed("KV_HELD names a slot or a handle twice")
        if int(slots.max(initial=0)) >= book.slots or (book.at[slots] != NO_HANDLE).any():
            raise Malformed("KV_HELD names a slot that does not exist or is known")
        if self.pool.total + len(slots) > self.pool.most or self.pool.is_owned(names, entry.process).any():
            self.ack(entry.id, seq, errno.EEXIST)
            return
        known = self.pool.readopt(entry.process, names, book, slots)
        fresh = [fd for fd, is_known in zip(fds, known.tolist(), strict=True) if not is_known]
        fds[:] = [fd for fd, is_known in zip(fds, known.tolist(), strict=True) if is_known]  # these we have
        self.pool.create(names[~known], fresh, book, slots[~known])
        self._held_left[book.key] = left - len(slots)
        if not self._held_left[book.key]:
            self._told_all(entry, book)
        self.ack(entry.id, seq)

    def _check_handles(self, fds: list[int]) -> None:
        if not all(map(self.is_handle, fds)):
            raise Malformed("a descriptor that is no memory of the driver")

    def _told_all(self, entry: ClientEntry, book: KvRangeBook) -> None:
        del self._held_left[book.key]
        if book.is_elastic:
            self.unheeded.expect(book)
            self.unheeded.may_go(entry.id)
        elif len(book.empty_slots()):
            self.wants_whole(book, 0)
        engine = self.engines.get(entry.service)
        if engine is not None:
            self.tell(engine)
        self._try_early()
        self.changed()

    # Engines

    def _layout(self, entry: ClientEntry, seq: int, body: KvLayoutPart) -> None:
        try:
            parts = self._parts.get(entry.id)
            if parts is None or body.first == 0:
                parts = self._parts[entry.id] = LayoutParts(head=body)
            parts.add(body)
            if parts.is_whole:
                del self._parts[entry.id]
                if not self._try_layout(entry, seq, parts.whole(), is_last=False):
                    self._await_shim(entry, seq, parts.whole())
                return
        except LayoutRefused as refused:
            self._parts.pop(entry.id, None)
            self._refuse_engine(entry, f"KV layout refused: {refused}")
            self.ack(entry.id, seq, errno.EINVAL)
            return
        self.ack(entry.id, seq)

    def _await_shim(self, entry: ClientEntry, seq: int, told: KvLayoutPart) -> None:
        """After a restart a hook may be back before the shim beside it has said what it holds: its answer waits."""
        until_ns = self._clock.now_ns() + LAYOUT_NS

        def give_up() -> None:
            if self._early.pop(entry.id, None) is not None:
                self._try_layout(entry, seq, told, is_last=True)

        self._early[entry.id] = (entry, seq, told)
        self._clock.call_at_ns(until_ns, give_up)

    def _try_early(self) -> None:
        for entry, seq, told in list(self._early.values()):
            if self._try_layout(entry, seq, told, is_last=False):
                self._early.pop(entry.id, None)

    def _try_layout(self, entry: ClientEntry, seq: int, told: KvLayoutPart, *, is_last: bool) -> bool:
        """True if it was answered. The shim's ranges come one by one: a layout that lies beyond them may be early."""
        shim = self._shim_beside(entry)
        try:
            if shim is None:
                raise LayoutRefused("pid", "no shim with KV ranges lives in this process")
            if any(key.client == shim.id for key in self._held_left):
                raise LayoutRefused("tensors", "its shim has not said all that it holds")
            self._put_rank(shim, Rank.of(shim.id, entry.id, self.pool.of_client(shim.id), told))
        except LayoutRefused as refused:
            if is_last:
                self._refuse_engine(entry, f"KV layout refused: {refused}")
                self.ack(entry.id, seq, errno.EINVAL)
            return False
        self.ack(entry.id, seq)
        return True

    def _shim_beside(self, hook: ClientEntry) -> ClientEntry | None:
        for client in self._books.clients_of(hook.service):
            if client.process == hook.process and client.role is not Role.HOOK:
                return client if self.pool.of_client(client.id) else None
        return None

    def _put_rank(self, shim: ClientEntry, rank: Rank) -> None:
        engine = self.engines.get(shim.service)
        if engine is not None:
            engine.join(rank)
        self._ranks[shim.id] = rank
        if engine is not None:
            self.tell(engine)
            self._hand_table(engine)
        self.changed()

    def _drop_rank(self, shim: ClientEntry) -> None:
        rank = self._ranks.pop(shim.id, None)
        engine = self.engines.get(shim.service)
        if engine is not None:
            engine.leave(shim.id)
        if rank is not None:
            self._ask_again({rank.hook} | ({engine.hook} if engine is not None else set()))

    def _ask_again(self, hooks: set[ClientId]) -> None:
        """A shim's link broke, its process may live. When it is back its ranges are new ones, and only a hook that
        comes anew tells where its tensors lie; else its engine could lose nothing, and who needs memory would wait."""
        now_ns = self._clock.now_ns()
        for hook in hooks:
            self._clock.call_at_ns(now_ns, lambda hook=hook: self.hang_up(hook, "its shim left"))  # type: ignore[misc]

    def _attach(self, entry: ClientEntry, seq: int, body: KvAttach) -> None:
        why = check_sizes(body.blocks, body.block_tokens, body.rows, body.row_blocks)
        status = errno.EINVAL if why else 0
        if not body.abi_min <= KV_ABI <= body.abi_max:
            why, status = f"it speaks KV ABI {body.abi_min} to {body.abi_max}, we {KV_ABI}", errno.EPROTONOSUPPORT
        elif entry.service in self.engines and self.engines[entry.service].hook != entry.id:
            why, status = "another engine of this service has attached", errno.EBUSY
        elif not why and not 0 < body.ranks <= 64:
            why, status = f"{body.ranks} ranks, 1 to 64 are possible", errno.EINVAL
        if status:
            self._refuse_engine(entry, f"engine refused: {why}")
            self.ack(entry.id, seq, status)
            return
        if entry.service in self.engines:
            self._detach(self.engines[entry.service])
        role = self._books.services[entry.service].role
        engine = self.engines[entry.service] = Engine(entry.id, entry.service, role, body)
        for client in list(self._books.clients_of(entry.service)):
            rank = self._ranks.get(client.id)
            if rank is not None:
                self._join(engine, client, rank)
        self.tell(engine)
        self._untold[entry.service] = (entry, seq, body)
        is_young = self._clock.now_ns() - self._born_ns < YOUNG_NS
        if not is_young and not self._has_ranges(entry.service):
            self._send_table(engine)  # its memory is not ours: there will never be a rank
        self._hand_table(engine)
        self._clock.call_at_ns(self._clock.now_ns() + TABLE_NS, lambda: self._hand_late(engine))

    def _has_ranges(self, service: ServiceId) -> bool:
        return any(self.service_of(key.client) == service for key in self.pool.ranges)

    def _hand_table(self, engine: Engine) -> None:
        """Only a table of all ranks says what has memory: told too early, an engine believes that all of it has.

        Nor one that is made while an earlier table's losses are carried out: it would call those blocks backed.
        """
        if not engine.is_complete or self.engines.get(engine.service) is not engine:
            return
        leaving = all_of([order.through for order in self.orders.leaving(frozenset(engine.ranks))])
        if not leaving.is_set:
            leaving.then(lambda: self._hand_table(engine))
            return
        self.tell(engine)
        self._send_table(engine)

    def _hand_late(self, engine: Engine) -> None:
        waiting = self._untold.get(engine.service)
        if waiting is None or self.engines.get(engine.service) is not engine:
            return
        if not self._has_ranges(engine.service):
            self._send_table(engine)
            return
        entry, seq, _ = waiting
        self._detach(engine)
        self.ack(entry.id, seq, errno.EAGAIN)

    def _send_table(self, engine: Engine) -> None:
        waiting = self._untold.pop(engine.service, None)
        if waiting is None:
            return
        entry, seq, body = waiting
        self.unheeded.heed(engine)
        told = KvTableMessage(abi=KV_ABI, table_bytes=engine.table.bytes, book_bytes=engine.book.bytes)
        self._send(entry.id, LinkType.KV_TABLE, told, seq, (engine.table.fd, engine.book.fd))
        self._journal.emit(
            EventKind.ATTACHED,
            service=entry.service,
            client=entry.id,
            reason=body.engine,
            blocks=body.blocks,
            ranks=body.ranks,
            mode=body.mode,
        )
        self.changed()

    def _join(self, engine: Engine, shim: ClientEntry, rank: Rank) -> None:
        try:
            engine.join(rank)
        except LayoutRefused as refused:
            self._ranks.pop(shim.id, None)
            self._refuse_engine(shim, f"KV layout refused: {refused}")

    def _refuse_engine(self, entry: ClientEntry, why: str) -> None:
        self._gating.counters.refuse("kv-engine")
        self._journal.emit(EventKind.NOTED, service=entry.service, client=entry.id, reason=why, pid=entry.process.pid)

    def tell(self, engine: Engine) -> None:
        """Write what changed into the table of an engine whose ranks are all known: backed means backed everywhere."""
        if not engine.is_complete:
            return
        now = engine.are_whole(engine.backed_columns() & ~engine.lost)
        before = engine.table.is_backed()
        now_ns = self._clock.now_ns()
        for is_backed in (False, True):
            blocks: Ints = np.flatnonzero((now != before) & (now == is_backed))
            if len(blocks):
                engine.table.record(blocks, is_backed, now_ns)

    # Leaving

    def client_joined(self, entry: ClientEntry) -> None:
        """Before it is welcomed: what its control page says counts from then on."""
        self.make_way(entry)
        self.tell_budget(entry)

    def tell_budget(self, entry: ClientEntry) -> None:
        if entry.role is not Role.HOOK:
            rule = self.settings.size_rule_mib * MIB
            self._gate.set_memory(entry.id, self.pool.handle_bytes, self.budget_bytes(entry), rule)
            free = {gpu: self.pool.free_handles(gpu) * self.pool.handle_bytes for gpu in self._uuid_of_gpu}
            self._gate.set_free(entry.id, free)

    def tell_budgets(self) -> None:
        """Every client, before it has a range, too: it sizes its cache by what it is told."""
        for entry in self._books.clients.values():
            self.tell_budget(entry)

    def client_left(self, entry: ClientEntry, *, is_dead: bool) -> None:
        """Its channels are on or gone, its link is closed."""
        self._parts.pop(entry.id, None)
        self._early.pop(entry.id, None)
        if entry.role is Role.HOOK:
            engine = self.engines.get(entry.service)
            if engine is not None and engine.hook == entry.id:
                self._detach(engine)
            self.changed()
            return
        self._drop_rank(entry)
        self.shim_left(entry.id)
        self.unheeded.forget(entry.id)
        for key in [key for key in self._held_left if key.client == entry.id]:
            del self._held_left[key]
        self.orders.client_gone(entry.id, entry.process, is_alive=not is_dead)
        self.pool.leave(entry.id, entry.process, is_alive=not is_dead)
        if not is_dead and self.pool.has_orphans(entry.process):
            self._wait_for_end(entry)
        self.changed()

    def _wait_for_end(self, entry: ClientEntry) -> None:
        """Its link broke first. As a rule the process is ending; else it may come back."""
        process = entry.process
        self._exits.forget(process)

        def gone() -> None:
            self._exits.forget(process)
            self.pool.process_gone(process)
            self.changed()

        if not self._exits.watch(process, process.pid, gone):
            gone()

    def _detach(self, engine: Engine) -> None:
        del self.engines[engine.service]
        self._untold.pop(engine.service, None)
        engine.table.detach()
        self.engine_left(engine)
        for rank in engine.ranks.values():
            for book in rank.books:
                if book.is_elastic and book.key in self.pool.ranges:
                    self.unheeded.expect(book)
        engine.close()

    def answer_whole(self, book: KvRangeBook, seq: int, missing: int) -> None:
        """All of it is backed, or its allocation fails and what came is free again once the client says so."""
        if missing:
            self._gating.counters.refuse("kv-memory")
        engine = self.engines.get(self.service_of(book.key.client))
        if engine is not None:
            self.tell(engine)
        self.unheeded.may_go(book.key.client)
        if seq:
            self.ack(book.key.client, seq, errno.ENOMEM if missing else 0)
        self.changed()

    # Questions

    def role_of(self, client: ClientId) -> Role:
        entry = self._books.clients.get(client)
        return entry.role if entry is not None else Role.NONE

    def service_of(self, client: ClientId) -> ServiceId:
        entry = self._books.clients.get(client)
        return entry.service if entry is not None else ServiceId(0)

    def is_connected(self, client: ClientId) -> bool:
        return client in self._books.clients

    def engines_with(self, role: Role) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role is role and engine.is_complete]

    def mapped(self, gpu: GpuIndex, role: Role) -> int:
        """Handles of this GPU that clients of a role have mapped."""
        return self.pool.mapped(gpu, (client.id for client in self._books.with_role(role)))

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.orders.check_integrity()
        for engine in self.engines.values():
            assert engine.hook in self._books.clients, "an engine without its hook"
            if not engine.is_broken:
                assert all(client in self._books.clients for client in engine.ranks), "a rank without its shim"
            if engine.is_complete and self.orders.is_idle and not engine.going.any():
                promised = engine.table.is_backed() & ~engine.are_whole(engine.backed_columns())
                assert not promised.any(), "the table promises memory that is not there"

    def close(self) -> None:
        self._exits.close()
        for engine in list(self.engines.values()):
            engine.close()
        self.engines.clear()
        self.pool.close()
