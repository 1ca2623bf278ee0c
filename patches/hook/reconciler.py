"""The hook's one state machine, the same for every engine: read the table, act on losses, keep the book.

An `EngineAdapter` carries out what is decided here in the engine's own terms. Nothing raised inside reaches the engine.
After any failure the ledger may be wrong, so it is asked no more (`is_sure`): the next loss is handled the coarse way.
When that fails, too, nothing is reclaimed from this engine any more (mode NONE); what valved had begun to take by then
ends requests with an error, for nobody can vouch for their tokens, and blocks without memory stay withheld.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from valve_hook.ledger import Ledger
from valve_hook.offers import Offers
from valve_hook.sessions import Session
from valve_hook.shared import DETACHED, TARGET_BLOCKS, Blocks, Change
from valve_hook.wire import Mode

log = logging.getLogger("valve")
Mask = NDArray[np.bool_]
STEPS_ROUND = 1 << 31  # then from 1, for 0 is an engine that never made one; a calm step only adds, up to the double


class EngineAdapter(Protocol):
    """What the hook asks of an engine, in the engine's own terms."""

    def discard(self, running: Mapping[str, int], left: Collection[str]) -> dict[str, Sequence[int]]:
        """Send requests back to waiting, newest first, their output in flight dropped. `running`: how many blocks of
        each are sound. Returns the requests sent back, each with its sound blocks that are kept until it comes back.
        """

    def forget(self, blocks: Blocks) -> int:
        """Drop them from the prefix cache; how many of them held something."""

    def withhold(self, blocks: Blocks) -> None:
        """Hand them out to no request."""

    def release(self, blocks: Blocks) -> None:
        """They may be handed out again."""

    def reset(self) -> int:
        """The coarse way: all requests back to waiting, the prefix cache emptied."""

    def abandon(self) -> int:
        """The last way: requests that hold blocks end with an error, output in flight is dropped. How many did."""

    def arrange(self, column_of: Blocks) -> None:
        """Hand out free blocks column by column from now on."""

    def free_columns(self) -> Sequence[int]:
        """Columns whose blocks are all free."""

    def gauges(self) -> tuple[int, int, int, int]:
        """(blocks in use, blocks wanted, requests running, requests waiting)."""


class Linked(Protocol):
    """The link, or what stands for it where several schedulers decide alike."""

    def next_session(self, last: Session | None) -> Session | None:
        """The oldest that was begun after this one."""

    def need(self, wanted_blocks: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Receipts:
    """As in the book; all only rise."""

    lost_blocks: int = 0
    hit_requests: int = 0
    lost_tokens: int = 0
    dropped_tokens: int = 0
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class Reconciler:
    link: Linked
    engine: EngineAdapter
    ledger: Ledger
    blocks: int
    mode: Mode
    agree: Callable[[bool], bool] = bool  # whether all went well in every process that decides alike; alone: here
    lends: bool = True  # False: valved is told NONE; what it had begun by then is acted on in `mode` all the same
    is_sure: bool = True  # False after any failure: what the ledger says may be wrong
    receipts: Receipts = field(default_factory=Receipts)
    withheld: Mask = field(init=False)
    offers: Offers = field(init=False)
    session: Session | None = None
    steps: int = 0
    backed: int = 0
    _asked: int = 0
    _told: tuple[int, ...] = ()  # receipts, in this session's book

    def __post_init__(self) -> None:
        self.withheld = np.zeros(self.blocks, dtype=bool)
        self.offers = Offers(np.zeros(self.blocks, dtype=bool))
        self.backed = self.blocks

    @property
    def told_mode(self) -> Mode:
        mode = self.mode if self.lends else Mode.NONE
        return mode if self.is_sure else min(mode, Mode.COARSE)

    def sync(self) -> bool:
        """Act on what valved has changed since the last call; whether anything was. Costs two loads if nothing was.

        What was told is acted on whatever has become of the link since: the memory may be gone. Should this raise, the
        news stands, and the next call finds it.
        """
        before = self.session
        while (fresh := self.link.next_session(self.session)) is not None:
            self._adopt(fresh)
        return self._heed() or self.session is not before

    def recover(self) -> None:
        """A look has failed half way. Look again; if that fails, too, no output of a holder of blocks is used."""
        try:
            self.sync()
        except Exception:
            self.mode = Mode.NONE
            self.fail("looking at the table again failed")
            self._abandon()

    @property
    def step_tokens(self) -> int:
        """The most that valved asks this engine to schedule in one step; 0: no limit."""
        return 0 if self.session is None or self.session.table.is_detached else self.session.table.step_tokens

    def peek(self) -> Blocks:
        """What was lost that the next `sync` will act on."""
        session = self.session
        if session is None or not session.table.has_news:
            return np.zeros(0, dtype=np.uint32)
        return np.flatnonzero(session.table.changed() & ~self.withheld).astype(np.uint32)

    def hit(self, lost: Blocks) -> frozenset[str]:
        """The requests that this loss hits, also those that have left. Nothing is done yet."""
        judgement = self.ledger.judge(lost, self.blocks)
        return judgement.left.union(judgement.running)

    def publish(self, launched: int | None = None) -> bool:
        """After a step was scheduled: write gauges and receipts; ask for blocks, or offer some. Whether some are to be
        offered. `launched`: no step after these touches what is free now; None: after those in flight."""
        self.steps = self.steps % STEPS_ROUND + 1
        if (session := self.session) is None:
            return False
        used, wanted, running, waiting = self.engine.gauges()
        session.book.write_gauges(mode := self.told_mode, used, wanted, self.steps)
        sums = self.receipts
        lost = sums.lost_blocks, sums.hit_requests, sums.lost_tokens
        receipts = (*lost, sums.dropped_tokens, sums.failures, running, waiting)
        if receipts != self._told:
            session.book.write_receipts(*receipts)
            self._told = receipts
        if mode is Mode.NONE or session.table.slow[DETACHED]:
            self.offers.keep_unsaid(lambda blocks: self._call_off(session, blocks))
            return False
        self._say_offers(session)
        if wanted <= self.backed:
            self._asked = 0  # a later need is another one
            is_surplus = self.backed > session.table.slow[TARGET_BLOCKS]
            return (is_surplus and self._offer(session, wanted, launched)) or bool(self.offers.unsaid)
        if wanted > self._asked:
            self._asked = wanted
            self.link.need(wanted)
        return bool(self.offers.unsaid)

    def give_up(self, why: str) -> None:
        """The engine began what the hook cannot follow: nothing is reclaimed from it any more."""
        if self.told_mode is not Mode.NONE:
            log.warning("valve: nothing is reclaimed from this engine any more: %s", why)
            self.lends = False
            self._tell_mode()

    def guard(self, action: Callable[[], object]) -> bool:
        """Run a part of the hook, and whether it went well; the engine never sees what it raises."""
        try:
            action()
            return True
        except Exception:
            self.fail(f"{getattr(action, '__name__', action)} failed")
            return False

    def fail(self, what: str) -> None:
        self.is_sure = False
        self.receipts.failures += 1
        self._tell_mode()
        if self.receipts.failures <= 3:
            log.exception("valve: %s; the engine goes on", what)

    def _tell_mode(self) -> None:
        """At once: the step that would tell it may fail, too. In a later table nothing is taken before a step tells."""
        if self.session is not None:
            with contextlib.suppress(Exception):
                self.session.book.write_mode(self.told_mode)

    # ---- parts of sync ----

    def _heed(self) -> bool:
        session = self.session
        if session is None or not session.table.has_news:
            return False
        self._safely(session, session.table.read())
        return True

    def _adopt(self, session: Session) -> None:
        """A first session, or that of a valved that has come back: its table and book start from nothing."""
        self._heed()  # the last word of the old one: a loss was told, and may have been carried out
        try:
            column_of = session.table.column_of
            self.offers.arrange(column_of, session.table.columns)
            self.ledger.open_book(session.book)
            self.engine.arrange(column_of)
        except Exception:
            self.mode = Mode.NONE
            self.fail("attaching failed")
        had = ~(self.withheld & ~self.offers.mask)
        self._told = ()
        self.offers.begin()
        self._safely(session, session.table.begin(had))
        self.session = session

    def _safely(self, session: Session, change: Change) -> None:
        """Act, if need be the coarse way; on a second failure let go, and act the last way. While that fails, too, the
        news stands: each look tries again, and no output is used.
        """
        lost = change.lost[~self.withheld[change.lost]]  # what is withheld holds nothing
        has_acted = False
        for mode in (Mode.FULL, Mode.COARSE, Mode.NONE):
            if self.mode < mode:
                continue
            has_acted = self.agree(self._try(change, lost, mode))
            if has_acted:
                break
            self.mode = Mode(max(mode - 1, Mode.NONE))
        if self.mode is Mode.NONE:
            self.guard(lambda: session.book.write_gauges(Mode.NONE, 0, 0, self.steps))
        self._asked = 0
        if not has_acted:
            self._abandon()
            return
        session.table.accept(change)
        self.guard(lambda: session.book.acknowledge(change.epoch))

    def _try(self, change: Change, lost: Blocks, mode: Mode) -> bool:
        if mode is Mode.FULL and len(lost) and not self.is_sure:
            return False
        try:
            self._act(change, lost, mode)
            return True
        except Exception:
            self.fail(f"acting on {len(change.lost)} lost blocks failed in mode {mode.name}")
            return False

    def _act(self, change: Change, lost: Blocks, mode: Mode) -> None:
        """The order matters: preempt, so that blocks become free; forget, so that none is found; then withhold."""
        if len(lost) and mode is Mode.FULL:
            self._discard(lost)
        elif len(lost):
            self.receipts.lost_blocks += len(lost)
            self.receipts.hit_requests += self.engine.reset() if mode is Mode.COARSE else self._abandon()
        self._unoffer(change.lost)
        other = np.flatnonzero((should := ~change.backed | self.offers.mask) != self.withheld)
        withhold, release = other[should[other]], other[~should[other]]
        self.engine.withhold(withhold.astype(np.uint32))
        self.withheld[withhold] = True
        self.engine.release(release.astype(np.uint32))
        self.withheld[release] = False
        self.backed = self.blocks - int(np.count_nonzero(self.withheld))

    def _abandon(self) -> int:
        """Even if it fails: what has no memory is to be withheld."""
        try:
            return self.engine.abandon()
        except Exception:
            self.fail("ending requests with an error failed")
            return 0

    def _discard(self, lost: Blocks) -> None:
        judgement = self.ledger.judge(lost, self.blocks)
        discarded = self.engine.discard(judgement.running, judgement.left)
        self.receipts.lost_blocks += self.engine.forget(judgement.bad)
        self.receipts.hit_requests += len(discarded)
        for request, kept in discarded.items():
            self.ledger.dismiss(request)
            if kept:
                self.ledger.retain(request, kept)
        self.ledger.turn_rows()

    # ---- parts of publish ----

    def _offer(self, session: Session, wanted: int, launched: int | None) -> bool:
        """It preempts none."""
        target = session.table.target_blocks
        blocks = self.offers.choose(self.engine.free_columns(), self.withheld, self.backed, target, wanted)
        if not len(blocks):
            return False
        self.backed -= len(blocks)
        try:
            self.engine.withhold(blocks)
            self.withheld[blocks] = True
        except Exception:
            self._call_off(session, blocks)
            raise
        self.offers.add(blocks, self.ledger.launched if launched is None else launched)
        self._say_offers(session)
        return True

    def _say_offers(self, session: Session) -> None:
        if self.offers.say(session.book, self.ledger, lambda blocks: self._call_off(session, blocks)):
            self.link.need(0)

    def _call_off(self, session: Session, blocks: Blocks) -> None:
        """An offer that was half made: valved may have read it, and then tells a loss of blocks that are in use."""
        session.book.offer(blocks.tolist(), False)
        self.offers.end(blocks)
        self.withheld[blocks] = False
        self.backed += len(blocks)
        self.engine.release(blocks)

    def _unoffer(self, changed: Blocks) -> None:
        settled = changed[self.offers.mask[changed]]
        if len(settled) and self.session is not None:
            self.session.book.offer(settled.tolist(), False)
        self.offers.end(settled)
