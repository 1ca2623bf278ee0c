"""Elastic ranges that no hook heeds (yet): no answer may rest on a hole.

An offline engine starts on virtual memory: its holes show the zero page, and its hook withholds the blocks there, once
it has read the table. Between the first scheduled step and that moment the process launches nothing: the shim asks
before a step (KV_STEP), and is told EAGAIN until a hook reads the table or no hole is left. A process for which neither
comes in time is backed whole, with its launches held, or ended by name. It is never left to compute on the zero page.

Warming up on the zero page is harmless, so before the first step there is more time. A shim that does not know
KV_STEP has no elastic ranges: they are whole before their allocation returns, or it fails.
"""

from __future__ import annotations

import errno

from valved.abi.kv_link import KvRangeMessage
from valved.abi.link import Feature
from valved.kv.books import KvBooks
from valved.kv.changes import BackHeld, Changes, EndProcess
from valved.kv.engines import Engine
from valved.kv.slots import KvRangeBook, RangeKey
from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import ClientId, Role
from valved.state.journal import Journal
from valved.state.registry import ClientEntry

REASON = "no hook reads the table of the process's KV memory"
WARM_UPS = 10  # times attach_s: compiling and capturing may take minutes, and no step has begun


class UnheededRanges:
    def __init__(self, books: KvBooks, journal: Journal, clock: Clock, changes: Changes) -> None:
        self._books = books
        self._pool = books.pool
        self._holds = books.holds
        self._registry = books.registry
        self._journal = journal
        self._clock = clock
        self._changes = changes
        self._attach_ns = round(books.settings.attach_s * 1e9)
        self._stepping: dict[ClientId, int] = {}  # since when
        self._refused: dict[RangeKey, str] = {}  # ranges that are not in our books, and why their process cannot go on
        self._backing: set[int] = set()  # uids of ranges that are being backed for it

    def may_begin(self, entry: ClientEntry) -> bool:
        """Whether an elastic range of this client may have holes when its allocation returns."""
        return entry.role is Role.OFFLINE and bool(entry.features & Feature.KV_STEP)

    def expect(self, book: KvRangeBook) -> None:
        """An elastic range has come, or its engine has left: a hook must read its table in time."""
        born_ns = self._clock.now_ns()
        self._clock.call_at_ns(born_ns + self._attach_ns, lambda: self._look(book, born_ns))

    def step(self, entry: ClientEntry, newest: int) -> int:
        """KV_STEP. 0, or EAGAIN: it launches nothing until this is heeded. EBUSY: we have not heard of that range."""
        why = self._refused.get(RangeKey(entry.id, newest))
        if why:
            self._holds.hold(entry.id, REASON)
            self._changes.put(EndProcess(entry.id, why))
            return errno.EAGAIN
        if why is None and RangeKey(entry.id, newest) not in self._pool.ranges:
            return errno.EBUSY
        if all(self._is_safe(book) for book in self._pool.of_client(entry.id)):
            return 0
        if entry.id not in self._stepping:
            self._stepping[entry.id] = self._clock.now_ns()
            for book in self._pool.of_client(entry.id):
                self.expect(book)
        self._holds.hold(entry.id, REASON)
        return errno.EAGAIN

    def refused(self, key: RangeKey, body: KvRangeMessage, reason: str) -> None:
        """A range that this valved will not have: its holes stay holes, so a process that begins a step with it ends
        by name.

        Without holes it is ordinary memory, which valved does not move.
        """
        if sum(known.client == key.client for known in self._refused) < self._books.settings.ranges_per_client:
            has_holes = body.held < body.slots
            self._refused[key] = f"this valved refuses its KV memory: {reason}" if has_holes else ""

    def heed(self, engine: Engine) -> None:
        """The hook of this engine has been handed the table of all its ranks."""
        if not engine.heeds_table:
            return
        for client, rank in engine.ranks.items():
            for book in rank.books:
                book.is_heeded = True
            self.may_go(client)

    def backed(self, book: KvRangeBook) -> None:
        """What was done for a `BackHeld` has ended."""
        self._backing.discard(book.uid)
        entry = self._registry.clients.get(book.key.client)
        if entry is None or entry.role is not Role.OFFLINE or not self._is_here(book) or self._is_safe(book):
            self.may_go(book.key.client)
            return
        why = f"{REASON}, and there is not enough memory to back it whole"
        self._changes.put(EndProcess(book.key.client, why))

    def forget(self, client: ClientId) -> None:
        self._stepping.pop(client, None)
        self._holds.forget(client)
        for key in [key for key in self._refused if key.client == client]:
            del self._refused[key]

    def may_go(self, client: ClientId) -> None:
        """Its launches, if no range of it has a hole without a hook that reads its table."""
        if all(self._is_safe(book) for book in self._pool.of_client(client)):
            self._stepping.pop(client, None)
            self._holds.release(client, REASON)

    def _is_safe(self, book: KvRangeBook) -> bool:
        return book.is_heeded or not book.is_elastic or book.is_whole

    def _is_attached(self, client: ClientId) -> bool:
        engine = self._books.engine_of(client)
        return engine is not None and engine.is_complete

    def _is_here(self, book: KvRangeBook) -> bool:
        return self._pool.ranges.get(book.key) is book

    def _look(self, book: KvRangeBook, born_ns: int) -> None:
        client, now_ns = book.key.client, self._clock.now_ns()
        entry = self._registry.clients.get(client)
        if entry is None or not self._is_here(book) or self._is_safe(book) or book.uid in self._backing:
            return
        if now_ns - self._stepping.get(client, born_ns) < self._attach_ns:
            return  # it began to step after this look was asked for: the one that `step` asked for comes
        if entry.role is not Role.OFFLINE:  # told again with holes: real memory, unless its hook is back
            if not self._is_attached(client):
                self._changes.put(BackHeld(book))
            return
        is_warm = client in self._stepping or self._is_attached(client)
        if not is_warm and now_ns - born_ns < WARM_UPS * self._attach_ns:
            self._clock.call_at_ns(now_ns + self._attach_ns, lambda: self._look(book, born_ns))
            return
        self._journal.emit(
            EventKind.NOTED,
            service=entry.service,
            client=client,
            reason=f"{REASON}: valved backs its whole cache, or ends it",
            pid=entry.process.pid,
        )
        self._holds.hold(client, REASON)
        self._backing.add(book.uid)
        self._changes.put(BackHeld(book))
