"""SGLang's free list, without the pages that have no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from valve_hook.shared import Blocks

OFFER_EVERY = 16  # steps between two looks for free columns: each reads the free list from the device


class FreePages:
    """One per Scheduler. Page 0 is padding. A flush, by us or by a user, hands out all pages again, and those without
    memory are filtered out again. The idle leak check compares with a constant, which falls by what is taken.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._allocator = allocator = scheduler.token_to_kv_pool_allocator
        self.page_tokens = int(allocator.page_size)
        self.pages = int(allocator.size) // self.page_tokens + 1
        self.withheld = np.zeros(self.pages, dtype=bool)
        self.taken = np.zeros(self.pages, dtype=bool)  # off the free list: what is withheld, unless somebody held it
        self.taken_pages = 0
        self.arrange(np.zeros(self.pages, dtype=np.uint32))
        self.has_whole = False  # columns, at the last look
        self._looks = 0
        self._free: Any = None  # the allocator's own, once pages without memory may come back
        self._clear, allocator.clear = allocator.clear, self.clear

    @property
    def backed_tokens(self) -> int:
        return (self.pages - 1 - self.taken_pages) * self.page_tokens

    def withhold(self, blocks: Blocks) -> None:
        new = blocks[(blocks != 0) & ~self.withheld[blocks]]
        if not len(new):
            return
        self.withheld[new] = True
        self._take_off()
        held = int(np.count_nonzero(~self.taken[new]))
        if held and self._free is None:
            self.release(new)
            raise RuntimeError(f"an unknown holder uses {held} pages without memory")

    def release(self, blocks: Blocks) -> None:
        self.withheld[blocks] = False
        back = blocks[self.taken[blocks]]
        if len(back):
            self.taken[back] = False
            self._hand_out(np.concatenate((self.numbers(), back.astype(np.int64))))

    def take_what_comes_back(self) -> None:
        """After all has failed: a page without memory that has an unknown holder is taken off when it is freed."""
        if self._free is None:
            self._free, self._allocator.free = self._allocator.free, self.free

    def give_as_it_comes(self) -> None:
        """The opposite."""
        if self._free is not None:
            self._allocator.free, self._free = self._free, None

    def in_use(self, blocks: Blocks) -> int:
        is_asked = np.zeros(self.pages, dtype=bool)
        is_asked[blocks] = True
        return len(blocks) - int(np.count_nonzero(is_asked[self.numbers()]))

    def arrange(self, column_of: Blocks) -> None:
        """Free pages are sorted by number at each event, which is by column."""
        self._column_of = column_of.astype(np.int64)
        self._sizes = np.bincount(self._column_of)
        self._least = int(self._sizes[self._sizes > 0].min())

    def columns(self) -> Sequence[int]:
        """Whole ones, from the last to the first: the first are handed out first. Where the cache keeps the surplus
        there is none, and nothing is read for that.
        """
        self._looks += 1
        if self._looks % OFFER_EVERY:
            return []
        found: list[int] = []
        if self._allocator.available_size() >= self._least * self.page_tokens:
            counts = np.bincount(self._column_of[self.numbers()], minlength=len(self._sizes))
            found = np.flatnonzero((counts == self._sizes) & (self._sizes > 0))[::-1].tolist()
        self.has_whole = bool(found)
        return found

    def numbers(self) -> Any:
        self._allocator.merge_and_sort_free()
        return self._allocator.free_pages.cpu().numpy()

    # ---- what SGLang calls, by way of us ----

    def clear(self) -> None:
        self._clear()
        self.taken[:] = False
        self._take_off()

    def free(self, slots: Any) -> None:
        self._free(slots)
        self._take_off()

    # ---- parts ----

    def _take_off(self) -> None:
        """What is withheld, off the free list."""
        free = self.numbers()
        is_held = self.withheld[free]
        if is_held.any():
            self.taken[free[is_held]] = True
            self._hand_out(free[~is_held])

    def _hand_out(self, pages: Any) -> None:
        """From now on, lowest first; and the idle leak check is told how many there are."""
        self._allocator.free_pages = self._allocator.free_pages.new_tensor(np.sort(pages, kind="stable"))
        self.taken_pages = int(np.count_nonzero(self.taken))
        checker = getattr(self._scheduler, "invariant_checker", None)
        if checker is not None:
            checker.max_total_num_tokens = self._scheduler.max_total_num_tokens - self.taken_pages * self.page_tokens
