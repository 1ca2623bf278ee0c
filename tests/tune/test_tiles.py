"""Tiles: legal orders, the published rectangles, the cursor."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import published, token_major, violation, wavefront
from valve_tune.tiles.cursor import Cursor, ForeignCursor
from valve_tune.tiles.grid import Frontier, Grid, OutOfOrder, Phase, Tile, TileShape
from valve_tune.tiles.orders import layer_major, whole

shapes = st.builds(TileShape, layers=st.integers(0, 4), span=st.integers(0, 9))
grids = st.builds(Grid, layers=st.integers(1, 6), tokens=st.integers(1, 20), forward=shapes, backward=shapes)


@given(grids)
def test_tiles_of_a_phase_cover_each_layer_and_token_once(grid: Grid) -> None:
    for phase in Phase:
        cells = [
            (layer, token)
            for tile in grid.tiles(phase)
            for layer in range(tile.layer, tile.layer_end)
            for token in range(tile.token, tile.token_end)
        ]
        assert sorted(cells) == [(n, t) for n in range(grid.layers) for t in range(grid.tokens)]


@given(grids, st.randoms(use_true_random=False))
def test_plain_orders_and_every_wavefront_are_legal(grid: Grid, random) -> None:
    def choose(ready) -> int:
        return random.randrange(len(ready))

    for order in (token_major, layer_major):
        assert violation(grid, [*order(grid, Phase.FORWARD), *order(grid, Phase.BACKWARD)]) == ""
    any_order = [*wavefront(grid, Phase.FORWARD, choose), *wavefront(grid, Phase.BACKWARD, choose)]
    assert violation(grid, any_order) == ""
    assert violation(grid, whole(grid)) == ""


def brute_force_legal(grid: Grid, order: list[Tile]) -> bool:
    """The rule cell by cell, as the design states it."""
    last = grid.tokens - 1
    done: set[tuple[Phase, int, int]] = set()
    for tile in order:
        own = {(n, t) for n in range(tile.layer, tile.layer_end) for t in range(tile.token, tile.token_end)}
        for n, t in own:
            if tile.phase is Phase.FORWARD:
                needs = {(Phase.FORWARD, n - 1, t)} if n else set()
                needs |= {(Phase.FORWARD, n, earlier) for earlier in range(t)}
            else:
                needs = {(Phase.BACKWARD, n + 1, t)} if n + 1 < grid.layers else {(Phase.FORWARD, n, last)}
                needs |= {(Phase.BACKWARD, n, later) for later in range(t + 1, grid.tokens)}
            if (tile.phase, n, t) in done or not all(
                need in done or (need[0] is tile.phase and need[1:] in own) for need in needs
            ):
                return False
        done |= {(tile.phase, *cell) for cell in own}
    return len(done) == 2 * grid.layers * grid.tokens


@given(
    st.builds(Grid, layers=st.integers(1, 3), tokens=st.integers(1, 4), forward=shapes, backward=shapes),
    st.randoms(use_true_random=False),
)
def test_an_order_is_legal_exactly_if_each_cell_finds_what_it_reads(grid: Grid, random) -> None:
    order = whole(grid)
    for _ in range(random.randrange(3)):
        first, second = random.randrange(len(order)), random.randrange(len(order))
        order[first], order[second] = order[second], order[first]
    if random.random() < 0.2:
        order.pop(random.randrange(len(order)))
    assert (violation(grid, order) == "") == brute_force_legal(grid, order)


def test_a_tile_out_of_order_is_refused_and_changes_nothing() -> None:
    frontier = Frontier(2, 4)
    with pytest.raises(OutOfOrder, match="layer below"):
        frontier.take(Tile(Phase.FORWARD, 1, 2, 0, 4))
    assert frontier.forward == [0, 0]
    frontier.take(Tile(Phase.FORWARD, 0, 2, 0, 4))
    with pytest.raises(OutOfOrder, match="later tokens"):
        frontier.take(Tile(Phase.BACKWARD, 1, 2, 0, 2))
    with pytest.raises(OutOfOrder, match="outside"):
        frontier.take(Tile(Phase.BACKWARD, 1, 3, 2, 4))


def test_published_systems_are_rectangles_of_one_grid() -> None:
    plans = published(layers=8, tokens=32, span=8, group=2)
    for name, (grid, order) in plans.items():
        assert violation(grid, order) == "", name
    sizes = {
        name: (len([t for t in order if t.phase is Phase.FORWARD]), len(order)) for name, (_, order) in plans.items()
    }
    assert sizes["plain"] == (1, 2)
    assert sizes["harli"] == (8, 16)
    assert sizes["llmstation"] == (4, 8)
    assert sizes["flexllm-paper"] == (4, 8)
    assert sizes["flexllm-code"] == sizes["in-engine"] == (4, 8)
    backward = [tile for tile in plans["flexllm-paper"][1] if tile.phase is Phase.BACKWARD]
    assert [(tile.token, tile.layer_end - tile.layer) for tile in backward] == [(24, 8), (16, 8), (8, 8), (0, 8)]


@given(
    st.builds(
        Cursor,
        step=st.integers(0, 10**9),
        sequence=st.integers(0, 10**6),
        phase=st.sampled_from(Phase),
        layer=st.integers(0, 200),
        token=st.integers(0, 10**6),
        base=st.text(max_size=70),
        job=st.text(max_size=70),
    )
)
def test_a_cursor_survives_its_own_text(cursor: Cursor) -> None:
    assert Cursor.parse(cursor.text()) == cursor


@given(st.text())
def test_no_text_makes_a_cursor_by_accident(text: str) -> None:
    with pytest.raises(ForeignCursor):
        Cursor.parse(text)


@pytest.mark.parametrize("change", [{"step": -1}, {"step": "1"}, {"step": True}, {"base": 3}, {"phase": "sideways"}])
def test_a_cursor_with_a_wrong_field_is_refused(change: dict[str, object]) -> None:
    import json

    fields = json.loads(Cursor(step=3).text())
    with pytest.raises(ForeignCursor):
        Cursor.parse(json.dumps(fields | change))


def test_a_cursor_of_another_job_is_refused() -> None:
    cursor = Cursor(step=4, base="b", job="j")
    cursor.check(base="b", job="j")
    with pytest.raises(ForeignCursor, match="base weights"):
        dataclasses.replace(cursor, base="c").check(base="b", job="j")
    with pytest.raises(ForeignCursor, match="grid"):
        dataclasses.replace(cursor, job="c").check(base="b", job="j")
