"""Which handles are available, and for which service: free ones, those that a card may still make, promised ones.

A service that waits for memory has a `Need` here, from the moment it asks until the memory has arrived. What can be had
counts for the oldest need first: no other need takes what a reclaim freed for it, and nothing is lent meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from valved.config import MIB, MemoryTable
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.journey import Pause
from valved.kv.orders import Order
from valved.kv.slots import Ints
from valved.machine.cards import CardUse
from valved.machine.clock import Clock
from valved.model.ids import ClientId, GpuIndex, ProcessId, Role, ServiceId
from valved.state.full import FullCards
from valved.state.kept import KeptMemory, KvUse, OnlineNames, online_names
from valved.state.registry import ClientEntry
from valved.state.saved import SavedPeak

UNLIMITED = 1 << 30  # handles
MADE = 1024  # orders: more than come back while a card is read


@dataclass(slots=True, kw_only=True, eq=False)
class Need:
    """Handles that an engine waits for."""

    service: ServiceId
    handles: dict[GpuIndex, int]
    promised: dict[GpuIndex, int]  # of these, what no other need may take: all, until they are on their way
    rung_ns: int  # when its hook rang, by its own clock; as `asked_ns` where no hook rang
    asked_ns: int
    is_waited_for: Callable[[], bool]  # by a request, now; else it is for the reserve
    over: Pause  # whoever asked asks no more: several needs may be tries of one growth
    has_told: bool = False  # an engine was told of a loss for it
    coming: list[list[Order]] = field(default_factory=list)  # by them handles are being taken for it, stage by stage
    begun: Pause = field(default_factory=Pause)  # now is the time to prepare for them
    partly: Pause = field(default_factory=Pause)  # the next stage is free
    ready: Pause = field(default_factory=Pause)  # all that could be taken is free
    served: Pause = field(default_factory=Pause)  # the reclaim for it is through, or goes on by itself
    given: Pause = field(default_factory=Pause)  # and has arrived, or will not

    def hangs(self, since_ns: int) -> bool:
        """Its process has not mapped what is all on its way to it: nobody else gets less for that."""
        return not any(self.promised.values()) and self.asked_ns < since_ns

    def stage_came(self) -> None:
        came, self.partly = self.partly, Pause()
        came.set()

    def set_ready(self) -> None:
        for pause in (self.ready, self.begun, self.partly):
            pause.set()


class Supply:
    def __init__(
        self,
        books: KvBooks,
        clock: Clock,
        full: FullCards,
        remember_ns: int,
        away: Callable[[], Mapping[ServiceId, frozenset[ProcessId]]],
    ) -> None:
        """`away`: see online_names."""
        self.is_allowed = True  # harvesting, not draining: memory may be taken from offline work
        self.cards: Mapping[bytes, CardUse] = {}
        self.ordered: Mapping[GpuIndex, int] = {}  # handles that were taken first, for a need that is about to be told
        # Handles that may be made; less than none where orders under way to make some ask for more than there is.
        self._room: dict[GpuIndex, int] = {info.index: UNLIMITED for info in books.gpus}
        self._beyond: dict[GpuIndex, int] = {}  # and so many more, if the card alone set the limit
        self._needs: list[Need] = []  # the oldest first
        self._made: deque[tuple[int, GpuIndex, int]] = deque(maxlen=MADE)  # handles, and when
        self._uuids = {info.index: info.uuid for info in books.gpus}
        self._kept = KeptMemory(self._uuids, books.settings.online_mib * MIB, remember_ns)
        self.peaks = self._kept.peaks
        self._by_pid: dict[GpuIndex, Mapping[int, int]] = {}  # as the card said last
        self._away = away
        self._named_by: object = None  # the books and those away, from which ...
        self._names = OnlineNames(of_client={}, of_pid={}, untold=frozenset())  # ... these names are
        self._books = books
        self._clock = clock
        self.full = full
        self.see_cards({})

    @property
    def settings(self) -> MemoryTable:
        return self._books.settings

    # Needs

    def open(self, need: Need) -> None:
        self._needs.append(need)

    def note_given(self, need: Need, orders: Iterable[Order]) -> None:
        """A part of it is on its way."""
        for order in orders:
            gpu = order.slots.owner.gpu
            need.promised[gpu] = max(0, need.promised[gpu] - len(order.slots))

    def settle(self, need: Need | None) -> None:
        """What was asked for is there, or will not be."""
        if need is not None:
            self._needs.remove(need)
            need.given.set()

    def is_pressed(self, gpus: Iterable[GpuIndex]) -> bool:
        """An engine waits for memory there, until it has arrived: none is lent now, least of all freed memory."""
        wanted, since_ns = set(gpus), self._clock.now_ns() - round(self.settings.order_s * 1e9)
        return any(not wanted.isdisjoint(need.handles) and not need.hangs(since_ns) for need in self._needs)

    @property
    def oldest(self) -> Need | None:
        return self._needs[0] if self._needs else None

    def _promised(self, gpu: GpuIndex, service: ServiceId | None) -> int:
        """Handles of this GPU that others asked for before this service did."""
        promised = 0
        for need in self._needs:
            if need.service == service:
                break
            promised += need.promised.get(gpu, 0)
        return promised

    # What can be had

    def affordable(self, gpu: GpuIndex, service: ServiceId | None = None, *, for_good: bool = False) -> int:
        """Handles of this GPU that are available without taking any from an engine. `for_good`: an offline one that
        could not lose them again."""
        entry = self._books.registry.services.get(service) if service is not None else None
        kept = lost = 0
        if entry is not None and entry.role is Role.OFFLINE:
            kept, lost = self._kept_handles(gpu), self._lost_for_good(gpu) if for_good else 0
        if entry is not None and self.full.is_full_for(gpu, entry.id):
            kept = self._room[gpu]
        return max(0, self._at_hand(gpu, kept) - lost - self._promised(gpu, service))

    def _at_hand(self, gpu: GpuIndex, kept: int = 0) -> int:
        pool, room = self._books.pool, self._room[gpu] - kept
        free = pool.free_handles(gpu)
        return free + max(0, min(room, pool.most - pool.total)) if room > 0 else free

    def missing(self, batch: list[Need]) -> dict[GpuIndex, int]:
        """What must be taken from offline work, on each GPU, for these needs to be met."""
        wanted: dict[GpuIndex, int] = {}
        full: set[GpuIndex] = set()
        for need in batch:
            for gpu, count in need.handles.items():
                wanted[gpu] = wanted.get(gpu, 0) + count
                if self.full.is_full_for(gpu, need.service):
                    full.add(gpu)
        missing: dict[GpuIndex, int] = {}
        for gpu, count in wanted.items():
            others = sum(need.promised.get(gpu, 0) for need in self._needs if need not in batch)
            short = count - max(0, self._at_hand(gpu, self._room[gpu] if gpu in full else 0) - others)
            if short > 0:
                missing[gpu] = short
        return missing

    def within_reach(self, engine: Engine) -> dict[GpuIndex, int]:
        return {gpu: self.affordable(gpu, engine.service) for gpu in engine.gpus}

    def fitting(self, engine: Engine, columns: Ints) -> int:
        """How many of these, from the first on."""
        return engine.fitting(columns, self.within_reach(engine))

    def short(self, engine: Engine, lacking: Mapping[GpuIndex, int]) -> list[GpuIndex]:
        """Where something must be taken for it to get these."""
        return [gpu for gpu, count in lacking.items() if count > self.affordable(gpu, engine.service)]

    def losers(self, gpus: Iterable[GpuIndex]) -> list[Engine]:
        """Offline engines that could lose something on these GPUs. One that is late is asked only where no other is."""
        if not self.is_allowed:
            return []
        able = [
            engine
            for engine in self._books.engines_with(Role.OFFLINE)
            if not engine.gpus.isdisjoint(gpus) and engine.can_lose and engine.takes_any()
        ]
        return [engine for engine in able if not engine.is_late] or able

    def takeable(self, gpu: GpuIndex) -> int:
        """Handles of this GPU that offline engines could lose."""
        engines = self._books.engines_with(Role.OFFLINE) if self.is_allowed else []
        return sum([one.takeable_handles()[gpu] for one in engines if gpu in one.gpus and one.can_lose])

    def obtainable(self, engine: Engine, within_reach: Mapping[GpuIndex, int]) -> int:
        """Columns that could be had, from whomever: asking for more would count as a reclaim and bring nothing."""
        found = engine.columns
        for gpu, most in engine.most_handles.items():
            found = min(found, (within_reach[gpu] + self.takeable(gpu) + self.ordered.get(gpu, 0)) // most)
        return found

    # Room for new handles

    def make(self, gpu: GpuIndex, most: int) -> int:
        """Book up to `most` handles that are about to be made. How many there is room for."""
        made = min(most, max(0, self._room[gpu]))
        self._room[gpu] -= made
        return made

    def trim(self, gpu: GpuIndex, most: int, domain: str) -> int:
        """Free handles of other trust domains go back to the driver, and make room for new ones. How many."""
        foreign = self._books.pool.trim(gpu, most, but=domain, is_awaited=True)
        self._room[gpu] += foreign
        return foreign

    def note_made(self, gpu: GpuIndex, count: int, left: int) -> None:
        """A card that is being read may not have counted these. `left`: so many could not be made."""
        self._made.append((self._clock.now_ns(), gpu, count))
        is_known = gpu in self._by_pid or not self.full.is_full(gpu)  # else it is all that is known of the card
        self._room[gpu] = self._room[gpu] + left if is_known else 0

    def see_cards(self, cards: Mapping[bytes, CardUse]) -> None:
        """How many handles may still be made on each GPU, by what the cards say now and by the settings."""
        self.cards = cards
        settings, pool = self.settings, self._books.pool
        self._by_pid |= {gpu: cards[uuid].by_pid for gpu, uuid in self._uuids.items() if uuid in cards}
        self.services_changed(cards)
        for gpu, uuid in self._uuids.items():
            room, card = UNLIMITED, cards.get(uuid)
            if card is None and gpu in self._by_pid:
                continue  # NVML does not answer any more: what it left is still all that may be made
            if card is not None:
                self._return_to_driver(gpu, card, settings.spare_mib * MIB + self._kept.of(gpu).plain_bytes)
                left = (card.total_bytes - card.used_bytes - settings.spare_mib * MIB) // pool.handle_bytes
                made = sum(count for at_ns, there, count in self._made if there == gpu and at_ns >= card.read_ns)
                room = left - made
            by_card = room
            if settings.pool_mib:
                room = min(room, settings.pool_mib * MIB // pool.handle_bytes - pool.count(gpu))
            self._beyond[gpu] = by_card - room
            is_full = card is None and self.full.is_full(gpu)
            self._room[gpu] = 0 if is_full else room - self._books.orders.creating(gpu)

    def _return_to_driver(self, gpu: GpuIndex, card: CardUse, spare_bytes: int) -> None:
        """Free handles belong to the pool alone: where the card is short, ordinary memory goes before them."""
        short = spare_bytes - (card.total_bytes - card.used_bytes)
        self._books.pool.trim(gpu, max(0, -(-short // self._books.pool.handle_bytes)))

    def make_way(self, entry: ClientEntry) -> None:
        """An offline process joins: its weights are ordinary memory, and free handles can be made anew."""
        if entry.role is Role.OFFLINE:
            for gpu in self._uuids:
                if not self.is_pressed([gpu]):
                    self._books.pool.trim(gpu, self._books.pool.free_handles(gpu))

    def used_bytes(self, uuid: bytes) -> int:
        return self.cards[uuid].used_bytes if uuid in self.cards else 0

    # What a client may hope for

    def budget_bytes(self, entry: ClientEntry) -> int:
        """On the scarcest of its GPUs: what it holds, what is free, and for online what offline work could give. 0: no
        limit is known."""
        if not self.cards:
            return 0
        gpus = entry.gpus() or set(self._uuids)
        return min(self._hope(entry, gpu) for gpu in gpus) * self._books.pool.handle_bytes

    def _hope(self, entry: ClientEntry, gpu: GpuIndex) -> int:
        hope = self._books.pool.mapped(gpu, (entry.id,))
        if entry.role is Role.ONLINE:
            return max(1, hope + self._at_hand(gpu) + self.takeable(gpu))
        return max(1, hope + self._at_hand(gpu, self._kept_handles(gpu)))

    # What online services will need

    @property
    def keeps(self) -> bool:
        return self._kept.is_wanted

    def services_changed(self, read: Container[bytes] = ()) -> None:
        """What each name of online services has on each GPU, and so what offline work must leave. `read`: cards that
        have just said who has how much."""
        registry, now_ns, away = self._books.registry, self._clock.now_ns(), self._away()
        if self._named_by != (named_by := (registry.revision, away)):
            self._named_by, names = named_by, online_names(registry, away)
            self._names = self._names if names == self._names else names  # the same is compared fastest
        kv = kv_uses(self._books, self._names.of_client)
        for gpu, uuid in self._uuids.items():
            by_pid = self._by_pid.get(gpu)
            self._kept.look(gpu, self._names, by_pid, kv.get(gpu, {}), now_ns, is_read=uuid in read)

    def _kept_handles(self, gpu: GpuIndex) -> int:
        """Room that offline work must leave. What it has as KV memory of an engine that can lose it is not missing."""
        plain = -(-self._kept.of(gpu).plain_bytes // self._books.pool.handle_bytes)
        return max(0, plain - self._beyond[gpu])  # `pool_mib` bounds KV memory alone

    def _lost_for_good(self, gpu: GpuIndex) -> int:
        """Handles, free ones or new ones, that must be left beside it: nobody else could give them."""
        return max(0, -(-self._kept.of(gpu).kv_bytes // self._books.pool.handle_bytes) - self.takeable(gpu))

    def kept_bytes(self, gpu: GpuIndex) -> int:
        """What an allocation of offline work past the pool must leave free."""
        kept, pool = self._kept.of(gpu), self._books.pool
        at_hand = (pool.free_handles(gpu) + self.takeable(gpu)) * pool.handle_bytes
        return kept.plain_bytes + max(0, kept.kv_bytes - at_hand)

    def restore(self, saved: Iterable[SavedPeak]) -> None:
        self.peaks.restore(saved, self._clock.now_ns())
        self.services_changed()


def kv_uses(books: KvBooks, name_of: Mapping[ClientId, str]) -> dict[GpuIndex, dict[str, KvUse]]:
    """What each name has as KV memory, on the GPUs where it has ranges."""
    mapped, coming, bare = (Counter[tuple[GpuIndex, str]]() for _ in range(3))
    for key, book in books.pool.ranges.items():
        if (name := name_of.get(key.client)) is not None:
            mapped[book.gpu, name] += int((book.at >= 0).sum())
            bare[book.gpu, name] += len(book.empty_slots())
    for (gpu, client), handles in books.orders.coming().items():
        if (name := name_of.get(client)) is not None:
            coming[gpu, name] += handles
    found, size = defaultdict[GpuIndex, dict[str, KvUse]](dict), books.pool.handle_bytes
    for gpu, name in {*mapped, *coming}:
        place = gpu, name
        found[gpu][name] = KvUse(mapped=size * mapped[place], coming=size * coming[place], bare=size * bare[place])
    return found
