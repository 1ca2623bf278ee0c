"""Which request holds which blocks, and what the steps in flight write: kept from what the scheduler tells its workers.

An engine's own tables say how things are now. After a loss one has to know how they were when a step was launched,
which may be two steps and a preemption ago; so each step in flight is kept until its output has been believed, and the
blocks of a request that leaves meanwhile are kept with it.

An engine that keeps one list of blocks per request, which only grows while the request runs, hands over that list
(`note`). Its numbers are read when a loss asks for them, and for the book by the link's thread (`tend`), while the
engine waits for its GPU: a step costs the same whether one request took a block or all of them did, or none.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from valve_hook.holders import Held, HolderIndex
from valve_hook.losses import NOTHING_WRITTEN, Spread, spread
from valve_hook.shared import Blocks, Book

MOST_STEPS = 256  # in flight: an engine has two, or one for each stage of a pipeline
MOST_TOLD = 256  # blocks that are looked at for it: most are of requests that were read since
MOST_WAITING = 64  # notes, and rows, that wait for the link's thread; beyond, each step does its own and a few more:
MORE_NOTED = 2  # requests
MORE_TURNED = 4  # rows: a request that comes and goes has two, and a third one if blocks were kept for it
TENDED = 8  # requests whose rows are brought up to date at a time: a step meanwhile waits for them at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The requests that a loss hits."""

    running: dict[str, int]  # requests that hold blocks now: how many of them, from the first, are sound
    left: frozenset[str]  # requests that held them when a step in flight was launched
    bad: Blocks  # every block whose content must not be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a step is about. `first_tokens`: where each request starts to write, as the engine lists it."""

    requests: Mapping[str, int]  # request -> tokens scheduled
    first_tokens: Sequence[tuple[Sequence[str], Sequence[int]]]
    copies: Sequence[tuple[int, int]]


def unread(record: Any) -> Facts:
    raise TypeError(f"this engine does not tell the hook of its steps: {record!r}")


@dataclass(kw_only=True)
class Step:
    """One step in flight. Made only when a loss asks for it."""

    key: object
    facts: Facts
    left: dict[str, Held] = field(default_factory=dict)  # scheduled here, gone since

    @cached_property
    def starts(self) -> dict[str, int]:
        starts: dict[str, int] = {}
        for names, tokens in self.facts.first_tokens:
            starts.update(zip(names, tokens, strict=True))
        return starts


Noted = tuple[int, Collection[str], Collection[str], Sequence[tuple[str, Sequence[Any]]]]
"""Steps launched by then; requests that ended, that were sent back with blocks, and that start, with their blocks."""


class LedgerLock:
    """A thread that raises while it holds this leaves the ledger half changed, also for threads that wait for it."""

    def __init__(self) -> None:
        self._is_whole = True
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, error: object, *_: object) -> None:
        self._is_whole &= error is None
        self._lock.release()

    def check(self) -> None:
        if not self._is_whole:
            raise RuntimeError("the ledger failed before: what it says may be wrong")


@dataclass(slots=True, kw_only=True)
class Flights:
    """The engine's own records of steps, from their launch until their output is believed."""

    in_flight: deque[Any] = field(default_factory=deque)  # of the steps in flight
    asked: dict[int, Step] = field(default_factory=dict)  # of them, those that were asked about, by the record's id
    believed: int = 0  # steps, ever: with those in flight, all that were launched
    missed_after: int = -1  # after so many one was launched that is not among them: it is over when a later one is

    @property
    def launched(self) -> int:
        """Steps, ever."""
        return self.believed + len(self.in_flight)

    def is_over(self, launched: int) -> bool:
        """Whether the output of all that had been launched by then is in."""
        return self.believed >= launched and self.believed > self.missed_after

    def launch(self, record: Any) -> None:
        if len(self.in_flight) >= MOST_STEPS:
            self.missed_after = self.launched
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight: the engine did not tell of their output")
        self.in_flight.append(record)

    def believe(self, key: object) -> None:
        """The output of this step is in: it and what was launched before are in flight no more."""
        records = self.in_flight
        if not any(record is key for record in records):
            return
        is_in = False
        while not is_in:
            record = records.popleft()
            self.believed += 1
            is_in = record is key
            self.asked.pop(id(record), None)


@dataclass(slots=True, kw_only=True)
class Ledger(Flights):
    block_tokens: int
    slack_tokens: int = 0  # drafts that may have been rejected: a later step starts that much earlier than announced
    held: dict[str, Held] = field(default_factory=dict)
    read: Callable[[Any], Facts] = unread  # what the engine's own record of a step says
    left: list[tuple[int, Held]] = field(default_factory=list)  # left when so many had been launched
    kept: dict[str, Held] = field(default_factory=dict)  # sound beginnings of requests that wait: in the book alone
    current: Callable[[str], Sequence[Any] | None] | None = None  # the list that a request has in the engine now
    grown: OrderedDict[int, str] | None = None  # new blocks, not read yet, and whose; None: the engine does not tell
    book: Book | None = None
    _index: HolderIndex = field(default_factory=HolderIndex)
    _free_rows: list[int] = field(default_factory=list)
    noted: deque[Noted] = field(default_factory=deque)  # not taken in yet
    _turned: deque[Held] = field(default_factory=deque)  # whose rows are to be opened or closed, in tending
    _tour: list[Held] = field(default_factory=list)  # whose rows are brought up to date next, last first
    _lock: LedgerLock = field(default_factory=LedgerLock)  # one thread tends, another one schedules

    def open_book(self, book: Book | None) -> None:
        """A book of a new session is empty: write all of it."""
        with self._lock:
            self.book = book
            self._free_rows = list(range(book.rows - 1, -1, -1)) if book is not None else []
            for held in self._turned:  # those that left, too: a step in flight may keep its own
                held.row = -1
            self._turned.clear()
            for held in (*self.held.values(), *self.kept.values()):
                held.row = -1
                self._turn_row(held)

    def admit(self, request: str, blocks: Iterable[int]) -> None:
        """The request starts with these blocks, or starts again."""
        self.dismiss(request)
        self._begin(request, blocks)

    def note(
        self, ended: Collection[str], preempted: Collection[str], started: Sequence[tuple[str, Sequence[Any]]]
    ) -> None:
        """Requests that come and go with the step that is launched next. It is taken in when there is a question, or
        by the thread that tends. A list of blocks is the engine's own: what is appended to it is the request's, too.
        """
        self.noted.append((self.believed + len(self.in_flight), ended, preempted, started))
        if len(self.noted) > MOST_WAITING:
            with self._lock:
                self._take_in(len(ended) + len(preempted) + len(started) + MORE_NOTED)

    def _begin(self, request: str, blocks: Iterable[int], source: Any = None) -> None:
        held = self.held[request] = Held(request=request, blocks=array("I", blocks), row=-1, source=source)
        self._index.begin(held)
        self._turned.append(held)

    def _take_in(self, most: int = 1 << 30) -> None:
        """What was noted, in its order, under the lock: of so many requests, and those that go in its last step."""
        while self.noted and most > 0:
            launched, ended, preempted, started = self.noted.popleft()
            for name in ended:
                self._dismiss(name, launched)
            for name in preempted:
                if name in self.held:
                    self._dismiss(name, launched)
            most -= len(ended) + len(preempted)
            now = started[: max(most, 1)]
            if len(now) < len(started):
                self.noted.appendleft((launched, (), (), started[len(now) :]))
            most -= len(now)
            for name, source in now:
                self._dismiss(name, launched)
                self._begin(name, [block.block_id for block in source], source)
        if self.left:
            self.left = [each for each in self.left if each[0] > self.believed]

    def tend(self, most: int = TENDED) -> bool:
        """Bring the rows of a few requests up to date: of those that have grown, the one that waits longest first,
        else of all, round and round. Whether there is more to do, in this round. Any thread may.
        """
        with self._lock:
            self._take_in(most)
            self._turn_rows(most)
            if self.grown is not None:
                read = 0
                for _ in range(min(MOST_TOLD, len(self.grown))):
                    held = self.held.get(self.grown.popitem(last=False)[1])
                    read += held is not None and self._catch_up(held)
                    if read == most:
                        break
                return self._index.settle(most) or bool(self.grown) or bool(self._turned) or bool(self.noted)
            if not self._tour:
                self._tour = list(self.held.values())
            tour = self._tour
            for _ in range(min(most, len(tour))):
                self._catch_up(tour.pop())
            self._index.settle(most)
            return bool(tour) or bool(self._turned) or bool(self.noted)

    def dismiss(self, request: str) -> None:
        """It holds nothing any more; steps in flight may still write what it held."""
        with self._lock:
            self._take_in()
            self._dismiss(request, self.believed + len(self.in_flight))

    def _dismiss(self, request: str, launched: int) -> None:
        kept = self.kept.pop(request, None)
        if kept is not None:
            self._turned.append(kept)
        held = self.held.pop(request, None)
        if held is None:
            return
        self._index.end(held)
        if launched > self.believed:  # what it held, and in which of the steps, is asked when something is lost
            self.left.append((launched, held))
        self._turned.append(held)
        if len(self._turned) > MOST_WAITING:
            self._turn_rows(MORE_TURNED)

    def retain(self, request: str, blocks: Iterable[int]) -> None:
        """It waits, and these blocks are kept for it: if their memory is taken, it computes them again."""
        self.dismiss(request)
        held = self.kept[request] = Held(request=request, blocks=array("I", blocks), row=-1)
        self._turned.append(held)

    @property
    def steps(self) -> list[Step]:
        """Those in flight, the oldest first."""
        return [self._step(record) for record in self.in_flight]

    def _tell_who_left(self) -> None:
        """To each step in flight: its requests that left after its launch. Of one that left twice the first counts."""
        later: list[Held] = []
        for number, step in reversed(list(enumerate(self.steps, self.believed + 1))):
            later = [*(held for launched, held in self.left if launched == number), *later]
            step.left = {}
            for held in later:
                if held.request in step.facts.requests:
                    self._catch_up(held)  # an engine lets go of its list, and makes another one
                    step.left.setdefault(held.request, held)

    def _step(self, record: Any) -> Step:
        step = self.asked.get(id(record))
        if step is None:
            step = self.asked[id(record)] = Step(key=record, facts=self.read(record))
        return step

    def judge(self, lost: Blocks, blocks: int) -> Judgement:
        with self._lock:
            self._lock.check()
            return self._judge(lost, blocks)

    def _judge(self, lost: Blocks, blocks: int) -> Judgement:
        self._take_in()
        self._refresh(lost)
        self._tell_who_left()
        left = list({id(held): held for step in self.steps for held in step.left.values()}.values())
        present = self.holders(lost)
        while True:
            for held in present:
                self._look_at(held)
            verdict = self._spread(lost, [*present, *left], blocks)
            self._refresh(verdict.spoilt)
            known = {id(held) for held in present}
            more = [held for held in self.holders(verdict.spoilt) if id(held) not in known]
            if not more:
                break
            present += more
        return _judgement(verdict, present, left)

    def holders(self, blocks: Blocks) -> list[Held]:
        """The requests that may hold one of these blocks now."""
        found = self._index.of(blocks)
        return list(self.held.values()) if found is None else found

    def _spread(self, lost: Blocks, holders: list[Held], blocks: int) -> Spread:
        copies = (pair for step in self.steps for pair in step.facts.copies)
        tables = [held.blocks for held in holders]
        return spread(lost, tables, lambda index: self.first_written(holders[index]), copies, blocks)

    def first_written(self, held: Held) -> int:
        """Index of the first of its blocks that a step in flight may write."""
        first = NOTHING_WRITTEN
        for step in self.steps:
            is_its = step.left.get(held.request, self.held.get(held.request)) is held
            if is_its and held.request in step.facts.requests:
                block = max(0, step.starts[held.request] - self.slack_tokens) // self.block_tokens
                first = block if first == NOTHING_WRITTEN else min(first, block)
        return first

    def _refresh(self, lost: Blocks) -> None:
        """Every request that may hold one of these blocks and is not in the index yet."""
        grown = self.grown
        if grown is None or any(step.facts.copies for step in self.steps):
            names = set(self.held)
        else:
            names = {name for name in map(grown.get, lost.tolist()) if name is not None}
        for name in names:
            if (held := self.held.get(name)) is not None:
                self._look_at(held)

    def _look_at(self, held: Held) -> None:
        """A request that has left since the last step keeps the list that it had."""
        now = self.current(held.request) if self.current is not None and held.source is not None else None
        if now is not held.source and now is not None:
            raise RuntimeError("a request has other blocks than those it started with")
        self._catch_up(held)

    def _catch_up(self, held: Held) -> bool:
        """Whether it had grown."""
        if held.source is None or len(held.source) == len(held.blocks):
            return False
        self._extend(held, [block.block_id for block in held.source[len(held.blocks) :]])
        return True

    def _extend(self, held: Held, blocks: Sequence[int]) -> None:
        start = len(held.blocks)
        held.blocks.extend(blocks)
        self._index.note(held)
        if blocks and self.book is not None and held.row >= 0:
            self.book.extend_row(held.row, start, blocks)

    def turn_rows(self) -> None:
        """All that wait: valved chooses by them what it takes next."""
        with self._lock:
            self._turn_rows(len(self._turned))

    def _turn_rows(self, most: int) -> None:
        for _ in range(min(most, len(self._turned))):
            self._turn_row(self._turned.popleft())

    def _turn_row(self, held: Held) -> None:
        is_here = held is self.held.get(held.request) or held is self.kept.get(held.request)
        if self.book is not None and is_here != (held.row >= 0):
            _turn_row(self.book, self._free_rows, held)


def _turn_row(book: Book, free: list[int], held: Held) -> None:
    """Open the row of a request that holds blocks, close that of one that has left."""
    if held.row >= 0:
        book.close_row(held.row)
        free.append(held.row)
        held.row = -1
    elif free:
        held.row = free.pop()
        book.open_row(held.row, hash(held.request) & 0xFFFFFFFFFFFFFFFF or 1, held.blocks)


def _judgement(verdict: Spread, present: list[Held], left: list[Held]) -> Judgement:
    count = len(present)
    return Judgement(
        running={present[at].request: good for at, good in verdict.hit.items() if at < count},
        left=frozenset(left[at - count].request for at in verdict.hit if at >= count),
        bad=verdict.bad,
    )
