"""A decoder of the Llama family as a forward graph: what the model must keep follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from valve_tune.tiles.graph import ForwardGraph, Kind, Operator
from valve_tune.tiles.prune import keep

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
LINEARS = (*ATTENTION, *MLP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Widths of one decoder, in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    qk_norm: bool = False

    @property
    def q_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a job trains and how it trades memory for work."""

    targets: frozenset[str]
    rank: int = 8
    first_layer: int = 0  # the lowest layer with an adapter
    again_mlp: bool = True  # gate and up computed again in backward: two products more, two thirds of the bytes less
    bits: int = 16  # of one element


class _Builder:
    def __init__(self, shape: DecoderShape, keeping: Keeping) -> None:
        self.shape, self.keeping = shape, keeping
        self.operators: list[Operator] = []
        self.size: dict[str, int] = {}

    def add(
        self, kind: Kind, reads: tuple[str, ...], write: str, width: int, *, cheap: bool = False, trainable: str = ""
    ) -> str:
        self.size[write] = width * self.keeping.bits
        self.operators.append(
            Operator(name=write, kind=kind, reads=reads, writes=(write,), cheap=cheap, trainable=trainable)
        )
        return write

    def linear(self, layer: int, name: str, source: str, width: int, *, cheap: bool = False) -> str:
        """A frozen product and, where asked for, the adapter beside it."""
        at = f"{layer}.{name}"
        if name not in self.keeping.targets or layer < self.keeping.first_layer:
            return self.add(Kind.LINEAR, (source,), at, width, cheap=cheap)
        frozen = self.add(Kind.LINEAR, (source,), f"{at}.frozen", width, cheap=cheap)
        low = self.add(Kind.ADAPTER, (source,), f"{at}.low", self.keeping.rank, cheap=True, trainable=f"{at}.A")
        high = self.add(Kind.ADAPTER, (low,), f"{at}.high", width, cheap=True, trainable=f"{at}.B")
        return self.add(Kind.ADD, (frozen, high), at, width, cheap=cheap)

    def attention(self, layer: int, x_in: str) -> str:
        shape, at = self.shape, f"{layer}."
        normed = self.add(Kind.NORM, (x_in,), f"{at}normed_in", shape.hidden, cheap=True)
        turned = {}
        for name, width in (("q", shape.q_width), ("k", shape.kv_width)):
            tensor = self.linear(layer, name, normed, width)
            if shape.qk_norm:
                tensor = self.add(Kind.NORM, (tensor,), f"{at}{name}_normed", width, cheap=True)
            turned[name] = self.add(Kind.ROTATE, (tensor,), f"{at}{name}_turned", width, cheap=True)
        values = self.linear(layer, "v", normed, shape.kv_width)
        sources = (turned["q"], turned["k"], values)
        mixed = self.add(Kind.ATTEND, sources, f"{at}mixed", shape.q_width, cheap=True)
        out = self.linear(layer, "o", mixed, shape.hidden)
        return self.add(Kind.ADD, (x_in, out), f"{at}x_mid", shape.hidden, cheap=True)

    def mlp(self, layer: int, x_mid: str) -> str:
        shape, at, again = self.shape, f"{layer}.", self.keeping.again_mlp
        normed = self.add(Kind.NORM, (x_mid,), f"{at}normed_mid", shape.hidden, cheap=True)
        gate = self.linear(layer, "gate", normed, shape.mlp, cheap=again)
        up = self.linear(layer, "up", normed, shape.mlp, cheap=again)
        bent = self.add(Kind.SILU, (gate,), f"{at}bent", shape.mlp, cheap=True)
        inner = self.add(Kind.MULTIPLY, (bent, up), f"{at}inner", shape.mlp, cheap=True)
        down = self.linear(layer, "down", inner, shape.hidden)
        return self.add(Kind.ADD, (x_mid, down), f"{layer + 1}.x_in", shape.hidden, cheap=True)


def decoder_graph(shape: DecoderShape, keeping: Keeping) -> ForwardGraph:
    """The whole decoder with its loss. Sizes are per token, in bits."""
    builder = _Builder(shape, keeping)
    x = builder.add(Kind.LINEAR, ("ids",), "0.x_in", shape.hidden, cheap=True)  # a look-up
    for layer in range(shape.layers):
        x = builder.mlp(layer, builder.attention(layer, x))
    normed = builder.add(Kind.NORM, (x,), "head.normed", shape.hidden, cheap=True)
    logits = builder.add(Kind.LINEAR, (normed,), "head.logits", shape.vocabulary, cheap=True)  # made again in chunks
    builder.add(Kind.LOSS, (logits,), "loss", 1)
    return ForwardGraph(operators=tuple(builder.operators), size=builder.size, free=frozenset({"ids"}))


def kept_names(shape: DecoderShape, keeping: Keeping) -> list[frozenset[str]]:
    """For each layer, and for the head last, the short names of what the model keeps."""
    found: list[set[str]] = [set() for _ in range(shape.layers + 1)]
    for tensor in keep(decoder_graph(shape, keeping)).tensors:
        layer, _, name = tensor.partition(".")
        found[int(layer)].add(name)
    return [frozenset(each) for each in found]
