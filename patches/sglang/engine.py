"""SGLang's scheduler in the hook's terms: requests that lost something are retracted, the cache forgets what is spoilt.

What is easily got wrong here:
- without overlap the step may still run when its output is handed over: it is waited for before the table is read;
- the decode path skips retracted requests only with overlap on: without it the flag is set for the call;
- a request that was retracted may run again before the output of its last step comes in, which must not be believed:
  each step knows whose output of it is dropped;
- a request whose last token is in flight stands in no queue any more: dropping that token would lose it, so a
  request that was dropped is retracted by name, wherever it stands;
- when the last running request finds no memory it is aborted, which with a pool made small by us would fail offline
  work: it goes back to the queue instead (calls.spare).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
from valve_hook.sglang.cache import evict
from valve_hook.sglang.endings import ends, tell
from valve_hook.sglang.free_pages import FreePages
from valve_hook.sglang.prefixes import KeptPrefixes
from valve_hook.sglang.room import AnswerRoom
from valve_hook.sglang.steps import Launched, StepLedger, launched, note_computed
from valve_hook.shared import Blocks

WHY_ENDED = "its KV memory was taken, and what it held could not be computed again"
MANY = 32  # running requests, beyond which they are not looked at one by one


class SglangEngine:
    """`valve_hook.reconciler.EngineAdapter` over a Scheduler. Blocks are pages; page 0 is padding."""

    def __init__(self, scheduler: Any, ranks: int = 1) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.tree = scheduler.tree_cache
        self.free_pages = free = FreePages(scheduler)
        self.pages, self.page_tokens = free.pages, free.page_tokens
        self.room = AnswerRoom(scheduler, free.pages, free.page_tokens)
        self.ledger = StepLedger(
            block_tokens=self.page_tokens,
            requests=lambda: list(self._holding().values()),
            page_table=scheduler.req_to_token_pool.req_to_token,
        )
        self.drops_all = False
        self.overlap = bool(scheduler.batch_result_processor.enable_overlap)
        self._flags: list[tuple[Any, bool]] = []  # (request, is_retracted) before they were disbelieved
        self.may_have_sent_back = False  # anybody, ever: we, or SGLang for want of memory that was taken
        self._dropped: list[Any] = []  # whose output was not believed, until they are retracted
        self.prefixes = KeptPrefixes(scheduler, lambda: free.backed_tokens)
        rows = scheduler.req_to_token_pool
        self._write_row, rows.write = rows.write, self.write_row
        self._free_row, rows.free = rows.free, self.free_row

    # ---- what the reconciler asks ----

    def discard(self, running: Mapping[str, int], left: Collection[str]) -> dict[str, Sequence[int]]:
        names, found = {*running, *left}, self._holding()
        hit = [found[name] for name in found if name in names]
        note_computed(each for each in hit if each.rid in running)
        self.ledger.settle(names)
        self._retract(hit)
        for each in hit:
            self.prefixes.keep(each, running.get(each.rid, 0) * self.page_tokens)
        return {each.rid: () for each in hit if each.rid in running}

    def forget(self, blocks: Blocks) -> int:
        """Evict each cached path with a spoilt page. Its holders have been retracted: what is not free is cached."""
        cached = self.free_pages.in_use(blocks)
        if cached:
            evict(self.tree, blocks, self.pages, self.page_tokens)
            if self.free_pages.in_use(blocks):
                raise RuntimeError("an unknown holder uses spoilt pages")
        return cached

    def withhold(self, blocks: Blocks) -> None:
        self.may_have_sent_back |= len(blocks) > 0
        self.free_pages.withhold(blocks)

    def release(self, blocks: Blocks) -> None:
        self.free_pages.release(blocks)

    def reset(self) -> int:
        """Retract all requests, those of the step in flight, too; empty the cache; go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler = self.scheduler
        self.drops_all = self.may_have_sent_back = True
        try:
            with self._unlimited_queue():
                scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            scheduler.waiting_queue = [each for each in scheduler.waiting_queue if not ends(scheduler, each)]
            self.retract_dropped()
            self.ledger.clear()
            if self.ranks > 1:  # one of them may have failed half way: all queues are alike again
                scheduler.waiting_queue.sort(key=lambda each: each.rid)
            if not scheduler.flush_cache(empty_cache=False):
                raise RuntimeError("the cache could not be flushed although all requests are retracted")
        finally:
            self.drops_all = False
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return len(scheduler.waiting_queue)

    def abandon(self) -> int:
        """A request that holds pages ends as SGLang ends one that finds no memory; of these and of the cache nothing
        is kept. If an unknown holder has a page, it is withheld when it comes back.
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self.free_pages.take_what_comes_back()
        holding = list(self._holding().values())
        self.ledger.settle({each.rid for each in holding})
        self._take_back(holding)
        for each in holding:
            each.to_finish = FINISH_ABORT(WHY_ENDED, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
            tell(self.scheduler, each)
        self._empty_cache()
        return len(holding)

    def arrange(self, column_of: Blocks) -> None:
        self.free_pages.arrange(column_of)

    def free_columns(self) -> Sequence[int]:
        return self.free_pages.columns()

    def gauges(self) -> tuple[int, int, int, int]:
        """What is cached for nobody is not in use: it makes room."""
        running, waiting = self.scheduler.running_batch.reqs, self.scheduler.waiting_queue
        held = self.pages - 1 - self.room.free_or_cached() - self.free_pages.taken_pages
        return held, self.room.wanted(waiting, held), len(running), len(waiting)

    # ---- what a step says ----

    def launch(self, batch: Any) -> int:
        return self.ledger.begin_step(launched(batch))

    def end_steps(self) -> None:
        """At a choice. With overlap SGLang queues the outputs that it has not processed; without, there are none."""
        self.ledger.end_steps(len(getattr(self.scheduler, "result_queue", ())))

    def wait(self, result: Any) -> None:
        """Until the step is over: what could have reached it is in the table then. Without overlap SGLang waits only
        when it reads the tokens, which is after our look.
        """
        if result.copy_done is not None:
            result.copy_done.synchronize()
        else:
            self.scheduler.device_module.synchronize()

    def come_in(self, batch: Any) -> Launched:
        """The step whose output this is; it may still be found to have been spoilt, until the next look."""
        flying = [each for each in self.ledger.flying if not each.is_in]
        place = _place(flying, batch)
        if place is not None:  # else none of them has come in: each is matched when it does
            for step in flying[: place + 1]:
                step.is_in = True
        if place != 0:
            raise RuntimeError("this output is not of the oldest step in flight")
        return flying[0]

    def disbelieve(self, batch: Any, names: Collection[str]) -> None:
        """From here on, until `believe_again`, SGLang skips these requests of the batch like retracted ones."""
        self._flags += [(each, each.is_retracted) for each in batch.reqs if each.rid in names and not each.finished()]
        processor = self.scheduler.batch_result_processor
        object.__setattr__(processor, "enable_overlap", True)  # a frozen value, but the one place that is asked
        for each, _ in self._flags:
            each.is_retracted = True

    def believe_again(self) -> None:
        object.__setattr__(self.scheduler.batch_result_processor, "enable_overlap", self.overlap)
        for each, was in reversed(self._flags):  # what was noted first stood there first
            each.is_retracted = was
        self._flags = []

    def drop(self, batch: Any, names: Collection[str]) -> None:
        """Their output of this step is gone: they are to be retracted before anything else is chosen."""
        self._dropped += [each for each in batch.reqs if each.rid in names]

    def retract_dropped(self) -> None:
        if self._dropped:
            dropped = {id(each): each for each in self._dropped}.values()
            self.ledger.settle({each.rid for each in dropped})
            self._retract(each for each in dropped if each.kv.holds_kv and not each.finished())
            self._dropped = []

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def open_requests(self) -> int:
        """Exact where it matters, near none: beyond, requests that have just finished may be among them."""
        scheduler = self.scheduler
        running = len(scheduler.running_batch.reqs)
        return len(scheduler.waiting_queue) + (running if running > MANY else len(self._holding()))

    # ---- what SGLang calls, by way of us ----

    def write_row(self, indices: Any, values: Any) -> None:
        """One row, where the cache's pages take the place of a request's own; in a decode step one place of each."""
        if isinstance(indices[0], int):
            self.ledger.keep(indices[0])
        self._write_row(indices, values)

    def free_row(self, request: Any) -> None:
        self.ledger.keep(request.kv.req_pool_idx, has_ended=request.finished())
        self._free_row(request)

    # ---- parts ----

    def _holding(self) -> dict[str, Any]:
        """The requests that hold pages and are not done, by name; in the order in which they run."""
        scheduler = self.scheduler
        batches = [each.reqs for each in (scheduler.running_batch, scheduler.last_batch) if each is not None]
        flying = [step.requests for step in self.ledger.flying]
        chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        everybody = [each for group in (*batches, *flying, chunked) for each in group]
        return {each.rid: each for each in dict.fromkeys(everybody) if each.kv.holds_kv and not each.finished()}

    def _retract(self, requests: Iterable[Any]) -> None:
        """Back to the queue; a limit of the queue is for newcomers. A request that was to end anyway ends here."""
        requests = list(requests)
        if not requests:
            return
        self.may_have_sent_back = True
        try:
            self._take_back(requests)
        finally:  # a request without pages stands nowhere else
            with self._unlimited_queue():
                for each in requests:
                    if not (each.kv.holds_kv or ends(self.scheduler, each)):
                        self.scheduler._add_request_to_queue(each, is_retracted=True)

    def _take_back(self, requests: list[Any]) -> None:
        """Their pages, wherever they stand."""
        from sglang.srt.managers.schedule_batch import retract_all

        scheduler = self.scheduler
        retract_all(
            reqs=requests,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=scheduler.hisparse_coordinator,
            offload_kv=False,
        )
        gone = {id(each) for each in requests}
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None and any(id(each) in gone for each in batch.reqs):
                batch.filter_batch(keep_indices=[at for at, each in enumerate(batch.reqs) if id(each) not in gone])
                batch.batch_is_full = False
        if id(scheduler.chunked_req) in gone:
            scheduler.chunked_req = None
        scheduler.running_batch.batch_is_full = False

    def _empty_cache(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if self.tree.supports_prefix_sharing():
            self.tree.evict(EvictParams(num_tokens=self.pages * self.page_tokens))

    @contextlib.contextmanager
    def _unlimited_queue(self) -> Iterator[None]:
        limit, self.scheduler.max_queued_requests = self.scheduler.max_queued_requests, None
        try:
            yield
        finally:
            self.scheduler.max_queued_requests = limit


def _place(flying: Sequence[Launched], batch: Any) -> int | None:
    """Of the step whose output this is. One that could not be read is known by its turn alone."""
    if flying and not flying[0].is_read and flying[0].requests == batch.reqs:
        return 0
    lengths = batch.seq_lens_cpu.numpy()[: len(batch.reqs)]  # the same requests have others in the next step
    for place, each in enumerate(flying):
        if each.is_read and each.requests == batch.reqs and np.array_equal(each.lengths, lengths):
            return place
    return None
