"""What a trainer asks of a model, whichever way its tiles are computed."""

from __future__ import annotations

from typing import Protocol

from valve_tune.base.memory import StashMemory
from valve_tune.base.weights import FrozenWeights
from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.model.dropout import Draw
from valve_tune.tiles.grid import Grid, Tile
from valve_tune.train.batch import MicroBatch


class TilePass(Protocol):
    """One micro-batch in work."""

    def border(self) -> None:
        """Called before each tile; raises StashLost."""
        ...

    def run(self, tile: Tile) -> None: ...

    def close(self) -> None:
        """However it ended: its memory goes back."""
        ...

    def gradients(self) -> tuple[float, Gradients]:
        """(loss, adapter gradients), both times scale; raises StashLost, and RuntimeError before the last tile."""
        ...


class TileModel(Protocol):
    @property
    def layers(self) -> int: ...

    @property
    def adapter(self) -> Adapter: ...

    @property
    def weights(self) -> FrozenWeights: ...

    @property
    def memory(self) -> StashMemory: ...

    @property
    def spans(self) -> bool:
        """May a sequence be cut into spans?"""
        ...

    def start(self, batch: MicroBatch, *, scale: float, draw: Draw, grid: Grid) -> TilePass: ...
