"""How many links an account may have made in a day, while somebody keeps the pages of links that have ended.

Each welcome makes a few pages that valved pays for until nobody keeps their files, and a client may keep them for ever.
Nothing proves of a single file that nobody does (DECISIONS.md). So welcomes count for a day, and the count refuses only
while valved is charged for far more than it uses (machine/kept.py). Where that cannot be read, a larger count refuses
always. Links of online services are not counted, nor those that come back to a valved that was started anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from valved.clients.identity import Peer
from valved.clients.turns import Buckets
from valved.machine.clock import Clock
from valved.machine.ports import WorkPort

DAY_NS = 24 * 3_600_000_000_000
LINKS = 1024  # at once, and a day afterwards. Each costs about 10 KiB
BLIND_LINKS = 8192  # where nothing tells what is kept
LINK_NS, BLIND_LINK_NS = DAY_NS // LINKS, DAY_NS // BLIND_LINKS
KEPT_BYTES = 16 << 20  # 4,096 links, with a page of valved each
LOOK_NS = 5_000_000_000
KEPT = f"{LINKS} links in a day, and ended ones keep valved's memory: end who keeps it, or wait 2 min"
BLIND = f"{BLIND_LINKS} links in a day, and valved cannot see whether ended ones keep its memory: wait"


class Welcomes:
    def __init__(self, clock: Clock, work: WorkPort, kept_bytes: Callable[[], int | None]) -> None:
        self._clock = clock
        self._work = work
        self._read = kept_bytes
        # In time, as all buckets. None owes more than one link: who was served beyond its count had done no harm.
        self._made = Buckets(share=1.0, burst_ns=DAY_NS, most_owed_ns=LINK_NS)
        self._made_blindly = Buckets(share=1.0, burst_ns=DAY_NS, most_owed_ns=BLIND_LINK_NS)
        self._kept: int | None = None  # None: it could never be read
        self._looked_ns = clock.now_ns() - LOOK_NS
        self._is_looking = False
        self._back: Counter[int] = Counter()  # links to come of processes that a predecessor had welcomed

    def expect(self, pid: int) -> None:
        self._back[pid] += 1

    def why_not(self, peer: Peer) -> str:
        """Empty: it may be welcomed."""
        account, now_ns = peer.account, self._clock.now_ns()
        if self._back[peer.process.pid] > 0:
            return ""
        if self._made.taken_ns(account, now_ns) >= DAY_NS / 2:
            self._look(now_ns)
        if self._kept is None:
            return BLIND if self._made_blindly.wait_ns(account, now_ns) else ""
        return KEPT if self._kept > KEPT_BYTES and self._made.wait_ns(account, now_ns) else ""

    def took(self, peer: Peer) -> None:
        """It is welcomed now."""
        if self._back[peer.process.pid] > 0:
            self._back[peer.process.pid] -= 1
            return
        account = peer.account
        self._made.took(account, LINK_NS, self._clock.now_ns())
        self._made_blindly.took(account, BLIND_LINK_NS, self._clock.now_ns())

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
