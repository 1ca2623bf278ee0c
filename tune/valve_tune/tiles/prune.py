"""Graph pruning: the least bytes of forward tensors from which backward can be computed.

Two steps. `backward_of` removes from the full backward graph every gradient that is not read, to a fixed point. `keep`
then asks, for what is left, which tensors to keep so that all that backward reads is either kept or can be computed
again by cheap operators. A tensor cannot be had exactly if a path of unkept tensors leads from it, through cheap
operators, to one whose operator is not cheap. So a sufficient set is a vertex cut, and the least one a minimum cut.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from valve_tune.tiles.graph import BackwardNode, ForwardGraph, differentiate, gradient

Vertex = tuple[str, int]
SOURCE: Vertex = ("", 0)
SINK: Vertex = ("", 1)
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What to keep, what to compute again, and what backward reads in all (the two and what they are computed from)."""

    tensors: frozenset[str]
    again: frozenset[str]
    read: frozenset[str]
    bits: int


def backward_of(graph: ForwardGraph) -> list[BackwardNode]:
    """Backward without the gradients of frozen weights, and without whatever only they needed."""
    nodes = differentiate(graph)
    adapters = {gradient(each.trainable) for each in graph.operators if each.trainable}
    readers: dict[str, int] = defaultdict(int)
    writers: dict[str, list[BackwardNode]] = defaultdict(list)
    for node in nodes:
        for tensor in node.reads:
            readers[tensor] += 1
        for tensor in node.writes:
            writers[tensor].append(node)
    queue = deque(nodes)
    while queue:
        node = queue.popleft()
        dead = {each for each in node.writes if not readers[each] and each not in adapters}
        if not dead:
            continue
        node.writes -= dead
        before = set(node.reads)
        node.refresh()
        for tensor in before - node.reads:
            readers[tensor] -= 1
            queue.extend(writers[tensor])  # its maker may now work for nothing
    return [node for node in nodes if node.writes]


def keep(graph: ForwardGraph) -> Kept:
    made = graph.producers()
    read = {tensor for node in backward_of(graph) for tensor in node.reads if tensor in made}
    network = _network(graph, read)
    _saturate(network)
    reached = _reach(network)
    kept = frozenset(t for t in made if (t, 0) in reached and (t, 1) not in reached)
    return Kept(
        tensors=kept,
        again=frozenset(_closure(graph, kept) & _ancestors(graph, read, kept)) - kept,
        read=frozenset(read),
        bits=sum(graph.size[tensor] for tensor in kept),
    )


def _closure(graph: ForwardGraph, kept: Iterable[str]) -> set[str]:
    have = set(kept) | graph.free
    for each in graph.operators:
        if each.cheap and have.issuperset(each.reads):
            have.update(each.writes)
    return have


def _ancestors(graph: ForwardGraph, read: set[str], kept: Iterable[str]) -> set[str]:
    """What is computed on the way from the kept tensors to those that are read."""
    made, found, stack = graph.producers(), set(read), list(read - set(kept))
    while stack:
        for tensor in made[stack.pop()].reads:
            if tensor in made and tensor not in found:
                found.add(tensor)
                if tensor not in kept:
                    stack.append(tensor)
    return found


def _network(graph: ForwardGraph, read: set[str]) -> dict[Vertex, dict[Vertex, int]]:
    """Each tensor is an edge from its 0 to its 1 whose capacity is its size; paths lead from readers to makers."""
    made = graph.producers()
    network: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)

    def join(start: Vertex, end: Vertex, capacity: int) -> None:
        network[start][end] = capacity
        network[end].setdefault(start, 0)

    for tensor, each in made.items():
        join((tensor, 0), (tensor, 1), graph.size[tensor])
        if not each.cheap or any(other not in made and other not in graph.free for other in each.reads):
            join((tensor, 1), SINK, ENDLESS)
            continue
        for other in each.reads:
            if other in made:
                join((tensor, 1), (other, 0), ENDLESS)
    for tensor in sorted(read):
        join(SOURCE, (tensor, 0), ENDLESS)
    return network


def _saturate(network: dict[Vertex, dict[Vertex, int]]) -> None:
    """Largest flow, by shortest augmenting paths."""
    while True:
        came = _reach(network)
        if SINK not in came:
            return
        path, vertex = [], SINK
        while vertex != SOURCE:
            path.append((came[vertex], vertex))
            vertex = came[vertex]
        amount = min(network[start][end] for start, end in path)
        for start, end in path:
            network[start][end] -= amount
            network[end][start] += amount


def _reach(network: dict[Vertex, dict[Vertex, int]]) -> dict[Vertex, Vertex]:
    """Vertices that still have room from the source, each with the one before it."""
    came, queue = {SOURCE: SOURCE}, deque([SOURCE])
    while queue:
        start = queue.popleft()
        for end, room in network[start].items():
            if room and end not in came:
                came[end] = start
                queue.append(end)
    return came
