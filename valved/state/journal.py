"""The one place through which every event and decision passes: memory ring, watchers, audit file, trace file, log."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from valved.machine.clock import Clock
from valved.machine.ports import WorkPort
from valved.model.events import Event, EventKind
from valved.model.states import UnwrittenState
from valved.state.eventfiles import EventFiles
from valved.state.trace import LineFile

log = logging.getLogger("valved")

Told = TypeVar("Told")
More = TypeVar("More")


# Edges and channels are too many for a log; they are in the ring, the trace and the audit file.
QUIET = frozenset(
    {
        EventKind.GATE,
        EventKind.HOLD,
        EventKind.WAKE,
        EventKind.WAKE_REFUSED,
        EventKind.DECIDED,
        EventKind.COOLDOWN,
        EventKind.CHANNEL_ADDED,
        EventKind.CHANNEL_GONE,
    }
)
# Whoever comes and goes in a loop, is refused, sends nonsense, or attaches an engine anew, makes these without end.
COMINGS = frozenset(
    {
        EventKind.REFUSED,
        EventKind.MALFORMED,
        EventKind.JOINED,
        EventKind.LEFT,
        EventKind.ENDED,
        EventKind.ATTACHED,
        EventKind.RESERVED,
        EventKind.RETURNED,
        EventKind.LENT,
    }
)
LOUD = frozenset({EventKind.GATE_FAILED, EventKind.BREAKER, EventKind.KILLED, EventKind.FROZEN, EventKind.MALFORMED})


class Watcher:
    """A reader of events with a bounded queue. A slow one loses the oldest and is told how many."""

    def __init__(self, kinds: frozenset[str], limit: int, wake: Callable[[], None]) -> None:
        self._kinds = kinds
        self._queue: deque[Event] = deque()
        self._limit = limit
        self._wake = wake
        self._lost = 0
        self.kept = 0  # events from before that come first
        self.missed: int | None = 0  # events after those the reader has that nobody keeps any more; None: unknown

    def wants(self, event: Event) -> bool:
        return not self._kinds or event.kind.value in self._kinds

    def begin(self, kept: list[Event]) -> None:
        """What happened before: there is room for all of it, and the reader has not come yet."""
        self.kept = len(kept)
        self._limit += len(kept)
        self._queue.extend(kept)
        if kept:
            self._wake()

    def offer(self, event: Event) -> None:
        if not self.wants(event):
            return
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self._lost += 1
        self._queue.append(event)
        self._wake()

    def take(self) -> Iterator[tuple[Event, int]]:
        """Everything queued, each with the number of events lost before it."""
        while self._queue:
            lost, self._lost = self._lost, 0
            yield self._queue.popleft(), lost


class Journal:
    def __init__(
        self,
        clock: Clock,
        ring_events: int,
        files: Iterable[tuple[LineFile, bool]] = (),
        disk: WorkPort | None = None,
    ) -> None:
        """`files`: each with whether it takes every event, or the audited kinds only. `disk` writes them."""
        self._clock = clock
        self._ring_events = ring_events
        self._edges: deque[Event | tuple[Any, ...]] = deque(maxlen=ring_events)  # hundreds a second: see put_unmade
        self._comings: deque[Event] = deque(maxlen=ring_events)
        self._rest: deque[Event] = deque(maxlen=ring_events)  # what an hour of those must not push out
        self._files = EventFiles(clock, files, disk)
        self._watchers: set[Watcher] = set()
        self._writes_all = self._has_readers = self._files.take_all
        self.epoch = time.time_ns()  # names this start of valved: the numbers of events begin anew with each
        self._seq = 0

    def emit(
        self,
        kind: EventKind,
        *,
        service: int = 0,
        client: int = 0,
        gpus: tuple[int, ...] = (),
        reason: str = "",
        t_ns: int = 0,
        **detail: str | int,
    ) -> Event:
        return self.put(kind, service, client, gpus, reason, t_ns, detail)

    def put(
        self,
        kind: EventKind,
        service: int,
        client: int,
        gpus: tuple[int, ...],
        reason: str,
        t_ns: int,
        detail: Mapping[str, str | int],
    ) -> Event:
        self._seq += 1
        return self._pass_on(
            Event(self._seq, t_ns or self._clock.now_ns(), kind, service, client, gpus, reason, detail)
        )

    def put_unmade(self, make: Callable[[int, Told, More], Event], told: Told, more: More) -> None:
        """The same for whoever has a thousand a second, of kinds in QUIET and not in AUDITED. Few are ever read:
        `make` makes those."""
        self._seq = seq = self._seq + 1
        if self._has_readers:
            self._pass_on(make(seq, told, more))
        else:
            self._edges.append((seq, make, told, more))

    def put_many_unmade(self, make: Callable[[int, Told, More], Event], told: Told, mores: Iterable[More]) -> None:
        """One for each of `mores`, also behind one that a reader failed at."""
        if self._has_readers:
            errors = []
            for more in mores:
                try:
                    self.put_unmade(make, told, more)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
        else:
            kept = [(seq, make, told, more) for seq, more in enumerate(mores, self._seq + 1)]
            self._seq += len(kept)
            self._edges.extend(kept)

    def _pass_on(self, event: Event) -> Event:
        is_quiet = event.kind in QUIET
        (self._edges if is_quiet else self._comings if event.kind in COMINGS else self._rest).append(event)
        for watcher in self._watchers:
            watcher.offer(event)
        self._files.put(event)
        if not is_quiet:
            level = logging.WARNING if event.kind in LOUD else logging.INFO
            log.log(level, event.kind.value, extra={"event": event})
        return event

    def recent(self, matches: Callable[[Event], bool], most: int) -> list[Event]:
        """The newest events that match, oldest first."""
        rings = self._newest_edges(), reversed(self._comings), reversed(self._rest)
        newest = heapq.merge(*rings, key=lambda event: -event.seq)
        return list(itertools.islice(filter(matches, newest), most))[::-1]

    def _newest_edges(self) -> Iterator[Event]:
        """Each is made once: who asks for what is not there goes through all of them, and would stop the loop anew."""
        edges = self._edges
        for at in range(len(edges) - 1, -1, -1):
            kept = edges[at]
            if not isinstance(kept, Event):
                seq, make, *told = kept
                kept = edges[at] = make(seq, *told)
            yield kept

    def watch(
        self,
        kinds: Iterable[str],
        limit: int,
        wake: Callable[[], None],
        since_seq: int | None = None,
        epoch: int | None = None,
    ) -> Watcher:
        """Events from now on; with `since_seq` those before that are still kept and came after it, first:
        `limit` of each ring at most.

        A number of another epoch, or one without an epoch that is not reached yet, is of another start of valved: then
        all that is kept. One without an epoch that is reached may be of another start, too: nobody knows what is
        missing.
        """
        watcher = Watcher(frozenset(kinds), limit, wake)
        if since_seq is not None:
            is_other = since_seq > self._seq if epoch is None else epoch != self.epoch
            first = 0 if is_other else min(since_seq, self._seq)
            after = self.recent(lambda event: event.seq > first, 3 * self._ring_events)
            wanted = [event for event in after if watcher.wants(event)]
            watcher.begin(_newest(wanted, limit))
            is_known = not is_other and (epoch is not None or not since_seq)
            watcher.missed = self._seq - first - len(after) + len(wanted) - watcher.kept if is_known else None
        self._watchers.add(watcher)
        self._has_readers = True
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        self._has_readers = bool(self._watchers) or self._writes_all

    def unwritten(self) -> list[UnwrittenState]:
        return self._files.unwritten()

    def close(self) -> None:
        self._files.close()


def _newest(events: list[Event], most: int) -> list[Event]:
    """So many of each ring: none pushes out what matters."""
    of, chosen = Counter[object](), list[Event]()
    for event in reversed(events):
        ring = event.kind in QUIET, event.kind in COMINGS
        of[ring] += 1
        if of[ring] <= most:
            chosen.append(event)
    return chosen[::-1]
