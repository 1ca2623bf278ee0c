"""Which pages the steps in flight read and write: noted when a step is launched, looked at when something is lost.

Rows of SGLang's page table are on the device and change under a step: a request that leaves frees its row, and one
whose prompt turns out to be cached already has its pages replaced by the cache's. So a launch copies the rows it
uses, on the device and without waiting for it; a loss reads the copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from valve_hook.ledger import Held, Ledger
from valve_hook.losses import NOTHING_WRITTEN


@dataclass(slots=True, kw_only=True)
class Row(Held):
    first: int = NOTHING_WRITTEN  # index of the first page that a step in flight writes


@dataclass(slots=True, kw_only=True)
class Launched:
    """One step, from its launch until a loss can have been noticed after its output came in."""

    requests: list[Any]
    slots: Any  # a row of token slots for each request; a tensor on the device
    lengths: Any  # tokens of each request after this step; a tensor on the host
    starts: Sequence[int] | None  # where each begins to write; None: its last token only
    dropped: set[str] = field(default_factory=set)  # retracted since: their output of it is not to be believed
    is_in: bool = False  # its output has come in


def launched(batch: Any) -> Launched:
    longest = int(batch.seq_lens_cpu.max())
    return Launched(
        requests=batch.reqs[:],
        slots=batch.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest],
        lengths=batch.seq_lens_cpu,
        starts=list(batch.prefix_lens) if batch.forward_mode.is_extend() else None,
    )


@dataclass(slots=True, kw_only=True)
class StepLedger(Ledger):
    """A ledger that keeps no accounts: it looks at the engine's table, and at the steps' copies of it, when asked."""

    requests: Callable[[], list[Any]]  # who holds pages now
    page_table: Any
    flying: list[Launched] = field(default_factory=list)

    def holders(self) -> tuple[list[Held], int]:
        now = list(self._present())
        return [*now, *(row for step in self.flying for row in self._rows(step))], len(now)

    def first_written(self, held: Held) -> int:
        return held.first if isinstance(held, Row) else NOTHING_WRITTEN

    def copies(self) -> Iterator[tuple[int, int]]:
        yield from ()

    def _present(self) -> Iterator[Held]:
        requests = self.requests()
        if not requests:
            return
        lengths = [each.kv.kv_allocated_len for each in requests]
        slots = self.page_table[[each.kv.req_pool_idx for each in requests], : max(lengths)]
        for each, blocks in zip(requests, self._pages(slots, lengths), strict=True):
            yield Row(request=each.rid, blocks=blocks, row=-1)

    def _rows(self, step: Launched) -> Iterable[Row]:
        lengths = step.lengths.tolist()
        starts = step.starts if step.starts is not None else lengths
        rows = zip(step.requests, self._pages(step.slots, lengths), starts, lengths, strict=True)
        for request, blocks, start, length in rows:
            if request.rid not in step.dropped:
                yield Row(request=request.rid, blocks=blocks, row=-1, first=min(start, length - 1) // self.block_tokens)

    def _pages(self, slots: Any, lengths: Sequence[int]) -> Iterator[array[int]]:
        tokens = self.block_tokens
        pages = (slots[:, ::tokens].cpu().numpy() // tokens).astype(np.uint32)
        return (array("I", row[: -(-length // tokens)].tobytes()) for row, length in zip(pages, lengths, strict=True))
