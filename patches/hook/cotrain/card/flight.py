"""At most two tiles in flight on the card: the third waits for the end of the first, and never for ever.

One thread launches. Tiles follow each other on one stream; another share is taken up only when nothing is in flight, so
that no memory of a tile is used on two streams at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .driver import TIMED, CardDriver, CardRefused
from .shares import CardShare, CardShares, open_shares

MOST = 2
LOOK_S = 0.0002
"""Between two questions whether a tile has ended."""
Tag = TypeVar("Tag")
T = TypeVar("T")


class TileStuck(CardRefused):
    """A tile did not end in its time. What it holds is left to it."""


@dataclass(slots=True)
class _Events:
    first: int
    last: int


class TilesInFlight(Generic[Tag]):
    def __init__(
        self,
        shares: CardShares,
        *,
        stuck_s: float,
        reserve_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`reserve_bytes` of the card stay free for the engine: below it no tile begins."""
        self._shares, self._driver = shares, shares.driver
        self._stuck_s, self._reserve, self._clock, self._sleep = stuck_s, reserve_bytes, clock, sleep
        self._flying: deque[tuple[Tag, _Events]] = deque()
        self._since = 0.0
        """The first of them has had the stream since then."""
        self._share = shares.all[-1]
        self._is_lost = False
        self._undo = ExitStack()
        self._free: dict[int, list[_Events]] = {each.stream: [] for each in shares.all}
        with ExitStack() as undo:
            for each in shares.all:
                with self._driver.current(each.context):
                    self._free[each.stream] = [_Events(self._event(undo), self._event(undo)) for _ in range(MOST)]
            self._undo = undo.pop_all()

    def _event(self, undo: ExitStack) -> int:
        event = self._driver.made("cuEventCreate", TIMED)
        undo.callback(self._driver.call, "cuEventDestroy_v2", event)
        return event

    @property
    def shares(self) -> CardShares:
        return self._shares

    def __len__(self) -> int:
        return len(self._flying)

    def ready(self, wanted: float = 1.0) -> list[tuple[Tag, float]]:
        """Wait until one more may be launched on that share; what ended meanwhile, and its ms on the card."""
        share = self._shares.of(wanted)
        found = self._landed(MOST - 1 if share is self._share else 0)
        self._share = share
        return found

    def launch(self, tag: Tag, work: Callable[[CardShare], T]) -> T:
        """`work` puts a tile on the share's stream. Its error is the caller's; what it had launched is waited for."""
        share = self._share
        with self._driver.current(share.context):
            if self._reserve and (free := self._driver.free_bytes()) < self._reserve:
                raise CardRefused(f"{free >> 20} MiB are free, {self._reserve >> 20} MiB stay with the engine")
            events = self._free[share.stream][-1]
            self._driver.call("cuEventRecord", events.first, share.stream)
            try:
                return work(share)
            finally:
                if not self._flying:
                    self._since = self._clock()
                self._flying.append((tag, self._free[share.stream].pop()))
                with self._lost_if_refused():
                    self._driver.call("cuEventRecord", events.last, share.stream)

    def drain(self) -> list[tuple[Tag, float]]:
        """Wait for all."""
        return self._landed(0)

    def close(self) -> None:
        """Nothing is freed under a tile that does not end, nor by a driver that fails: then the process keeps it."""
        if not self._is_lost:
            self.drain()
            self._undo.close()
            self._shares.close()

    def _landed(self, most: int) -> list[tuple[Tag, float]]:
        found = []
        with self._lost_if_refused():
            while self._flying and (self._is_first_done() or len(self._flying) > most):
                while not self._is_first_done():
                    if self._clock() - self._since > self._stuck_s:
                        raise TileStuck(f"one tile has taken longer than {self._stuck_s:g} s on the card")
                    self._sleep(LOOK_S)
                tag, events = self._flying.popleft()
                self._since = self._clock()
                self._free[self._share.stream].append(events)
                found.append((tag, self._driver.elapsed_ms(events.first, events.last)))
        return found

    def _is_first_done(self) -> bool:
        return self._driver.is_done(self._flying[0][1].last)

    @contextmanager
    def _lost_if_refused(self) -> Iterator[None]:
        try:
            yield
        except CardRefused:
            self._is_lost = True
            raise


def open_flight(driver: CardDriver, *, device: int = 0, stuck_s: float, **more: Any) -> TilesInFlight[Any]:
    """Shares, their streams and events, once; none of them where one cannot be had."""
    shares = open_shares(driver, device)
    try:
        return TilesInFlight(shares, stuck_s=stuck_s, **more)
    except BaseException:
        shares.close()
        raise
