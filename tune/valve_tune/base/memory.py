"""Gives kept tensors and resident layers their memory: torch's own, or memory that valved lends and takes back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch


class StashLost(Exception):
    """Memory of the stash was reclaimed meanwhile. The micro-batch must be done again. Nothing of it was counted."""


class NoRoom(StashLost):
    """The memory that is lent now has no room for it. At least `needs` bytes are needed."""

    def __init__(self, needs: int) -> None:
        super().__init__("the memory that is lent is too small for it")
        self.needs = needs


ALIGN = 512  # of torch's own allocator on a card; on a CPU it is 64


def taken_bytes(tensor: torch.Tensor) -> int:
    """What a tensor of this size takes of lent memory."""
    return max(ALIGN, -(-int(tensor.nbytes) // ALIGN) * ALIGN)


class StashMemory(Protocol):
    """`generation` changes whenever bytes that were handed out may have been lost."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Raises NoRoom."""
        ...

    def give(self, tensor: torch.Tensor) -> None: ...

    def settle(self) -> None:
        """Returns when nothing that was given back is read any more, or when what was read is not used."""
        ...

    def generation(self) -> int: ...

    def border(self) -> None:
        """Called between two tiles. Memory whose owner must help comes and goes in here, and nowhere else."""
        ...

    def room(self) -> int:
        """Bytes that are lent and not handed out."""
        ...

    def limit(self) -> int:
        """The most that can ever be lent."""
        ...


class TorchMemory:
    """Torch's own allocator: nothing is ever reclaimed."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Freed with its last reference."""

    def settle(self) -> None:
        """Nothing is reclaimed."""

    def generation(self) -> int:
        return 0

    def border(self) -> None:
        """Nothing comes or goes."""

    def room(self) -> int:
        return sys.maxsize

    def limit(self) -> int:
        return sys.maxsize
