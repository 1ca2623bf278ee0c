"""What one micro-batch keeps from forward to backward, in memory that may be taken away."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from valve_tune.base.memory import StashLost, StashMemory


class Stash:
    """Buffers of [rows, tokens, width] by layer and name, made when first written."""

    def __init__(self, memory: StashMemory, rows: int, tokens: int) -> None:
        self._memory, self._rows, self._tokens = memory, rows, tokens
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._generation = memory.generation()
        self.peak_bytes = 0

    def write(self, layer: int, name: str, first: int, value: torch.Tensor) -> None:
        buffer = self._kept.get((layer, name))
        if buffer is None:
            shape = (self._rows, self._tokens, value.shape[-1])
            buffer = self._kept[layer, name] = self._memory.take(shape, value.dtype, value.device)
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        buffer[:, first : first + value.shape[1]] = value

    def has(self, layer: int, name: str) -> bool:
        return (layer, name) in self._kept

    def read(self, layer: int, name: str, first: int, end: int) -> torch.Tensor:
        return self._kept[layer, name][:, first:end]

    def drop(self, layer: int, name: str | None = None) -> None:
        for key in [key for key in self._kept if key[0] == layer and name in (None, key[1])]:
            self._memory.give(self._kept.pop(key))

    def border(self) -> None:
        """Between two tiles: memory comes and goes, and what is lost already need not be computed to its end."""
        self._memory.border()
        self._whole()

    def close(self) -> None:
        """After `check`, or where the micro-batch is not used: whatever is kept still goes back."""
        while self._kept:
            self._memory.give(self._kept.popitem()[1])
        self._memory.settle()

    def check(self, device: torch.device) -> None:
        """Whether anything was reclaimed before the device read it: a GPU is only told what to do, so it ends first."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._whole()

    def _whole(self) -> None:
        if self._memory.generation() != self._generation:
            raise StashLost("memory of the stash was reclaimed")

    def items(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        yield from self._kept.items()

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self._kept.values())
