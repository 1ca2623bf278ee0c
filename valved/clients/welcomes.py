"""How many links an account may have made in a day, while somebody keeps what valved pays for of links that have ended.

That are pages and eventfds of each welcome until nobody keeps their files, and packets until the other end is read or
closed. A client may keep them for ever. Nothing proves of a single file that nobody does (DECISIONS.md). So welcomes
count for a day, and the count refuses only while valved is charged for far more than it uses (machine/kept.py). The
more is kept, the less is the count of all: however many accounts there are, what they keep has a bound. Where it cannot
be read, a larger count refuses always. Links of online services are not counted, nor those that come back to a valved
that was started anew. Refusals count as well: nobody need read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from valved.clients.accounts import LinkAccount
from valved.clients.identity import Peer
from valved.clients.turns import Buckets
from valved.machine.clock import Clock
from valved.machine.ports import WorkPort

DAY_NS = 24 * 3_600_000_000_000
LINKS = 1024  # at once, and a day afterwards
LINK_BYTES = 10 << 10  # of each, and what it leaves unread counts as more of them
BLIND_LINKS = 8192  # where nothing tells what is kept
LINK_NS, BLIND_LINK_NS = DAY_NS // LINKS, DAY_NS // BLIND_LINKS
REFUSAL_NS = LINK_NS // 8  # 1 KiB
KEPT_BYTES = 16 << 20  # from here on the counts refuse
KEPT_MOST = 48 << 20  # here all are 0. In a cluster valved has 256 MiB
LOOK_NS = 5_000_000_000
ALL = "all"  # accounts together: they may be many, with a link or two each
KEPT = "no more links of this account in a day while ended ones keep valved's memory: end who keeps it"
BLIND = f"{BLIND_LINKS} links in a day, and valved cannot see whether ended ones keep its memory: wait"


class Welcomes:
    def __init__(self, clock: Clock, work: WorkPort, kept_bytes: Callable[[], int | None]) -> None:
        self._clock = clock
        self._work = work
        self._read = kept_bytes
        # In time, as all buckets. None owes more than one link: who was served beyond its count had done no harm.
        self._made = Buckets(share=1.0, burst_ns=DAY_NS, most_owed_ns=LINK_NS)
        self._made_blindly = Buckets(share=1.0, burst_ns=DAY_NS, most_owed_ns=BLIND_LINK_NS)
        self._told = Buckets(share=1.0, burst_ns=DAY_NS, most_owed_ns=REFUSAL_NS)
        self._kept: int | None = None  # None: it could never be read
        self._looked_ns = clock.now_ns() - LOOK_NS
        self._is_looking = False
        self._back: Counter[int] = Counter()  # links to come of processes that a predecessor had welcomed

    def expect(self, pid: int) -> None:
        self._back[pid] += 1

    def why_not(self, peer: Peer) -> str:
        """Empty: it may be welcomed."""
        account = peer.account
        if self._back[peer.process.pid] > 0:
            return ""
        self._look_if_used(self._made, account)
        if self._kept is None:
            return BLIND if self._made_blindly.wait_ns(account, self._clock.now_ns()) else ""
        return KEPT if self._is_over(self._made, account) else ""

    def may_tell(self, account: LinkAccount) -> bool:
        """It is refused. Whether it hears of that: else its connection just ends, and a shim asks again."""
        self._look_if_used(self._told, account)
        is_over = self._told.wait_ns(account, self._clock.now_ns()) > 0
        if is_over if self._kept is None else self._is_over(self._told, account):
            return False
        self._take(self._told, account, REFUSAL_NS)
        return True

    def took(self, peer: Peer) -> None:
        """It is welcomed now."""
        if self._back[peer.process.pid] > 0:
            self._back[peer.process.pid] -= 1
            return
        self._count(peer.account, 1.0)

    def left_unread(self, account: LinkAccount, size: int) -> None:
        """By a link that ends: it may keep its socket."""
        self._count(account, size / LINK_BYTES)

    def _count(self, account: LinkAccount, links: float) -> None:
        self._take(self._made, account, round(links * LINK_NS))
        self._take(self._made_blindly, account, round(links * BLIND_LINK_NS))

    def _take(self, made: Buckets, account: LinkAccount, ns: int) -> None:
        for who in (account, ALL):
            made.took(who, ns, self._clock.now_ns())

    def _is_over(self, made: Buckets, account: LinkAccount) -> bool:
        if self._kept is None or self._kept <= KEPT_BYTES:
            return False
        part = (KEPT_MOST - self._kept) / (KEPT_MOST - KEPT_BYTES)
        return made.taken_ns(account, self._clock.now_ns()) >= DAY_NS * part

    def _look_if_used(self, made: Buckets, account: LinkAccount) -> None:
        now_ns, both = self._clock.now_ns(), (account, ALL)
        if any(made.taken_ns(who, now_ns) >= DAY_NS / 2 for who in both):
            self._look(now_ns)

    def _look(self, now_ns: int) -> None:
        if not self._is_looking and now_ns - self._looked_ns >= LOOK_NS:
            self._is_looking, self._looked_ns = True, now_ns
            self._work.do(self._read, self._saw)

    def _saw(self, kept: int | None, error: Exception | None) -> None:
        """What was read before holds while it cannot be read: a command may run in valved's container for a moment."""
        self._is_looking = False
        self._kept = self._kept if kept is None or error is not None else kept
        if self._kept is not None and self._kept > KEPT_BYTES:  # who comes in hours is not judged by this
            self._clock.call_at_ns(self._looked_ns + LOOK_NS, lambda: self._look(self._clock.now_ns()))
