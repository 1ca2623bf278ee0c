"""Which pages the steps in flight read and write: noted when a step is launched, looked at when something is lost.

Rows of SGLang's page table are on the device and change under a step: a request that leaves frees its row, and one
whose prompt turns out to be cached already has its pages replaced by the cache's. So a launch copies the rows it
uses, on the device and without waiting for it; a loss reads the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.ledger import Judgement, Ledger
from valve_hook.shared import Blocks


@dataclass(slots=True, kw_only=True)
class Rows:
    """Page tables of many requests as one matrix. Behind the end of a row stands page 0, which nobody loses."""

    names: list[str]
    pages: NDArray[np.int32]
    counts: NDArray[np.int64]
    first: NDArray[np.int64]  # index of the first page that a step in flight writes
    is_hit: NDArray[np.bool_] = field(init=False)
    _index: NDArray[np.intp] | None = None

    def __post_init__(self) -> None:
        self.is_hit = np.zeros(len(self.names), dtype=bool)

    def hit(self, bad: NDArray[np.bool_]) -> None:
        """Who has a bad page is hit, and what it writes is bad, too."""
        if self._index is None:
            self._index = self.pages.astype(np.intp)
        new = bad[self._index].any(axis=1) & ~self.is_hit
        self.is_hit |= new
        rows, columns = self.pages[new], np.arange(self.pages.shape[1])
        bad[rows[columns >= self.first[new][:, None]]] = True
        bad[0] = False

    def without(self, others: Rows) -> Rows:
        """Rows that do not stand in `others` just so; those that do tell it what they write. Between most steps a
        request's table only grows, and then nothing is left.
        """
        if not others.names:
            return self
        places = {name: place for place, name in enumerate(others.names)}
        theirs = np.array([places.get(name, -1) for name in self.names], dtype=np.int64)
        width = min(self.pages.shape[1], others.pages.shape[1])
        mine, same = self.pages[:, :width], others.pages[: len(theirs), :width]
        if (theirs[: len(same)] != np.arange(len(same))).any() or len(same) < len(theirs):
            same = others.pages[theirs, :width]
        is_known = (theirs >= 0) & (self.counts <= width) & ~((mine != same) & (mine != 0)).any(axis=1)
        np.minimum.at(others.first, theirs[is_known], self.first[is_known])
        return self.only(~is_known)

    def only(self, chosen: NDArray[np.bool_]) -> Rows:
        names = [name for name, is_chosen in zip(self.names, chosen.tolist(), strict=True) if is_chosen]
        return Rows(names=names, pages=self.pages[chosen], counts=self.counts[chosen], first=self.first[chosen])


@dataclass(slots=True, kw_only=True)
class Launched:
    """One step, from its launch until a loss can have been noticed after its output came in."""

    requests: list[Any]
    slots: Any  # of each request, the first slot of each page; a tensor on the device
    lengths: Any  # tokens of each request after this step; a tensor on the host
    starts: Sequence[int] | None  # where each begins to write; None: its last token only
    dropped: set[str] = field(default_factory=set)  # retracted since: their output of it is not to be believed
    is_in: bool = False  # its output has come in


def launched(batch: Any, block_tokens: int) -> Launched:
    longest = int(batch.seq_lens_cpu.max())
    return Launched(
        requests=batch.reqs[:],
        slots=batch.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest:block_tokens],
        lengths=batch.seq_lens_cpu,
        starts=list(batch.prefix_lens) if batch.forward_mode.is_extend() else None,
    )


@dataclass(slots=True, kw_only=True)
class StepLedger(Ledger):
    """A ledger that keeps no accounts: it looks at the engine's table, and at the steps' copies of it, when asked."""

    requests: Callable[[], list[Any]]  # who holds pages now
    page_table: Any
    flying: list[Launched] = field(default_factory=list)

    def judge(self, lost: Blocks, blocks: int) -> Judgement:
        """As `losses.spread`, on matrices."""
        now = self._present()
        tables = [now, *(rows for step in self.flying if len((rows := self._rows(step).without(now)).names))]
        bad = np.zeros(blocks, dtype=bool)
        bad[lost] = True
        before = -1
        while before != (before := int(np.count_nonzero(bad))):
            for rows in tables:
                rows.hit(bad)
        hit = now.only(now.is_hit)
        sound = bad[hit.pages].argmax(axis=1).tolist() if hit.names else []
        return Judgement(
            running=dict(zip(hit.names, sound, strict=True)),
            left=frozenset(name for rows in tables[1:] for name in rows.only(rows.is_hit).names),
            bad=np.flatnonzero(bad).astype(np.uint32),
        )

    def _present(self) -> Rows:
        requests = self.requests()
        lengths = np.array([each.kv.kv_allocated_len for each in requests], dtype=np.int64)
        places, longest = [each.kv.req_pool_idx for each in requests], int(lengths.max(initial=0))
        slots = self.page_table[places, : longest : self.block_tokens]
        return self._matrix([each.rid for each in requests], slots, lengths, lengths)

    def _rows(self, step: Launched) -> Rows:
        lengths = step.lengths.numpy().astype(np.int64)
        starts = lengths - 1 if step.starts is None else np.minimum(step.starts, lengths - 1)
        rows = self._matrix([each.rid for each in step.requests], step.slots, lengths, self._first(starts))
        return rows.only(np.array([name not in step.dropped for name in rows.names])) if step.dropped else rows

    def _first(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        return starts // self.block_tokens

    def _matrix(self, names: list[str], slots: Any, lengths: NDArray[np.int64], first: NDArray[np.int64]) -> Rows:
        tokens = self.block_tokens
        pages = slots.cpu().numpy().astype(np.int32)
        if tokens > 1:
            pages //= tokens
        counts = -(-lengths // tokens)
        pages[np.arange(pages.shape[1]) >= counts[:, None]] = 0
        return Rows(names=names, pages=pages, counts=counts, first=first)
