"""How many blocks the engines of one account may have in tables, and how often it may have tables made.

valved writes a table itself: that takes time of the loop, and where the hook does not bring its memory (kv_files.py)
also memory of valved. Both are for a client to choose, and every process of an account may attach an engine. Engines of
online services have what they ask for. What all others may have together leaves room for them. Of that an account may
have as much as it leaves free: a tenant may have many, and however much they take, the next one finds something.

Who keeps a shared file that it gave up keeps its pages, and those that valved made stay charged to valved's control
group. Nobody can see whether anybody keeps one. So tables of valved's memory count for months, in such shares. What any
attachment takes counts for days: jobs of some minutes may come one after another.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

from valved.clients.accounts import LinkAccount, account_of
from valved.clients.turns import BURST_NS, Buckets
from valved.machine.clock import Clock
from valved.model.ids import ClientId, Role
from valved.state.registry import Books, ClientEntry

# A block is eight bytes of a table. Of one token each, a large GPU has a million for an engine, and a node has eight.
BLOCKS_OF_ALL = 16 << 20  # 128 MiB
SHARE = 0.02  # of the loop, for one account that attaches again and again
ATTACH_NS, BLOCK_NS = 250_000, 3  # what it takes to make a table, to tell of it and to drop it
KEPT_OF_ALL = 8 << 20  # 64 MiB of valved's memory that all accounts may keep of each. In a cluster it has 256
DAY_NS = 24 * 3_600_000_000_000
FILE = 256  # a file without a page takes 1.2 KiB of valved's memory
BOOK = FILE + 512  # and valved writes the first page of a book

Cost = tuple[int, int]
"""What a hook may keep of valved's memory: in files whatever their size, and in a table; in blocks."""


@dataclass(slots=True)
class KeptTables:
    """What each account may have kept of valved's memory, in blocks."""

    half_ns: int  # in this time half of it is forgiven
    seen_ns: int
    cure: str
    total: float = 0.0
    of: dict[LinkAccount, float] = field(default_factory=dict)

    def check(self, account: LinkAccount, blocks: int, now_ns: int) -> None:
        """OSError: that is too much."""
        if now_ns - self.seen_ns > self.half_ns // 24:  # not each time: there may be thousands of accounts
            part = 0.5 ** ((now_ns - self.seen_ns) / self.half_ns)
            self.of = {who: left for who, kept in self.of.items() if (left := kept * part) >= FILE}
            self.total, self.seen_ns = sum(self.of.values()), now_ns
        mine = self.of.get(account, 0.0)
        if mine + blocks > (KEPT_OF_ALL - self.total + mine) / 2:
            text = f"{account.called()} may keep too much of valved's memory since it attaches engines"
            raise OSError(errno.EDQUOT, f"{text}: {self.cure}")

    def took(self, account: LinkAccount, blocks: int) -> None:
        before = self.of.pop(account, 0.0)
        if after := max(0.0, before + blocks):  # else nothing is remembered: each pod is an account
            self.of[account] = after
        self.total += after - before


class AttachBounds:
    def __init__(self, registry: Books, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._made = Buckets(SHARE, BURST_NS)  # by account
        cure = "use the valve_hook of this version, whose tables take none"
        self._tables = KeptTables(30 * DAY_NS, clock.now_ns(), cure)
        # Inodes, and first pages of books.
        self._files = KeptTables(DAY_NS, clock.now_ns(), "half of it is forgiven in a day")

    def admit_bare(self, hook: ClientEntry) -> None:
        """The hook gets a table now whose memory it will bring. OSError: it gets none."""
        if self._registry.services[hook.service].role is Role.ONLINE:
            return
        account = self._admit(hook, FILE, 0)
        self._made.took(account, ATTACH_NS, self._clock.now_ns())
        self._files.took(account, FILE)

    def admit(self, hook: ClientEntry, blocks: int, others: Mapping[ClientId, int], *, is_brought: bool) -> Cost:
        """The hook gets a table of so many blocks now. `others`: what every other hook has; `is_brought`: it has
        brought the memory. OSError: it gets none."""
        if self._registry.services[hook.service].role is Role.ONLINE:
            return 0, 0
        cost, now_ns = (BOOK, 0) if is_brought else (BOOK + FILE, blocks), self._clock.now_ns()
        account = self._admit(hook, *cost)
        self._made.took(account, ATTACH_NS, now_ns)
        mine, free = blocks, BLOCKS_OF_ALL
        for client, count in others.items():
            other = self._registry.clients[client]
            if self._registry.services[other.service].role is Role.ONLINE:
                continue
            if account_of(other.uid, other.cgroup) == account:
                mine += count
            else:
                free -= count
        if mine > free // 2:
            text = f"engines of {account.called()} would have {mine} blocks; {free // 2} are possible"
            raise OSError(errno.EDQUOT, text)
        self._made.took(account, BLOCK_NS * blocks, now_ns)
        self._files.took(account, cost[0])
        self._tables.took(account, cost[1])
        return cost

    def _admit(self, hook: ClientEntry, files: int, blocks: int) -> LinkAccount:
        account, now_ns = account_of(hook.uid, hook.cgroup), self._clock.now_ns()
        if self._made.wait_ns(account, now_ns):
            raise OSError(errno.EAGAIN, f"{account.called()} attaches engines too often")
        self._files.check(account, files, now_ns)
        if blocks:
            self._tables.check(account, blocks, now_ns)
        return account

    def was_untold(self, hook: ClientEntry, cost: Cost) -> None:
        """Table and book are gone, and the hook never got them: nobody keeps them."""
        if self._registry.services[hook.service].role is not Role.ONLINE:
            account = account_of(hook.uid, hook.cgroup)
            self._files.took(account, -cost[0])
            self._tables.took(account, -cost[1])
