"""Bytes a job needs, as closed formulas; `tiles.prune` finds the same kept set as an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from valve_tune.tiles.decoder import LINEARS, DecoderShape, Keeping
from valve_tune.tiles.grid import Frontier, Phase, Tile
from valve_tune.tiles.memory import widths


def kept_bytes(shape: DecoderShape, keeping: Keeping) -> int:
    """Per token and layer above the lowest adapter: both residuals, query, key, value, and gate and up if kept."""
    elements = 2 * shape.hidden + shape.q_width + 2 * shape.kv_width
    if not keeping.again_mlp:
        elements += 2 * shape.mlp
    return elements * keeping.bits // 8


def usual_bytes(shape: DecoderShape, tokens: int) -> int:
    """Per token and layer in 16 bits, of a trainer that keeps everything: 34 h + 5 heads x tokens."""
    return 34 * shape.hidden + 5 * shape.heads * tokens


def pruned_share(shape: DecoderShape, keeping: Keeping, tokens: int) -> float:
    return 1 - kept_bytes(shape, keeping) / usual_bytes(shape, tokens)


def adapter_parameters(shape: DecoderShape, keeping: Keeping) -> int:
    chosen = [name for name in LINEARS if name in keeping.targets]
    return (shape.layers - keeping.first_layer) * keeping.rank * sum(sum(widths(shape, name)) for name in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Largest bytes at any tile border of one micro-batch of one row."""

    stash: int
    sums: int
    layers_in_work: int


def peak(shape: DecoderShape, keeping: Keeping, tokens: int, order: list[Tile]) -> Peak:
    """Walk an order. The stash of a layer is freed with its last backward tile, its KV gradients live from its
    first to its last one. The gradient of the residual is one buffer for every legal order.
    """
    frontier = Frontier(shape.layers, tokens)
    per_token = kept_bytes(shape, keeping)
    kv = 2 * shape.kv_width * 4 * tokens
    stash = sums = most = 0
    for tile in order:
        frontier.take(tile)
        live = sum(done * per_token for done, left in zip(frontier.forward, frontier.backward, strict=True) if left > 0)
        work = sum(0 < left < tokens for left in frontier.backward)
        if tile.phase is Phase.BACKWARD:  # inside the tile the layer at work has its gradients too
            work = max(work, 1)
        stash, most = max(stash, live), max(most, work)
    sums = most * kv + tokens * shape.hidden * 4
    return Peak(stash=stash, sums=sums, layers_in_work=most)
