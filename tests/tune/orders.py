"""Other orders of tiles than the trainer's: by spans, any wavefront, and the rectangles of published systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from valve_tune.tiles.grid import Frontier, Grid, Phase, Tile, TileShape
from valve_tune.tiles.orders import layer_major


def token_major(grid: Grid, phase: Phase) -> list[Tile]:
    """All layers of a span, then the next span. The only order in which rows can ride in an engine's batch."""
    back = phase is Phase.BACKWARD
    rows = grid.layer_cuts(phase)[:: -1 if back else 1]
    columns = grid.token_cuts(phase)[:: -1 if back else 1]
    return [Tile(phase, *layer, *token) for token in columns for layer in rows]


def wavefront(grid: Grid, phase: Phase, choose: Callable[[Sequence[Tile]], int]) -> list[Tile]:
    """Any legal order: `choose` picks from the tiles that are ready."""
    frontier = Frontier(grid.layers, grid.tokens)
    if phase is Phase.BACKWARD:
        frontier.forward = [grid.tokens] * grid.layers
    waiting, order = list(grid.tiles(phase)), []
    while waiting:
        ready = [tile for tile in waiting if not frontier.obstacle(tile)]
        tile = ready[choose(ready)]
        frontier.take(tile)
        waiting.remove(tile)
        order.append(tile)
    return order


def violation(grid: Grid, order: Iterable[Tile]) -> str:
    """What is wrong with an order of both passes; empty if it is legal and complete."""
    frontier = Frontier(grid.layers, grid.tokens)
    for tile in order:
        obstacle = frontier.obstacle(tile)
        if obstacle:
            return f"{tile}: {obstacle}"
        frontier.take(tile)
    return "" if frontier.is_complete else "some tiles are missing"


def published(layers: int, tokens: int, span: int, group: int) -> dict[str, tuple[Grid, list[Tile]]]:
    """Each published system as a choice of rectangle and order."""

    def plan(forward: TileShape, backward: TileShape, spans_first: bool = False) -> tuple[Grid, list[Tile]]:
        grid = Grid(layers=layers, tokens=tokens, forward=forward, backward=backward)
        last = token_major if spans_first else layer_major
        return grid, [*token_major(grid, Phase.FORWARD), *last(grid, Phase.BACKWARD)]

    step, layer = TileShape(layers=0, span=0), TileShape(layers=1, span=0)
    rows, several = TileShape(layers=0, span=span), TileShape(layers=group, span=0)
    return {
        "plain": plan(step, step),
        "harli": plan(layer, layer),
        "llmstation": plan(several, several),
        "flexllm-paper": plan(rows, rows, spans_first=True),
        "flexllm-code": plan(rows, several),
        "own-process": plan(several, several),
        "in-engine": plan(rows, several),
    }
