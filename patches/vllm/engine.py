"""vLLM's scheduler in the hook's terms: how to preempt, forget, withhold. One per Scheduler, in the EngineCore process.

The eight hazards of a remap under a running scheduler, and where each is handled:
 1 the token of a step that read lost blocks, and of every later step in flight   discard: drop_stale_output
 2 the hash of a lost block, held or free                                         forget
 3 blocks written by a step that read lost blocks                                 valve_hook.losses: first_written
 4 requests that left before their output came back                               valve_hook.ledger: left
 5 output of a request that was preempted meanwhile, delivered by default         discard: left
 6 blocks without memory must not be handed out                                   withhold
 7 same-step preempt and resume with the V1 runner                                discard: prev_step_scheduled_req_ids
 8 memory given back must be finite                                               the node zeroes it
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from valve_hook.ledger import Facts, Ledger
from valve_hook.shared import Blocks
from valve_hook.vllm.asking import tell
from valve_hook.vllm.free_blocks import ColumnQueue
from valve_hook.vllm.prefixes import Prefixes

LOOK_AT_BLOCKS = 128  # in one step, for whole free columns to give back
OFFER_BLOCKS = 256  # in one step, or one column
LOOK_AT_WAITING = 32  # waiting requests whose need is added up: enough to ask for memory, bounded in a long queue


class VllmEngine:
    """`valve_hook.reconciler.EngineAdapter` over a Scheduler."""

    def __init__(self, scheduler: Any, *, is_offline: bool = True) -> None:
        self.scheduler = scheduler
        self.is_offline = is_offline  # others keep vLLM's own order: their prefix cache is somebody's waiting time
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.tables = self.manager.coordinator.single_type_managers[0].req_to_blocks  # one group, or it was refused
        self.block_tokens = int(scheduler.block_size)
        self.grown: OrderedDict[int, str] | None = OrderedDict()
        self._is_told = tell(self.manager.coordinator.single_type_managers[0], lambda: self._columns, self.grown)
        if not self._is_told:
            self.grown = None
        self.prefixes = Prefixes(backed=lambda: self.pool.num_gpu_blocks - 1 - len(self.withheld))
        self.withheld: set[int] = set()
        self._forgotten: set[int] = set()  # just now, in the same look: the cache need not be asked for them again
        self.has_abandoned = False
        self.lock = threading.RLock()  # the engine's thread beside the one that looks while it is idle
        self._columns: ColumnQueue | None = None
        self._members: list[list[int]] = []  # blocks of each column, where the order is vLLM's own
        self._cursor = 0
        self._waiting_seen: tuple[Any, ...] = ()  # the queue's length and its first
        self._waiting_need = 0  # what its first need
        self._reset_prefix_cache = self.pool.reset_prefix_cache
        self.pool.reset_prefix_cache = self.reset_prefix_cache

    # ---- what the reconciler asks ----

    def discard(self, running: Mapping[str, int], left: Collection[str]) -> dict[str, Sequence[int]]:
        scheduler, now = self.scheduler, time.monotonic()
        kept: dict[str, Sequence[int]] = {}
        ids = {id(scheduler.requests[name]) for name in running if name in scheduler.requests}
        places = [place for place, each in enumerate(scheduler.running) if id(each) in ids]
        hit = [scheduler.running[place] for place in places]
        try:
            for request in reversed(hit):
                name, computed = request.request_id, request.num_computed_tokens
                sound, kept[name] = self.tables.get(name, [])[: running[name]], ()
                scheduler._preempt_request(request, now, drop_stale_output=True)
                scheduler.prev_step_scheduled_req_ids.discard(name)
                kept[name] = [block.block_id for block in self.prefixes.keep(name, sound, computed)]
        finally:
            for place, request in zip(reversed(places), reversed(hit), strict=True):
                if request.request_id in kept:
                    del scheduler.running[place]
        self._drop_stale({*left, *running} - kept.keys())
        return kept

    def _drop_stale(self, names: Iterable[str]) -> None:
        """They were preempted before: vLLM would deliver what is in flight of them."""
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is not None and request.num_stale_output_tokens > 0:
                request.drop_stale_output = True

    def forget(self, blocks: Blocks) -> int:
        ids = set(blocks.tolist()) - {self.pool.null_block.block_id}
        pool_blocks, withheld, worth, unknown = self.pool.blocks, self.withheld, 0, 0
        for number in ids:
            block = pool_blocks[number]
            if block.ref_cnt > 0:
                worth += 1
                unknown += number not in withheld
            elif block.block_hash is not None:
                worth += 1
        self.manager.evict_blocks(ids)
        _refuse(unknown, "spoilt")
        self._forgotten = ids
        return worth

    def withhold(self, blocks: Blocks) -> None:
        """A reference of our own takes a block out of the free queue. The requests that hold one by now are unknown to
        us; only when all requests have ended with an error is it enough that none gets it after them.
        """
        new = set(blocks.tolist()) - self.withheld - {self.pool.null_block.block_id}
        forgotten, self._forgotten = self._forgotten, set()
        self.manager.evict_blocks(new - forgotten)
        pool_blocks = self.pool.blocks
        found = [pool_blocks[number] for number in sorted(new)]
        free = [block for block in found if block.ref_cnt == 0]
        if not self.has_abandoned:
            _refuse(len(found) - len(free), "lost")
        self._hold(found, free)
        self.withheld |= new

    def _hold(self, blocks: Sequence[Any], free: Sequence[Any]) -> None:
        """`BlockPool.touch`, for all of them at once where they can be; vLLM's statistics have it block by block."""
        if self._columns is None or getattr(self.pool, "metrics_collector", None) is not None:
            self.pool.touch(blocks)
            return
        self._columns.remove_all(free)
        for block in blocks:
            block.ref_cnt += 1

    def release(self, blocks: Blocks) -> None:
        back = set(blocks.tolist()) & self.withheld
        if back:
            self.withheld -= back
            self.pool.free_blocks([self.pool.blocks[block] for block in sorted(back)])

    def reset(self) -> int:
        """A request that was preempted before has no blocks, and may have output in flight."""
        running, self._forgotten = len(self.scheduler.running), set()
        self.prefixes.clear()
        for each in self.scheduler.running:
            self.prefixes.computed[each.request_id] = each.num_computed_tokens
        self._drop_stale(list(self.scheduler.requests))
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        return running

    def abandon(self) -> int:
        """With the error of a grammar that does not compile: vLLM tells the client with the next output. Back in the
        queue until then, so that they publish nothing; a request that waits without blocks computes all anew anyway.
        """
        self.has_abandoned, self._forgotten = True, set()
        holding = {name for name, request in self.scheduler.requests.items() if request.num_computed_tokens > 0}
        self.scheduler.grammar_compile_error_reqs |= holding
        try:
            self.discard(dict.fromkeys(holding, 0), set(self.scheduler.requests))
        finally:
            self.pool.evict_blocks({block.block_id for block in self.pool.blocks if not block.is_null})
        return len(holding)

    def arrange(self, column_of: Blocks) -> None:
        if not self.is_offline:
            members: list[list[int]] = [[] for _ in range(int(column_of.max(initial=0)) + 1)]
            for block, column in enumerate(column_of.tolist()):
                members[column].append(block)
            self._members, self._cursor = members, 0
            return
        free = self.pool.free_block_queue.get_all_free_blocks()
        self._columns = self.pool.free_block_queue = ColumnQueue(column_of.tolist(), free)
        self._columns.is_told = self._is_told
        self.prefixes.use(self._columns)

    def free_columns(self) -> Sequence[int]:
        """From the last column to the first."""
        if self._columns is not None:
            return self._columns.last_whole(OFFER_BLOCKS)
        return self._scan()

    def _scan(self) -> list[int]:
        """A part of all columns each time, round and round: what is held is seen at its first block."""
        blocks, null, found, looked = self.pool.blocks, self.pool.null_block.block_id, [], 0
        for _ in self._members:
            if looked >= LOOK_AT_BLOCKS:
                break
            self._cursor = (self._cursor - 1) % len(self._members)
            held = False
            for block in self._members[self._cursor]:
                looked += 1
                if blocks[block].ref_cnt or block == null:
                    held = True
                    break
            if not held and self._members[self._cursor]:
                found.append(self._cursor)
        return found

    @property
    def knows_free_columns(self) -> bool:
        """As soon as they are free; else they are looked for, a part in each step."""
        return self._columns is not None

    @property
    def most_used(self) -> int:
        """Blocks in use when none is free."""
        return int(self.pool.num_gpu_blocks) - 1 - len(self.withheld)

    def gauges(self) -> tuple[int, int, int, int]:
        """Where those that wait do not find enough, the block that is handed out to nobody is counted, too: it is among
        those that have memory. Beside those that run, vLLM keeps some free (`--watermark`).
        """
        scheduler, free = self.scheduler, self.pool.free_block_queue.num_free_blocks
        used = self.most_used - free
        if not has_waiting(scheduler):
            self._waiting_seen = ()  # the next one may lie where the last one lay
            return used, used, len(scheduler.running), 0
        waiting = scheduler.waiting
        first = getattr(waiting, "_heap", waiting)  # a priority queue is copied to be walked
        seen = len(waiting), first[0].request_id, first[0].num_tokens  # a preempted one comes back longer
        if seen != self._waiting_seen:
            tokens = self.block_tokens
            needs = [-(-request.num_tokens // tokens) for request in islice(first, LOOK_AT_WAITING)]
            self._waiting_seen, self._waiting_need = seen, sum(needs)
        need = self._waiting_need + (getattr(self.manager, "watermark_blocks", 0) if scheduler.running else 0)
        return used, used + need + (need > free), len(scheduler.running), seen[0]

    # ---- for the user ----

    def reset_prefix_cache(self) -> bool:
        """vLLM refuses while blocks are held, and ours are held for ever: step aside for the call."""
        with self.lock:
            held = [self.pool.blocks[block] for block in sorted(self.withheld)]
            self.pool.free_blocks(held)
            try:
                done: bool = self._reset_prefix_cache()
            finally:
                self.pool.touch(held)
            return done

    # ---- what a step says ----

    def record(self, ledger: Ledger, output: Any) -> int:
        """Note the requests that come and go with a step. Returns how many tokens the requests that come
        back compute a second time.
        """
        ended, cached, again = output.finished_req_ids, output.scheduled_cached_reqs, 0
        started = [(new.req_id, self._table(new.req_id)) for new in output.scheduled_new_reqs]
        if self.prefixes.computed:
            for name in ended:
                self.prefixes.end(name)
        if cached.resumed_req_ids:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    started.append((name, self._table(name)))
                    again += self.prefixes.resume(name, computed)
        ledger.note(ended, output.preempted_req_ids or (), started)
        return again

    def _table(self, request: str) -> Sequence[Any]:
        """The list itself; asking for one that is not there would make it."""
        table = self.tables.get(request)
        if table is None:
            raise KeyError(f"request {request} was scheduled and has no blocks")
        return table  # type: ignore[no-any-return]


def _refuse(unknown: int, what: str) -> None:
    if unknown:
        raise RuntimeError(f"an unknown holder uses {unknown} {what} blocks")


def has_waiting(scheduler: Any) -> bool:
    """vLLM's own queue answers through three functions in Python, so it is asked only where some request waits."""
    return len(scheduler.requests) != len(scheduler.running) and bool(scheduler.waiting)


def facts_of(output: Any) -> Facts:
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    return Facts(
        requests=output.num_scheduled_tokens,
        first_tokens=[
            (cached.req_ids, cached.num_computed_tokens),
            ([each.req_id for each in new], [each.num_computed_tokens for each in new]),
        ],
        copies=output.kv_cache_block_copies or (),
    )
