"""SGLang's scheduler in the hook's terms, the coarse way: a loss sends every request back and empties the
radix cache, because its tree (in Rust by default) cannot drop chosen pages.

What is easily got wrong here:
- the decode path skips retracted requests only with overlap on: without it the flag is set for the call;
- a request whose last token is in flight stands in no queue any more: dropping that token would lose it, so it is
  remembered and put back;
- the idle leak check compares with a constant, which falls by what is withheld;
- when the last running request finds no memory it is aborted, which with a pool made small by us would fail offline
  work: it goes back to the queue instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from valve_hook.shared import Blocks


class SglangEngine:
    """`valve_hook.keeper.Engine` over a Scheduler. Blocks are pages; page 0 is padding."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.page_tokens = int(self.allocator.page_size)
        self.pages = int(self.allocator.size) // self.page_tokens + 1
        self.withheld: set[int] = set()
        self.dropped: list[Any] = []  # requests whose output was not believed, until they are queued again
        self.is_dropping = False

    # ---- what the keeper asks ----

    def discard(self, running: Collection[str], left: Collection[str]) -> dict[str, int]:
        raise NotImplementedError("SGLang is handled the coarse way")

    def forget(self, blocks: Blocks) -> int:
        raise NotImplementedError("SGLang is handled the coarse way")

    def withhold(self, blocks: Blocks) -> None:
        self.withheld |= set(blocks.tolist()) - {0}
        self._filter_free_pages()
        self._tell_leak_check()

    def release(self, blocks: Blocks) -> None:
        import torch

        back = sorted(set(blocks.tolist()) & self.withheld)
        self.withheld -= set(back)
        pages = torch.tensor(back, dtype=torch.int64, device=self.allocator.device)
        self.allocator.free_pages = torch.cat((self.allocator.free_pages, pages))
        self._tell_leak_check()

    def reset(self) -> int:
        """Retract everybody, the in-flight step's requests among them; empty the cache; go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
        from sglang.srt.managers.schedule_batch import retract_all

        scheduler = self.scheduler
        self.is_dropping = True
        try:
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        finally:
            self.is_dropping = False
        queued = {id(request) for request in scheduler.waiting_queue}
        orphans = [each for each in self.dropped if id(each) not in queued and not each.finished()]
        orphans = list({id(each): each for each in orphans}.values())
        if orphans:
            retract_all(
                reqs=orphans,
                req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=self.allocator,
                tree_cache=scheduler.tree_cache,
                hisparse_coordinator=scheduler.hisparse_coordinator,
                offload_kv=False,
            )
            for request in orphans:
                scheduler._add_request_to_queue(request)
        self.dropped = []
        if not scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("the cache could not be flushed with everybody retracted")
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return len(scheduler.waiting_queue)

    def arrange(self, column_of: Blocks) -> None:
        """Pages are handed out in order after each flush, which is by column already."""

    def free_columns(self) -> Sequence[int]:
        return []

    def gauges(self) -> tuple[int, int, int, int]:
        scheduler = self.scheduler
        free = self.allocator.available_size() // self.page_tokens
        used = self.pages - 1 - free - len(self.withheld)
        wanted = used + sum(
            -(-(len(each.origin_input_ids) + len(each.output_ids)) // self.page_tokens)
            for each in scheduler.waiting_queue[:32]
        )
        return used, wanted, len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)

    # ---- what a step says ----

    def disbelieve(self, batch: Any) -> Callable[[], None]:
        """From here on SGLang skips the batch's unfinished requests like retracted ones; returns what undoes it."""
        flags = [(each, each.is_retracted) for each in batch.reqs if not each.finished()]
        processor = self.scheduler.batch_result_processor
        overlap = processor.enable_overlap

        def undo() -> None:
            object.__setattr__(processor, "enable_overlap", overlap)
            for each, was in flags:
                each.is_retracted = was

        object.__setattr__(processor, "enable_overlap", True)  # a frozen value, but the one place that is asked
        for each, _ in flags:
            each.is_retracted = True
        self.dropped += [each for each, _ in flags]
        return undo

    def open_requests(self) -> int:
        scheduler = self.scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        alive = {id(each) for batch in batches if batch is not None for each in batch.reqs if not each.finished()}
        if scheduler.chunked_req is not None:
            alive.add(id(scheduler.chunked_req))
        return len(alive) + len(scheduler.waiting_queue)

    # ---- parts ----

    def _filter_free_pages(self) -> None:
        import torch

        held = torch.from_numpy(np.array(sorted(self.withheld), dtype=np.int64))
        for name in ("free_pages", "release_pages"):
            pages = getattr(self.allocator, name, None)
            if pages is not None:
                setattr(self.allocator, name, pages[~torch.isin(pages, held.to(pages.device))])
        staged = getattr(self.allocator, "staged_pages", None)
        if staged:
            self.allocator.merge_and_sort_free()
            self._filter_free_pages()

    def _tell_leak_check(self) -> None:
        checker = getattr(self.scheduler, "invariant_checker", None)
        if checker is not None:
            checker.max_total_num_tokens = self.scheduler.max_total_num_tokens - len(self.withheld) * self.page_tokens
