"""When engines are looked at: at once when a hook rings, soon when something changed, and on a tick.

Looks are cheap and come whenever something changed: an order came back, a client left. While a service waits for memory
they are not: the answers themselves take its journey on, and the tick sees to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from valved.kv.beside import Latecomers
from valved.kv.books import KvBooks
from valved.kv.columns import Queue
from valved.kv.engines import Engine
from valved.kv.lend import Lender
from valved.kv.reserve import Reserve
from valved.kv.rungs import Rungs
from valved.kv.supply import Supply
from valved.machine.clock import Clock, Ticker, TimerHandle
from valved.machine.ports import WorkPort
from valved.model.ids import Role
from valved.policy.eviction import EvictionSettings

INDEX_REST = 20  # times as long as an index took, no other index is made


@dataclass(eq=False, repr=False)
class Looks:
    _books: KvBooks
    _supply: Supply
    _rungs: Rungs
    _reserve: Reserve
    _lender: Lender
    _latecomers: Latecomers
    _clock: Clock
    _costs: EvictionSettings
    _work: WorkPort

    def __post_init__(self) -> None:
        self._soon: TimerHandle | None = None
        self._is_wanted = False  # a look in the next turn
        self._ticker = Ticker(self._clock, self._on_tick)

    def look_now(self, engine: Engine, wanted_blocks: int) -> None:
        """Its hook rang, and waits for memory: at once, and however often it rings, once in this turn of the loop."""
        if self._soon is None:
            self._reserve.rung(engine, wanted_blocks)
            self.look(served=engine)
            self._in_next_turn()
        else:
            self._is_wanted = True

    def look_soon(self) -> None:
        """Once in this turn of the loop, however many things changed."""
        self._is_wanted = True
        if self._soon is None:
            self._in_next_turn()

    def _in_next_turn(self) -> None:
        self._soon = self._clock.call_at_ns(self._clock.now_ns(), self._on_turn)

    def _on_turn(self) -> None:
        self._soon = None
        if self._is_wanted:
            self.look()

    def look(self, served: Engine | None = None) -> None:
        self._is_wanted = False
        for engine in self._books.engines_with(Role.ONLINE):  # first of all: a service may wait for memory
            if engine is not served:
                self._reserve.serve(engine)
        self._rungs.heed()
        for engine in self._books.engines_with(Role.OFFLINE):
            self._lender.serve(engine)
        self._latecomers.look()
        self._arm()

    def _arm(self) -> None:
        if not self._books.are_empty:
            self._ticker.start(round(self._books.settings.tick_ms * 1e6))

    def _on_tick(self) -> None:
        if self._books.are_empty:
            self._ticker.stop()
        for engine in self._books.engines_with(Role.OFFLINE):
            self._refresh_index(engine)
        self.look()

    def _refresh_index(self, engine: Engine) -> None:
        """Ahead of need, in a thread, and no more than a share of a core: a reclaim may choose by an older one."""
        began_ns = self._clock.now_ns()
        if engine.is_indexing or began_ns < engine.index_after_ns or not self._is_reclaim_near(engine):
            return
        if engine.is_index_new and engine.is_queue_new:
            engine.indexed_ns = began_ns
            return
        engine.is_indexing, steps, ranks = True, engine.view().steps, engine.clients

        def made(queue: Queue | None, error: Exception | None) -> None:
            ended_ns = self._clock.now_ns()
            engine.is_indexing = False
            engine.index_after_ns = ended_ns + INDEX_REST * (ended_ns - began_ns)
            if queue is not None and self._books.is_attached(engine) and engine.clients == ranks:
                engine.put_index(queue.index, steps, began_ns)
                engine.queue = queue
            elif error is not None and self._books.is_attached(engine):
                raise error

        self._work.do(partial(engine.make_queue, engine.takeable(), self._costs), made)

    def _is_reclaim_near(self, engine: Engine) -> bool:
        """An online engine beside it could not double its reserve from what is free, or it is not known what is."""
        if not self._supply.cards and not self._books.settings.pool_mib:
            return True
        return any(
            self._supply.affordable(gpu) < online.state.headroom_handles * int(other.handles_of(gpu).max(initial=0))
            for other in self._books.engines_with(Role.ONLINE)
            for gpu in other.gpus & engine.gpus
            if (online := self._reserve.online.get(other.service)) is not None
        )
