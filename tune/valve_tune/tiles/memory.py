"""How wide the linears of a decoder are, and what bytes they have."""

from __future__ import annotations

from valve_tune.tiles.decoder import LINEARS, DecoderShape


def widths(shape: DecoderShape, name: str) -> tuple[int, int]:
    """(inputs, outputs) of one linear."""
    return {
        "q": (shape.hidden, shape.q_width),
        "k": (shape.hidden, shape.kv_width),
        "v": (shape.hidden, shape.kv_width),
        "o": (shape.q_width, shape.hidden),
        "gate": (shape.hidden, shape.mlp),
        "up": (shape.hidden, shape.mlp),
        "down": (shape.mlp, shape.hidden),
    }[name]


def layer_bytes(shape: DecoderShape, bits: int) -> int:
    """Frozen weights of one layer without norms and biases: what a residency moves."""
    return sum(a * b for a, b in (widths(shape, name) for name in LINEARS)) * bits // 8
