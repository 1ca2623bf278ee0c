"""The order of tiles that a trainer takes: layer by layer."""

from __future__ import annotations

from valve_tune.tiles.grid import Grid, Phase, Tile


def layer_major(grid: Grid, phase: Phase) -> list[Tile]:
    """All spans of some layers, then the next layers: reads each weight once, holds one layer's KV gradients."""
    back = phase is Phase.BACKWARD
    rows = grid.layer_cuts(phase)[:: -1 if back else 1]
    columns = grid.token_cuts(phase)[:: -1 if back else 1]
    return [Tile(phase, *layer, *token) for layer in rows for token in columns]


def whole(grid: Grid) -> list[Tile]:
    """The order of a trainer in its own process: both passes layer by layer."""
    return [*layer_major(grid, Phase.FORWARD), *layer_major(grid, Phase.BACKWARD)]
