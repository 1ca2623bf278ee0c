"""Tensors in one range of which valved backs some blocks and not others.

A tensor lies in neighbouring lent blocks; several tensors may share a block. If valved takes a block under a tensor,
`generation` rises. The holder of the tensor reads that, and gives the tensor back like any other.

The last methods are those of the engine hook (`valve_hook.reconciler.EngineAdapter`). valved sees the stash as KV
memory in which one request holds everything.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from valve_tune.base.memory import ALIGN, NoRoom

REQUEST = "micro-batch"
Blocks = NDArray[np.uint32]


class LentMemory:
    """`range_` is the range as bytes; `at_border` is called between two tiles, `look` whenever a change may matter.

    A block counts as held until `settle`, even when its tensors were given back: the GPU may not yet have run the
    work that reads them.
    """

    def __init__(self, range_: torch.Tensor, block_bytes: int) -> None:
        self._range, self.block_bytes = range_, block_bytes
        self.blocks: int = range_.numel() // block_bytes
        self._is_lent = np.ones(self.blocks, dtype=bool)
        self._taken: list[tuple[int, int]] = []  # [start, end) of what is handed out, in order
        self._held: set[int] = set()
        self._changes = 0
        self.at_border: Callable[[], None] = lambda: None
        self.look: Callable[[], None] = lambda: None

    # ---- what a stash asks ----

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        start = self._place(max(ALIGN, -(-size // ALIGN) * ALIGN))
        if start is None:
            raise NoRoom(int(self._is_lent.sum()) * self.block_bytes + 1)
        self._held |= self._under(start, start + size)
        return self._range[start : start + size].view(dtype).view(tuple(shape))

    def give(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr() - self._range.data_ptr()
        self._taken = [each for each in self._taken if each[0] != start]

    def settle(self) -> None:
        self._held = {block for each in self._taken for block in self._under(*each)}

    def generation(self) -> int:
        self.look()
        return self._changes

    def border(self) -> None:
        self.at_border()

    def room(self) -> int:
        return int(self._is_lent.sum()) * self.block_bytes - sum(end - start for start, end in self._taken)

    def limit(self) -> int:
        return self.blocks * self.block_bytes

    def _place(self, size: int) -> int | None:
        """First fit. With few tensors there are few places to look through."""
        for low, high in self._runs():
            at = low
            for start, end in self._taken:
                if end <= at or start >= high:
                    continue
                if start - at >= size:
                    break
                at = end
            if high - at >= size:
                insort(self._taken, (at, at + size))
                return at
        return None

    def _runs(self) -> list[tuple[int, int]]:
        """Neighbouring lent blocks, in bytes."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self._is_lent, [False]]).astype(np.int8)))
        return [(int(low) * self.block_bytes, int(high) * self.block_bytes) for low, high in edges.reshape(-1, 2)]

    def _under(self, start: int, end: int) -> set[int]:
        return set(range(start // self.block_bytes, -(-end // self.block_bytes)))

    def held(self) -> list[int]:
        return sorted(self._held)

    # ---- what valved does, as the hook tells it ----

    def discard(self, running: Mapping[str, int], left: Iterable[str]) -> dict[str, Sequence[int]]:
        self._changes += 1
        return dict.fromkeys(running, ())

    def forget(self, blocks: Blocks) -> int:
        return 0

    def withhold(self, blocks: Blocks) -> None:
        self._is_lent[blocks] = False

    def release(self, blocks: Blocks) -> None:
        self._is_lent[blocks] = True

    def reset(self) -> int:
        self._changes += 1
        return 1

    def abandon(self) -> int:
        return self.reset()

    def arrange(self, column_of: Blocks) -> None:
        """The order in which blocks are handed out is that of their addresses."""

    def free_columns(self) -> Sequence[int]:
        """Only an online engine is asked for offers."""
        return ()

    def gauges(self) -> tuple[int, int, int, int]:
        held = len(self._held)
        return held, self.blocks, int(held > 0), 0
