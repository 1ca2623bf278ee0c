"""How many blocks the engines of one account may have in tables, and how often it may have tables made.

valved writes a table itself: its size is memory of valved, and to make it takes time of the loop. Both are for a client
to choose, and every process of an account may attach an engine. Engines of online services have what they ask for. What
all others may have together leaves room for them. Of that an account may have as much as it leaves free: a tenant may
have many accounts, and however much they take, the next one finds something.

Who keeps the mapping of a table that it gave up keeps its pages, and they stay charged to valved's control group.
Nobody can see whether there is such a mapping. So there is a bound on how many an account has made in an hour.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from valved.clients.accounts import account_of
from valved.clients.turns import BURST_NS, Buckets
from valved.machine.clock import Clock
from valved.model.ids import ClientId, Role
from valved.state.registry import Books, ClientEntry

# A block is eight bytes of a table. Of one token each, a large GPU has a million for an engine, and a node has eight.
BLOCKS_OF_ALL = 16 << 20  # 128 MiB
SHARE = 0.02  # of the loop, for one account that attaches again and again
ATTACH_NS, BLOCK_NS = 250_000, 3  # what it takes to make a table, to tell of it and to drop it
MADE = BLOCKS_OF_ALL  # blocks of one account, and as many again in each hour
HOUR_NS = 3_600_000_000_000


class AttachBounds:
    def __init__(self, registry: Books, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._made = Buckets(SHARE, BURST_NS)  # by account
        self._blocks = Buckets(MADE / HOUR_NS, MADE)  # of each, instead of time

    def admit(self, hook: ClientEntry, blocks: int, others: Mapping[ClientId, int]) -> None:
        """The hook gets a table of so many blocks now. `others`: what every other hook has. OSError: it gets none."""
        if self._registry.services[hook.service].role is Role.ONLINE:
            return
        account, now_ns = account_of(hook.uid, hook.cgroup), self._clock.now_ns()
        if self._made.wait_ns(account, now_ns) or self._blocks.wait_ns(account, now_ns):
            raise OSError(errno.EAGAIN, f"{account.called()} attaches engines too often")
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
        self._blocks.took(account, blocks, now_ns)

    def was_untold(self, hook: ClientEntry, blocks: int) -> None:
        """Its table is gone, and the hook never got it: nobody keeps a mapping."""
        if self._registry.services[hook.service].role is not Role.ONLINE:
            self._blocks.took(account_of(hook.uid, hook.cgroup), -blocks, self._clock.now_ns())
