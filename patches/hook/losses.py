"""What a loss of blocks means: which requests are hit and which other blocks are no good either. Pure.

A request is hit when one of its blocks is bad. What it wrote in steps whose output has not been believed yet was
computed from bad blocks, so those blocks are bad too, although their memory is sound; a request that shares them is hit
in turn, and so on until nothing changes. A request that has left meanwhile (aborted, or preempted for want of memory)
counts like any other: its blocks are free, hashed, and would be found by the next prompt with the same beginning."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING_WRITTEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    hit: dict[int, int]  # index into the tables: how many of its blocks, from the first, are good
    bad: NDArray[np.uint32]  # every block whose content must not be used
    spoilt: NDArray[np.uint32]  # of them, those that were not lost


def spread(
    lost: NDArray[np.uint32],
    tables: Sequence[array[int]],
    first_written: Callable[[int], int],
    copies: Iterable[tuple[int, int]],
    blocks: int,
) -> Spread:
    """The fixpoint over the blocks of each request, in order. `first_written` is asked about those that are hit: the
    index of the first block that a step in flight may write. `copies`: (source, target) blocks that a step in flight
    copies. Numbers from `blocks` on belong to nobody.
    """
    nobody = blocks
    bad = np.zeros(blocks + 1, dtype=bool)
    bad[lost[lost < blocks]] = True
    edges = np.array([pair for pair in copies if max(pair) < blocks], dtype=np.int64).reshape(-1, 2)
    flat = np.frombuffer(b"".join(tables), dtype=np.uint32).astype(np.intp)
    ends = np.cumsum([len(table) for table in tables], dtype=np.int64)
    hit: set[int] = set()
    before = -1
    while before != (before := int(np.count_nonzero(bad))):
        bad[edges[bad[edges[:, 0]], 1]] = True
        places = np.flatnonzero(bad.take(flat, mode="clip"))
        owners, firsts = np.unique(np.searchsorted(ends, places, side="right"), return_index=True)
        for index in owners.tolist():
            if index in hit:
                continue
            hit.add(index)
            first = first_written(index)
            if first != NOTHING_WRITTEN:
                bad[np.minimum(np.array(tables[index][first:], dtype=np.uint32), nobody)] = True
                bad[nobody] = False
    begins = ends - [len(table) for table in tables]
    every = np.flatnonzero(bad).astype(np.uint32)
    bad[lost[lost < blocks]] = False
    spoilt = np.flatnonzero(bad).astype(np.uint32)
    good = (places[firsts] - begins[owners]).tolist()
    return Spread(hit=dict(zip(owners.tolist(), good, strict=True)), bad=every, spoilt=spoilt)
