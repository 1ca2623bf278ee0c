"""The grid of one sequence through all layers: tiles, and the frontier that says which tile may run next."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field


class Phase(enum.IntEnum):
    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How many layers and tokens one tile has; 0 means all. The last tile of a row or column may be smaller."""

    layers: int = 1
    span: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """Layers [layer, layer_end) of tokens [token, token_end)."""

    phase: Phase
    layer: int
    layer_end: int
    token: int
    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Fixed when a job is submitted: other grids give other roundings."""

    layers: int
    tokens: int
    forward: TileShape = TileShape()
    backward: TileShape = TileShape()

    def __post_init__(self) -> None:
        if self.layers < 1 or self.tokens < 1:
            raise ValueError("a grid needs at least one layer and one token")
        if min(self.forward.layers, self.forward.span, self.backward.layers, self.backward.span) < 0:
            raise ValueError("layers and span of a tile are 0 (all) or more")

    def shape(self, phase: Phase) -> TileShape:
        return self.forward if phase is Phase.FORWARD else self.backward

    def layer_cuts(self, phase: Phase) -> list[tuple[int, int]]:
        return cuts(self.layers, self.shape(phase).layers)

    def token_cuts(self, phase: Phase) -> list[tuple[int, int]]:
        return cuts(self.tokens, self.shape(phase).span)

    def tiles(self, phase: Phase) -> Iterator[Tile]:
        for layer, layer_end in self.layer_cuts(phase):
            for token, token_end in self.token_cuts(phase):
                yield Tile(phase, layer, layer_end, token, token_end)


def cuts(length: int, size: int) -> list[tuple[int, int]]:
    size = size or length
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class OutOfOrder(Exception):
    """A tile was asked for before what it reads is complete. Run anyway, its gradients would be plausible and wrong."""


@dataclass(slots=True)
class Frontier:
    """What is done: per layer the tokens whose forward is done, and the first token whose backward is done."""

    layers: int
    tokens: int
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forward = self.forward or [0] * self.layers
        self.backward = self.backward or [self.tokens] * self.layers

    def obstacle(self, tile: Tile) -> str:
        """Why this tile may not run yet; empty if it may."""
        if not (0 <= tile.layer < tile.layer_end <= self.layers and 0 <= tile.token < tile.token_end <= self.tokens):
            return "it lies outside the grid"
        return self._forward(tile) if tile.phase is Phase.FORWARD else self._backward(tile)

    def _forward(self, tile: Tile) -> str:
        if any(done != tile.token for done in self.forward[tile.layer : tile.layer_end]):
            return "the keys and values before it are not there, or it is done already"
        if tile.layer and self.forward[tile.layer - 1] < tile.token_end:
            return "the layer below has not reached its tokens"
        return ""

    def _backward(self, tile: Tile) -> str:
        if self.forward[-1] < self.tokens:
            return "the forward pass is not complete"
        if any(done != tile.token_end for done in self.backward[tile.layer : tile.layer_end]):
            return "later tokens still owe gradients to its keys and values, or it is done already"
        if tile.layer_end < self.layers and self.backward[tile.layer_end] > tile.token:
            return "the layer above has not reached its tokens"
        return ""

    def take(self, tile: Tile) -> None:
        obstacle = self.obstacle(tile)
        if obstacle:
            raise OutOfOrder(f"{tile}: {obstacle}")
        done, token = (self.forward, tile.token_end) if tile.phase is Phase.FORWARD else (self.backward, tile.token)
        done[tile.layer : tile.layer_end] = [token] * (tile.layer_end - tile.layer)

    @property
    def is_complete(self) -> bool:
        return not any(self.backward)
