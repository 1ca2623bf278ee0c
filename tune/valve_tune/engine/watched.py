"""A model whose tiles ask for their turn first; what is computed is the model's own, so the adapter is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from valve_hook.cotrain.interface import Direction

from valve_tune.engine.turns import TileTurns
from valve_tune.model.adapter import Gradients
from valve_tune.model.dropout import Draw
from valve_tune.model.interface import TileModel, TilePass, nothing
from valve_tune.tiles.grid import Grid, Phase, Tile
from valve_tune.train.batch import MicroBatch


class TileProgress:
    """Where the micro-batch stands, in a planner's units. Written by the trainer's thread, read by the engine's."""

    def __init__(self) -> None:
        self.direction, self.left, self.tokens = Direction.FORWARD, 0.0, 0
        self.per_tile = (1, 0)
        """Layers and tokens of one tile; 0 tokens: all."""

    def started(self, grid: Grid, rows: int) -> None:
        self.tokens = rows * grid.tokens
        self.direction, self.left = Direction.FORWARD, float(self.tokens * grid.layers)
        self.per_tile = (grid.forward.layers or grid.layers, grid.forward.span)

    def done(self, tile: Tile, grid: Grid) -> None:
        rows = self.tokens / grid.tokens
        self.left -= rows * (tile.layer_end - tile.layer) * (tile.token_end - tile.token)
        if self.left <= 0 and tile.phase is Phase.FORWARD:
            self.direction, self.left = Direction.BACKWARD, float(self.tokens * grid.layers)

    def tiles(self, layers: int, tokens: int) -> int:
        """How many tiles `layers` layers over `tokens` tokens are; at least one of what was planned."""
        of_tile, span = self.per_tile
        rows = max(1, layers // of_tile)
        return rows * max(1, tokens // span) if span else rows


class WatchedPass:
    def __init__(self, work: TilePass, turns: TileTurns, progress: TileProgress, grid: Grid) -> None:
        self._work, self._turns, self._progress, self._grid = work, turns, progress, grid

    def border(self) -> None:
        self._work.border()

    def run(self, tile: Tile, ask: Callable[[], None] = nothing) -> None:
        self._turns.run(tile.phase, ask, lambda: self._work.run(tile, partial(self._turns.inside, ask)))
        self._progress.done(tile, self._grid)

    def forward_loss(self) -> float:
        self._turns.settle()
        return self._work.forward_loss()

    def close(self) -> None:
        self._turns.settle()  # tiles on their way use what this frees
        self._work.close()

    def gradients(self) -> tuple[float, Gradients]:
        self._turns.settle()
        return self._work.gradients()


class WatchedModel:
    """A TileModel."""

    def __init__(self, model: TileModel, turns: TileTurns, progress: TileProgress) -> None:
        self._model, self._turns, self._progress = model, turns, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def start(self, batch: MicroBatch, *, scale: float, draw: Draw, grid: Grid) -> WatchedPass:
        self._progress.started(grid, len(batch.input_ids))
        self._turns.settle()
        work = self._model.start(batch, scale=scale, draw=draw, grid=grid)
        self._turns.settle()  # tiles run on other streams than what this made
        return WatchedPass(work, self._turns, self._progress, grid)
