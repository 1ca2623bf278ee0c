"""What is kept for requests that lost KV and were sent back: their sound beginnings, and what they compute again.

A request that comes back finds its beginning in the prefix cache, unless somebody took those blocks meanwhile. So they
are the last that a queue gives up (free_blocks.py), for at most a quarter of the blocks that have memory; beyond it the
request sent back first is dropped. What a loss cost is known when the request runs again: what it had computed, less
what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from valve_hook.vllm.free_blocks import ColumnQueue

Block = Any  # vllm's KVCacheBlock
SHARE = 4  # of the blocks that have memory, one in so many at most


@dataclass(kw_only=True)
class Prefixes:
    """One per Scheduler."""

    backed: Callable[[], int]  # blocks that have memory
    queue: ColumnQueue | None = None  # None: vLLM's own order, in which nothing is kept
    computed: dict[str, int] = field(default_factory=dict)  # request: tokens it had, until it comes back
    _kept: dict[str, list[Block]] = field(
        default_factory=dict
    )  # request: its beginning; the one sent back first, first
    _blocks: int = 0

    def use(self, queue: ColumnQueue) -> None:
        """A new queue knows of nothing that is kept."""
        self.queue, self._kept, self._blocks = queue, {}, 0

    def keep(self, request: str, sound: Sequence[Block], computed: int) -> list[Block]:
        """It was sent back with so many tokens computed; what of its beginning is kept."""
        self.drop(request)
        self.computed[request] = computed
        if self.queue is None:
            return []
        most = self.backed() // SHARE
        blocks = list(takewhile(lambda block: block.block_hash is not None, sound[:most]))
        while self._kept and self._blocks + len(blocks) > most:
            self.drop(next(iter(self._kept)))
        if blocks:
            self._kept[request] = blocks
            self._blocks += len(blocks)
            self.queue.keep(blocks)
        return blocks

    def drop(self, request: str) -> None:
        """It has come back, or ended, or is not waited for."""
        blocks = self._kept.pop(request, None)
        if blocks is not None and self.queue is not None:
            self._blocks -= len(blocks)
            self.queue.let_go(blocks)

    def end(self, request: str) -> None:
        self.drop(request)
        self.computed.pop(request, None)

    def resume(self, request: str, found: int) -> int:
        """It runs again, from this token on: how many it computes a second time."""
        self.drop(request)
        return max(0, self.computed.pop(request, found) - found)

    def clear(self) -> None:
        """The cache is emptied: no request finds anything."""
        for request in list(self._kept):
            self.drop(request)
