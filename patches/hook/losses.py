"""What a loss of blocks means: which requests are hit and which other blocks are no good either. Pure.

A request is hit when one of its blocks is bad. What it wrote in steps whose output has not been believed yet was
computed from bad blocks, so those blocks are bad too, although their memory is sound; whoever shares them is hit in
turn, and so on until nothing changes. A request that has left meanwhile (aborted, or preempted for want of memory)
counts like any other: its blocks are free, hashed, and would be found by the next prompt with the same beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING_WRITTEN = -1
_NONE: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One request and its blocks in order. `first_written`: index of the first that a step in flight may write."""

    request: str
    blocks: NDArray[np.uint32]
    first_written: int = NOTHING_WRITTEN
    has_left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    hit: frozenset[int]  # indices into the holders
    bad: NDArray[np.uint32]  # every block whose content must not be used, the lost ones among them


def spread(
    lost: NDArray[np.uint32], holders: Sequence[Holder], copies: Iterable[tuple[int, int]], blocks: int
) -> Verdict:
    """The fixpoint. `copies`: (source, target) blocks that a step in flight copies. Unknown numbers are no one's."""
    nobody = blocks  # where unknown numbers point
    bad = np.zeros(blocks + 1, dtype=bool)
    bad[lost[lost < blocks]] = True
    edges = np.array([pair for pair in copies if max(pair) < blocks], dtype=np.int64).reshape(-1, 2)
    kept = [index for index, holder in enumerate(holders) if len(holder.blocks)]
    flat = np.minimum(np.concatenate([holders[index].blocks for index in kept]), nobody) if kept else _NONE
    lengths = np.array([len(holders[index].blocks) for index in kept], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    hit: set[int] = set()
    before = -1
    while before != (before := int(np.count_nonzero(bad))):
        bad[edges[bad[edges[:, 0]], 1]] = True
        now = {kept[place] for place in np.flatnonzero(np.logical_or.reduceat(bad[flat], starts))} if kept else set()
        for index in now - hit:
            holder = holders[index]
            if holder.first_written != NOTHING_WRITTEN:
                bad[np.minimum(holder.blocks[holder.first_written :], nobody)] = True
                bad[nobody] = False
        hit |= now
    return Verdict(hit=frozenset(hit), bad=np.flatnonzero(bad).astype(np.uint32))
