"""The frozen weights as an own copy in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from valve_tune.base.copies import moved, when_open
from valve_tune.base.weights import StillWeights, Tensors, digest_of, read_folder, split
from valve_tune.tiles.grid import Phase


class OwnCopy(StillWeights):
    """All layers resident all the time."""

    def __init__(self, tensors: Tensors, layers: int, device: torch.device | str = "cpu") -> None:
        self.digest = digest_of(tensors)
        before = when_open(device)
        there = {name: moved(tensor, device, before) for name, tensor in tensors.items()}
        outer, self._layers = split(there, layers)
        self.outer: Tensors = outer

    @classmethod
    def read(cls, folder: Path, layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> OwnCopy:
        return cls(read_folder(folder, dtype), layers, device)


class LoadedModel(StillWeights):
    """Weights that live in the modules of a loaded model, and are never asked for one layer at a time."""

    def __init__(self, tensors: Tensors) -> None:
        self.digest = digest_of(tensors)
        self.outer: Tensors = {}

    def enter(self, layer: int, phase: Phase) -> Tensors:
        return {}
