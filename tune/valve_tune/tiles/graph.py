"""A forward graph as operators over named tensors, and what the backward of each kind of operator reads."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What an operator computes, which decides what its backward needs."""

    LINEAR = "linear"  # frozen weight: the gradient of its input needs only the gradient of its output
    ADAPTER = "adapter"  # trainable matrix: its gradient needs its own input
    NORM = "norm"
    ROTATE = "rotate"
    SCALE = "scale"  # times a trainable vector, as in (IA)3
    SILU = "silu"
    RELU = "relu"  # second output: one sign bit an element
    MULTIPLY = "multiply"
    ADD = "add"
    SOFTMAX = "softmax"  # of query times key
    MIX = "mix"  # probabilities times values
    ATTEND = "attend"  # both in one kernel, which never writes the square matrix
    LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    trainable: str = ""
    cheap: bool = False  # may be run again in backward instead of keeping what it wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """Operators in the order they run. `size` is in bits, of everything an operator writes."""

    operators: tuple[Operator, ...]
    size: Mapping[str, int]
    free: frozenset[str] = frozenset()  # there in backward anyway: token ids, positions

    def producers(self) -> dict[str, Operator]:
        return {tensor: each for each in self.operators for tensor in each.writes}


def gradient(tensor: str) -> str:
    return f"d({tensor})"


def needed(forward: Operator, wanted: Iterable[str]) -> set[str]:
    """Forward tensors that the backward of one operator reads to write the gradients in `wanted`."""
    wanted = set(wanted)
    if not wanted:
        return set()
    reads, own = forward.reads, gradient(forward.trainable) in wanted
    through = {tensor for tensor in reads if gradient(tensor) in wanted}
    match forward.kind:
        case Kind.LINEAR | Kind.ROTATE | Kind.ADD:
            return set()
        case Kind.ADAPTER | Kind.SCALE:
            return set(reads) if own else set()
        case Kind.NORM | Kind.SILU | Kind.ATTEND | Kind.LOSS:
            return set(reads)
        case Kind.RELU:
            return {forward.writes[1]}
        case Kind.MULTIPLY | Kind.MIX:
            return {other for other in reads for tensor in through if other != tensor}
        case Kind.SOFTMAX:  # the softmax from its result, then query from key and key from query
            return {forward.writes[0], *(other for other in reads for tensor in through if other != tensor)}


@dataclass(slots=True)
class BackwardNode:
    """The backward of one operator: what it still has to write, and what it reads for that."""

    forward: Operator
    writes: set[str]
    reads: set[str] = field(default_factory=set)

    def refresh(self) -> set[str]:
        """Work out the reads anew; returns the gradients that are no longer read."""
        before = self.reads
        incoming = {gradient(tensor) for tensor in self.forward.writes} if self.writes else set()
        self.reads = incoming | needed(self.forward, self.writes)
        return {each for each in before - self.reads if each.startswith("d(")}


def differentiate(graph: ForwardGraph) -> list[BackwardNode]:
    """Reverse-mode backward of all that leads to the loss, as if every weight were to be trained."""
    nodes, leading = [], {tensor for each in graph.operators if each.kind is Kind.LOSS for tensor in each.writes}
    for each in reversed(graph.operators):
        if leading.isdisjoint(each.writes):
            continue
        leading.update(each.reads)
        weights = {each.trainable or f"weight of {each.name}"} if each.kind in WEIGHTED else set()
        writes = {gradient(name) for name in (*each.reads, *weights) if name not in graph.free}
        nodes.append(BackwardNode(each, writes))
        nodes[-1].refresh()
    return nodes


WEIGHTED = frozenset({Kind.LINEAR, Kind.ADAPTER, Kind.NORM, Kind.SCALE})
