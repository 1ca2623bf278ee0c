"""What a trainer asks of a model, whichever way its tiles are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from valve_tune.base.memory import StashMemory
from valve_tune.base.weights import FrozenWeights
from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.model.dropout import Draw
from valve_tune.tiles.grid import Grid, Tile
from valve_tune.train.batch import MicroBatch


def nothing() -> None:
    """Where no turn is asked for."""


class TilePass(Protocol):
    """One micro-batch in work."""

    def border(self) -> None:
        """Called before each tile; raises StashLost."""
        ...

    def run(self, tile: Tile, ask: Callable[[], None] = nothing) -> None:
        """`ask` is called wherever inside the tile it may be left; it waits, or raises to end the pass."""
        ...

    def forward_loss(self) -> float:
        """After the forward tiles alone: the loss times scale, and no way to gradients; raises StashLost."""
        ...

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
