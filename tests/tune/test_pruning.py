"""Pruning: never more is kept than the least that suffices, and the formulas say the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from formulas import adapter_parameters, kept_bytes, peak, pruned_share
from hypothesis import given
from hypothesis import strategies as st
from orders import token_major
from valve_tune.tiles.decoder import LINEARS, MLP, DecoderShape, Keeping, decoder_graph, kept_names
from valve_tune.tiles.graph import ForwardGraph, Kind, Operator, gradient
from valve_tune.tiles.grid import Grid, Phase, TileShape
from valve_tune.tiles.memory import layer_bytes
from valve_tune.tiles.orders import layer_major
from valve_tune.tiles.prune import _closure, backward_of, keep

TINY = DecoderShape(layers=3, hidden=64, heads=4, kv_heads=2, head_size=16, mlp=128, vocabulary=100)
B8 = DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, mlp=14336, vocabulary=128256)
B70 = DecoderShape(layers=80, hidden=8192, heads=64, kv_heads=8, head_size=128, mlp=28672, vocabulary=128256)
UNARY = (Kind.LINEAR, Kind.NORM, Kind.ROTATE, Kind.SILU, Kind.RELU, Kind.ADAPTER, Kind.SCALE)
BINARY = (Kind.ATTEND, Kind.MULTIPLY, Kind.ADD, Kind.SOFTMAX, Kind.MIX)


def suffices(graph: ForwardGraph, kept: Iterable[str]) -> bool:
    """Can backward be computed from these tensors alone? Straight from the definition."""
    made = graph.producers()
    read = {tensor for node in backward_of(graph) for tensor in node.reads if tensor in made}
    return read <= _closure(graph, kept)


@st.composite
def small_graphs(draw) -> ForwardGraph:
    """Up to six operators, each reading earlier tensors, and a loss over the last."""
    tensors, operators, size = ["ids"], [], {}
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(UNARY + (BINARY if len(tensors) > 2 else ())))
        sources = st.sampled_from(tensors)
        reads = (draw(sources), draw(sources)) if kind in BINARY else (draw(sources),)
        write = f"t{number}"
        writes = (write, f"{write}.sign") if kind is Kind.RELU else (write,)
        size |= {each: 1 if each.endswith("sign") else draw(st.integers(2, 9)) for each in writes}
        operators.append(
            Operator(
                name=write,
                kind=kind,
                reads=reads,
                writes=writes,
                trainable=f"w{number}" if kind in (Kind.ADAPTER, Kind.SCALE) else "",
                cheap=draw(st.booleans()),
            )
        )
        tensors.append(write)
    operators.append(Operator(name="loss", kind=Kind.LOSS, reads=(tensors[-1],), writes=("loss",)))
    return ForwardGraph(operators=tuple(operators), size=size | {"loss": 1}, free=frozenset({"ids"}))


@given(small_graphs())
def test_no_smaller_set_suffices(graph: ForwardGraph) -> None:
    kept = keep(graph)
    assert suffices(graph, kept.tensors)
    made = sorted(graph.size)
    enough = (
        sum(graph.size[each] for each in chosen)
        for count in range(len(made) + 1)
        for chosen in itertools.combinations(made, count)
        if suffices(graph, chosen)
    )
    assert kept.bits == min(enough)
    for tensor in kept.tensors:
        assert not suffices(graph, kept.tensors - {tensor}), f"{tensor} was kept for nothing"
    assert kept.read <= kept.tensors | kept.again


def brute_force_backward(graph: ForwardGraph) -> set[str]:
    """Gradients on some way from the loss to a trained weight, by following the definition from both ends."""
    trained_below: dict[str, bool] = {}
    for each in graph.operators:
        below = bool(each.trainable) or any(trained_below.get(tensor, False) for tensor in each.reads)
        trained_below |= dict.fromkeys(each.writes, below)
    reaches, wanted = {"loss"}, set()
    for each in reversed(graph.operators):
        if not reaches & set(each.writes):
            continue
        reaches |= set(each.reads)
        wanted |= {gradient(tensor) for tensor in each.reads if trained_below.get(tensor, False)}
        if each.trainable:
            wanted.add(gradient(each.trainable))
    return wanted


@given(small_graphs())
def test_backward_computes_the_gradients_on_the_way_to_an_adapter_and_no_other(graph: ForwardGraph) -> None:
    written = {tensor for node in backward_of(graph) for tensor in node.writes}
    assert written == brute_force_backward(graph)


def chain(*kinds: tuple[Kind, str]) -> ForwardGraph:
    operators, size, at = [], {}, "ids"
    for number, (kind, trainable) in enumerate(kinds):
        write = f"t{number}"
        writes = (write, f"{write}.sign") if kind is Kind.RELU else (write,)
        size |= {write: 16, f"{write}.sign": 1}
        operators.append(Operator(name=write, kind=kind, reads=(at,), writes=writes, trainable=trainable))
        at = write
    operators.append(Operator(name="loss", kind=Kind.LOSS, reads=(at,), writes=("loss",)))
    return ForwardGraph(operators=tuple(operators), size=size | {"loss": 1}, free=frozenset({"ids"}))


def test_an_adapters_gradient_is_never_pruned_though_nobody_reads_it() -> None:
    graph = chain((Kind.LINEAR, ""), (Kind.ADAPTER, "A"), (Kind.LINEAR, ""))
    assert gradient("A") in {tensor for node in backward_of(graph) for tensor in node.writes}


def test_nothing_is_kept_below_the_lowest_adapter() -> None:
    graph = chain((Kind.NORM, ""), (Kind.SILU, ""), (Kind.LINEAR, ""), (Kind.ADAPTER, "A"), (Kind.LINEAR, ""))
    assert keep(graph).tensors == {"t2", "t4"}


def test_a_relu_keeps_one_bit_an_element() -> None:
    graph = chain((Kind.ADAPTER, "A"), (Kind.LINEAR, ""), (Kind.RELU, ""), (Kind.LINEAR, ""))
    assert keep(graph).tensors == {"t2.sign", "t3"}
    assert keep(graph).bits == 17


def test_a_frozen_linear_keeps_no_input() -> None:
    graph = chain((Kind.ADAPTER, "A"), (Kind.LINEAR, ""), (Kind.LINEAR, ""), (Kind.LINEAR, ""))
    assert keep(graph).tensors == {"t3"}


@pytest.mark.parametrize("targets", [LINEARS, MLP, ("o",), ("q", "v"), ("down",)])
@pytest.mark.parametrize("again", [True, False])
def test_the_formula_is_what_the_algorithm_keeps(targets: tuple[str, ...], again: bool) -> None:
    keeping = Keeping(targets=frozenset(targets), again_mlp=again)
    graph = decoder_graph(TINY, keeping)
    inner = [each for each in keep(graph).tensors if each.startswith(("1.", "2."))]
    bits = sum(graph.size[each] for each in inner)
    assert bits == 8 * kept_bytes(TINY, keeping) * 2  # two layers above the lowest adapter's


def test_of_query_and_its_norm_only_the_one_that_serves_both_is_kept() -> None:
    import dataclasses

    keeping = Keeping(targets=frozenset(LINEARS))
    assert kept_names(TINY, keeping)[1] == {"x_in", "x_mid", "q_turned", "k_turned", "v"}
    normed = dataclasses.replace(TINY, qk_norm=True)
    assert kept_names(normed, keeping)[1] == {"x_in", "x_mid", "q", "k", "v"}


def test_the_70b_shape_prunes_as_published() -> None:
    mlp = Keeping(targets=frozenset(MLP), again_mlp=False)
    assert 0.71 <= pruned_share(B70, mlp, 1024) <= 0.74
    assert kept_bytes(B70, mlp) == 167_936
    assert kept_bytes(B8, mlp) == 86_016
    everything = Keeping(targets=frozenset(MLP))
    assert pruned_share(B70, everything, 1024) >= 0.85
    assert layer_bytes(B8, 16) == 436_207_616  # 416 MiB
    assert adapter_parameters(B8, Keeping(targets=frozenset(MLP), rank=8)) == 32 * 8 * 3 * (4096 + 14336)


def test_layer_major_holds_the_kv_gradients_of_one_layer_and_token_major_of_all() -> None:
    keeping = Keeping(targets=frozenset(LINEARS))
    grid = Grid(layers=3, tokens=32, forward=TileShape(layers=1, span=8), backward=TileShape(layers=1, span=8))
    forward = token_major(grid, Phase.FORWARD)
    by_layer = peak(TINY, keeping, 32, [*forward, *layer_major(grid, Phase.BACKWARD)])
    by_token = peak(TINY, keeping, 32, [*forward, *token_major(grid, Phase.BACKWARD)])
    assert (by_layer.layers_in_work, by_token.layers_in_work) == (1, 3)
    assert by_layer.stash == by_token.stash == 3 * 32 * kept_bytes(TINY, keeping)
    assert by_token.sums - by_layer.sums == 2 * (2 * TINY.kv_width * 4 * 32)
