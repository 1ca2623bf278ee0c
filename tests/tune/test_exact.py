"""Adapter gradients of written-out tiles: those of Hugging Face + peft, for every model, target, span and order."""

from __future__ import annotations

import functools
import random
from typing import Any

import oracle
import pytest
import torch
from formulas import kept_bytes
from orders import token_major, wavefront
from valve_tune.base.own import OwnCopy
from valve_tune.model.adapter import Adapter
from valve_tune.model.dropout import Draw
from valve_tune.model.explicit import ExplicitModel, adapter_sites
from valve_tune.model.names import BadTarget, short_targets
from valve_tune.model.rows import NotKept
from valve_tune.tiles.grid import Grid, OutOfOrder, Phase, Tile, TileShape
from valve_tune.tiles.orders import layer_major, whole
from valve_tune.train.batch import MicroBatch

NO_DROPOUT = Draw(seed=0, step=0, sequence=0)
TARGETS = {
    "all": ["all-linear"],
    "attention": ["q_proj", "v_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "down": ["down_proj"],
    "o": ["o_proj"],
    "k": ["k_proj"],
    "gate": ["gate_proj"],
}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@functools.cache
def case(name: str, targets: str, dtype: torch.dtype, lowest: int = 0) -> tuple[Any, OwnCopy, Adapter]:
    model = oracle.make(name, dtype)
    sites = adapter_sites(model.config, short_targets(TARGETS[targets]))
    sites = {path: width for path, width in sites.items() if int(path.split(".")[2]) >= lowest}
    adapter = oracle.randomised(Adapter(sites, rank=4, alpha=8), dtype)
    return model, OwnCopy(model.state_dict(), 3), adapter


@functools.cache
def expected(name: str, targets: str, dtype: torch.dtype, packed: bool, lowest: int = 0) -> tuple[float, Any]:
    model, _, adapter = case(name, targets, dtype, lowest)
    return oracle.reference(model, adapter, oracle.batch_of(packed=packed))


def trained(made: ExplicitModel, batch: MicroBatch, grid: Grid, order: list[Tile], draw: Draw = NO_DROPOUT) -> Any:
    work = made.start(batch, scale=1 / batch.label_count, draw=draw, grid=grid)
    for tile in order:
        work.run(tile)
    loss, gradients = work.gradients()
    return loss, oracle.flat(gradients), work


def check(
    name: str,
    targets: str,
    dtype: torch.dtype,
    grid: Grid,
    order: list[Tile],
    packed: bool,
    lowest: int = 0,
    **more: Any,
) -> None:
    model, base, adapter = case(name, targets, dtype, lowest)
    made = ExplicitModel(model.config, base, adapter, **more)
    loss, gradients, _ = trained(made, oracle.batch_of(packed=packed), grid, order)
    right_loss, right = expected(name, targets, dtype, packed, lowest)
    assert abs(loss - right_loss) <= LIMITS[dtype] * right_loss
    assert oracle.farthest(gradients, right) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", oracle.CONFIGS)
def test_whole_sequences_give_the_gradients_of_peft(name: str, targets: str, dtype: torch.dtype) -> None:
    grid = Grid(layers=3, tokens=24)
    check(name, targets, dtype, grid, whole(grid), packed=False)
    check(name, targets, dtype, grid, whole(grid), packed=True, again_mlp=False)


@pytest.mark.parametrize("order", ["token", "layer", "wave"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_every_order_and_span_gives_the_gradients_of_peft(name: str, packed: bool, order: str) -> None:
    chance = random.Random(f"{name}{packed}{order}")
    for _ in range(6):
        forward = TileShape(layers=chance.randint(0, 3), span=chance.randint(0, 9))
        backward = TileShape(layers=chance.randint(0, 3), span=chance.randint(0, 9))
        grid = Grid(layers=3, tokens=24, forward=forward, backward=backward)
        tiles: list[Tile] = []
        for phase in Phase:
            if order == "wave":
                tiles += wavefront(grid, phase, lambda ready: chance.randrange(len(ready)))
            else:
                tiles += (token_major if order == "token" else layer_major)(grid, phase)
        targets = chance.choice(list(TARGETS))
        check(name, targets, torch.float64, grid, tiles, packed, again_mlp=chance.random() < 0.5)
        check(name, targets, torch.float32, grid, tiles, packed)


@pytest.mark.parametrize("targets", TARGETS)
def test_layers_below_the_lowest_adapter_have_no_backward_and_change_nothing(targets: str) -> None:
    grid = Grid(layers=3, tokens=24, forward=TileShape(layers=1, span=7), backward=TileShape(layers=1, span=5))
    check("qwen3", targets, torch.float64, grid, whole(grid), packed=True, lowest=1)


def test_windows_in_the_wrong_order_are_refused_instead_of_giving_plausible_gradients() -> None:
    model, base, adapter = case("llama", "all", torch.float32)
    grid = Grid(layers=3, tokens=24, backward=TileShape(layers=0, span=8))
    work = ExplicitModel(model.config, base, adapter).start(oracle.batch_of(), scale=1, draw=NO_DROPOUT, grid=grid)
    for tile in layer_major(grid, Phase.FORWARD):
        work.run(tile)
    backward = token_major(grid, Phase.BACKWARD)
    with pytest.raises(OutOfOrder, match="later tokens"):
        work.run(backward[1])
    with pytest.raises(RuntimeError, match="not done"):
        work.gradients()


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm"])
def test_the_stash_is_what_the_formula_says_within_five_percent(name: str, again: bool) -> None:
    model, base, adapter = case(name, "all", torch.float32)
    made = ExplicitModel(model.config, base, adapter, again_mlp=again)
    batch = oracle.batch_of(length=128, rows=1)
    grid = Grid(layers=3, tokens=128)
    work = trained(made, batch, grid, whole(grid))[2]
    per_token = kept_bytes(made.shape, made.keeping)
    embedded = made.shape.hidden * 4  # the lowest layer looks its input up again
    assert work.stash.peak_bytes == 128 * (3 * per_token - embedded)
    assert work.stash.bytes == 0


def poisoned(name: str, targets: str, spoil: Any) -> dict[str, torch.Tensor]:
    model, base, adapter = case(name, targets, torch.float32)
    made = ExplicitModel(model.config, base, adapter, again_mlp=False)
    grid = Grid(layers=3, tokens=24)
    batch = oracle.batch_of()
    work = made.start(batch, scale=1 / batch.label_count, draw=NO_DROPOUT, grid=grid)
    for tile in layer_major(grid, Phase.FORWARD):
        work.run(tile)
    spoil(work)
    for tile in layer_major(grid, Phase.BACKWARD):
        work.run(tile)
    return oracle.flat(work.gradients()[1])


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_each_kept_tensor_is_needed_and_none_besides(name: str, targets: str) -> None:
    """Backward has the stash and nothing else of forward; without any one of its tensors gradients are NaN."""
    keys: list[tuple[int, str]] = []
    clean = poisoned(name, targets, lambda work: keys.extend(key for key, _ in work.stash.items()))
    assert all(bool(each.isfinite().all()) for each in clean.values())
    assert keys
    for key in keys:

        def spoil(work: Any, key: tuple[int, str] = key) -> None:
            dict(work.stash.items())[key].fill_(float("nan"))

        spoiled = poisoned(name, targets, spoil)
        assert any(bool(each.isnan().any()) for each in spoiled.values()), f"{key} is kept for nothing"


def test_backward_never_recomputes_what_pruning_counts_as_kept() -> None:
    with pytest.raises(NotKept, match="layer 2: x_mid"):
        poisoned("llama", "all", lambda work: work.stash.drop(2, "x_mid"))
    with pytest.raises(NotKept, match="layer 1: x_in"):
        poisoned("llama", "all", lambda work: work.stash.drop(1, "x_in"))


def test_dropout_draws_the_same_mask_on_every_grid() -> None:
    model, base, adapter = case("llama", "all", torch.float64)
    made = ExplicitModel(model.config, base, adapter)
    batch = oracle.batch_of(packed=True)
    found = []
    for span in (0, 5):
        shape = TileShape(layers=1, span=span)
        grid = Grid(layers=3, tokens=24, forward=shape, backward=shape)
        draws = [Draw(seed=3, step=1, sequence=q, share=0.3) for q in (0, 1)]
        found.append([trained(made, batch, grid, whole(grid), draw)[1] for draw in draws])
    assert oracle.farthest(found[0][0], found[1][0]) <= 1e-12
    assert oracle.farthest(found[0][0], found[0][1]) > 0.1, "another micro-batch must draw anew"


def test_dropout_is_that_of_peft_under_the_same_mask() -> None:
    model, base, adapter = case("llama", "all", torch.float64)
    batch, draw = oracle.batch_of(), Draw(seed=3, step=1, sequence=0, share=0.3)
    wrapped, parameters = oracle.with_peft(model, adapter)
    oracle.narrow_nothing(wrapped)
    for path in adapter.pairs:
        layer = wrapped.get_submodule(f"base_model.model.{path}")
        layer.lora_dropout["default"].forward = lambda x, path=path: x * draw.mask(path, x.shape, 0, 24, x)
    oracle.Segments.now = torch.from_numpy(batch.segments)
    logits = wrapped(input_ids=torch.from_numpy(batch.input_ids)).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels)[:, 1:].flatten()).backward()
    right = {name: each.grad for name, each in parameters.items()}
    grid = Grid(layers=3, tokens=24)
    gradients = trained(ExplicitModel(model.config, base, adapter), batch, grid, whole(grid), draw)[1]
    assert oracle.farthest(gradients, right) <= 1e-12


def test_dropout_keeps_its_share_and_the_expectation() -> None:
    like = torch.zeros(2, 64, 512)
    mask = Draw(seed=1, step=2, sequence=3, share=0.25).mask("site", like.shape, 0, 64, like)
    assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(mask.mean()) == pytest.approx(1.0, abs=0.02)
    for axis in range(3):  # no row, position or feature is a copy of the next
        assert float((mask.roll(1, axis) == mask).float().mean()) == pytest.approx(0.625, abs=0.02)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "c_attn"])
def test_a_target_that_is_no_linear_of_a_block_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadTarget, match=name):
        short_targets(["q_proj", name])
