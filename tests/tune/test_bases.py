"""Bases: a window loads exactly what it must and changes no bit; shared weights cannot be written and are watched."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import torch
from valve_tune.base.copies import copy, move_module
from valve_tune.base.own import OwnCopy
from valve_tune.base.residency import HostWindow, Parked
from valve_tune.base.shared import SharedCopy, publish
from valve_tune.base.weights import BadBase, BaseChanged, shapes
from valve_tune.model.adapter import Adapter
from valve_tune.model.dropout import Draw
from valve_tune.model.explicit import ExplicitModel, adapter_sites
from valve_tune.model.names import short_targets
from valve_tune.serve.cli import main
from valve_tune.tiles.grid import Grid, Phase, TileShape
from valve_tune.tiles.orders import whole
from valve_tune.train.build import open_model
from valve_tune.train.report import Answer, End
from valve_tune.train.spec import SpecError

LAYERS = 5


@pytest.fixture(scope="module")
def model() -> Any:
    name = "qwen2"
    oracle.CONFIGS["deep"] = type(oracle.CONFIGS[name])(**{**oracle.WIDTHS, "num_hidden_layers": LAYERS})
    return oracle.make("deep", torch.float32)


def adapter_of(model: Any) -> Adapter:
    return oracle.randomised(Adapter(adapter_sites(model.config, short_targets(["all-linear"])), rank=4, alpha=8))


def micro_batch(made: ExplicitModel, grid: Grid, between: Any = lambda: None) -> dict[str, torch.Tensor]:
    work = made.start(oracle.batch_of(), scale=1, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
    for tile in whole(grid):
        between()
        work.run(tile)
    return oracle.flat(work.gradients()[1])


def sizes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def equal(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], right[name]) for name in right)


@pytest.mark.parametrize("span", [0, 5])
@pytest.mark.parametrize("window", range(1, LAYERS + 1))
def test_a_micro_batch_loads_two_times_the_layers_outside_the_window(model: Any, window: int, span: int) -> None:
    grid = Grid(layers=LAYERS, tokens=24, forward=TileShape(span=span), backward=TileShape(span=span))
    right = micro_batch(ExplicitModel(model.config, OwnCopy(model.state_dict(), LAYERS), adapter_of(model)), grid)
    base = HostWindow(model.state_dict(), LAYERS, window)
    made = ExplicitModel(model.config, base, adapter_of(model))
    for _ in range(3):
        before = base.loads
        assert equal(micro_batch(made, grid), right)
        assert base.loads - before == 2 * (LAYERS - window)
        assert len(base.resident) == window


def test_a_window_resized_at_any_tile_border_changes_no_bit(model: Any) -> None:
    grid = Grid(layers=LAYERS, tokens=24, forward=TileShape(span=7), backward=TileShape(span=7))
    right = micro_batch(ExplicitModel(model.config, OwnCopy(model.state_dict(), LAYERS), adapter_of(model)), grid)
    base, chance = HostWindow(model.state_dict(), LAYERS, 3), random.Random(3)
    made = ExplicitModel(model.config, base, adapter_of(model))

    def resize() -> None:
        base.resize(chance.randint(0, LAYERS))
        if not base.window:
            assert base.resident == []
            base.resize(chance.randint(1, LAYERS))
        assert len(base.resident) == base.window

    for _ in range(5):
        assert equal(micro_batch(made, grid, resize), right)


def test_growing_brings_what_is_used_next_and_shrinking_drops_what_is_used_last(model: Any) -> None:
    base = HostWindow(model.state_dict(), LAYERS, 2)
    assert base.resident == [0, 1]
    base.enter(1, Phase.FORWARD)
    base.resize(4)
    assert base.resident == [0, 1, 2, 3]
    base.resize(2)
    assert base.resident == [1, 2]
    base.enter(1, Phase.BACKWARD)
    base.resize(1)
    assert base.resident == [1]


def test_no_layer_is_read_while_the_window_is_closed(model: Any) -> None:
    base = HostWindow(model.state_dict(), LAYERS, 0)
    with pytest.raises(Parked):
        base.enter(0, Phase.FORWARD)


def test_copies_come_in_pieces_and_ask_before_each(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("valve_tune.base.copies.PIECE_BYTES", 4096)
    asked: list[int] = []
    HostWindow(model.state_dict(), LAYERS, 1, before_copy=lambda: asked.append(1))
    layer = [tensor for name, tensor in model.state_dict().items() if name.startswith("model.layers.0.")]
    rows = [(each.shape[0], each[:1].numel() * 4) for each in layer]
    assert len(asked) == sum(-(-count // max(1, 4096 // size)) for count, size in rows)
    assert len(asked) > sum(each.numel() * 4 for each in layer) // 4096 > len(layer)


class Closed(Exception):
    """The gate closed: what asks waits, and copies nothing meanwhile."""


@pytest.mark.parametrize("pieces", [0, 1, 3, 6])
def test_no_piece_is_ever_copied_while_the_gate_is_closed(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("valve_tune.base.copies.PIECE_BYTES", 1024)
    here, there, asked = torch.ones(6, 256), torch.zeros(6, 256), iter(range(pieces))

    def ask() -> None:
        if next(asked, None) is None:
            raise Closed

    with pytest.raises(Closed) if pieces < len(here) else contextlib.nullcontext():
        copy(there, here, ask)
    assert there[:, 0].tolist() == [1.0] * pieces + [0.0] * (len(here) - pieces)


def test_each_tensor_of_a_module_that_is_moved_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the device meta, as no card is here: each tensor goes once, by way of the pieces."""
    went: list[torch.Tensor] = []
    monkeypatch.setattr("valve_tune.base.copies.copy", lambda there, here, before: went.append(here.clone()))
    module = torch.nn.ModuleDict({"one": torch.nn.Linear(4, 4, bias=False), "two": torch.nn.BatchNorm1d(4)})
    held = [each.detach().clone() for part in module.values() for each in (*part.parameters(), *part.buffers())]
    move_module(module, "meta")
    assert all(torch.equal(left, right) for left, right in zip(went, held, strict=True))
    assert {each.device.type for each in (*module.parameters(), *module.buffers())} == {"meta"}


def fused(model: Any) -> dict[str, torch.Tensor]:
    """As engines lay them out."""
    found: dict[str, torch.Tensor] = {}
    state = dict(model.state_dict())
    for layer in range(LAYERS):
        for names, into in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            room = f"model.layers.{layer}.{'self_attn' if into == 'qkv_proj' else 'mlp'}"
            for kind in ("weight", "bias"):
                if f"{room}.{names[0]}.{kind}" in state:
                    found[f"{room}.{into}.{kind}"] = torch.cat([state.pop(f"{room}.{name}.{kind}") for name in names])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.nn.functional.pad(state.pop(name), (0, 0, 0, 31))
    return found | state


def test_shared_weights_are_views_and_train_to_the_same_bits(model: Any, tmp_path: Path) -> None:
    grid = Grid(layers=LAYERS, tokens=24)
    right = micro_batch(ExplicitModel(model.config, OwnCopy(model.state_dict(), LAYERS), adapter_of(model)), grid)
    publish(fused(model), tmp_path / "weights")
    shared = SharedCopy(tmp_path / "weights", sizes_of(model))
    assert equal(micro_batch(ExplicitModel(model.config, shared, adapter_of(model)), grid), right)
    layer = shared.enter(0, Phase.FORWARD)
    q, k = layer["self_attn.q_proj.weight"], layer["self_attn.k_proj.weight"]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() or q.data_ptr() < k.data_ptr()
    assert k.data_ptr() - q.data_ptr() == q.numel() * q.element_size(), "a copy was made"
    assert shared.outer["lm_head.weight"].shape[0] == oracle.WIDTHS["vocab_size"]


def test_a_stray_write_of_the_trainer_never_reaches_the_service(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    publish(fused(model), path)
    before = path.read_bytes()
    shared = SharedCopy(path, sizes_of(model))
    status = jobs.in_child(lambda: shared.enter(0, Phase.FORWARD)["mlp.down_proj.weight"].fill_(0))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert path.read_bytes() == before


def test_weights_that_change_under_a_job_end_it_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    folder = jobs.model_folder(tmp_path / "base")
    path, spec = tmp_path / "weights", jobs.job(folder, tmp_path / "out")
    from valve_tune.base.weights import read_folder

    publish(read_folder(folder, torch.float32), path)

    def overwrite() -> Answer:
        with open(path, "r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\1" * 64)
        return Answer.GO

    def make(spec: Any) -> Any:
        return open_model(spec, weights=SharedCopy(path, shapes(folder)))

    outcome = jobs.train(spec, jobs.At(2, overwrite), make_model=make)
    assert outcome.end is End.FAILED
    assert "changed while the job ran" in outcome.message
    assert outcome.checkpoint is None
    with pytest.raises(BaseChanged):
        SharedCopy(path, shapes(folder))


def test_a_slice_of_tensor_parallel_weights_is_refused(model: Any, tmp_path: Path) -> None:
    halves = fused(model)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    halves[name] = halves[name][:64]
    publish(halves, tmp_path / "weights")
    with pytest.raises(BadBase, match="tensor parallel"):
        SharedCopy(tmp_path / "weights", sizes_of(model))


def test_jobs_that_share_a_copy_make_the_adapters_of_those_that_own_one(tmp_path: Path, capsys: Any) -> None:
    folder, file = jobs.model_folder(tmp_path / "base"), tmp_path / "weights"
    right = jobs.finished(jobs.job(folder, tmp_path / "own"))
    assert main(["share", "--model", str(folder), "--to", str(file)]) == 0
    assert f"{file.stat().st_size:,} bytes" in capsys.readouterr().out
    spec = jobs.job(folder, tmp_path / "shared", share_weights=str(file))
    assert jobs.train(spec, jobs.At(20)).end is End.STOPPED
    assert jobs.finished(spec) == right


@pytest.mark.parametrize("fault", ["missing", "other", "short", "half", "dtype", "resident"])
def test_a_file_that_shares_no_such_base_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    folder, file = jobs.model_folder(tmp_path / "base"), tmp_path / "weights"
    main(["share", "--model", str(folder), "--to", str(file), *(["--dtype", "bfloat16"] if fault == "dtype" else [])])
    content = file.read_bytes()
    if fault == "missing":
        file.unlink()
    elif fault == "other":
        file.write_bytes(b"something else altogether")
    elif fault in ("short", "half"):
        file.write_bytes(content[: 4 if fault == "short" else len(content) // 2])
    if fault == "resident":
        with pytest.raises(SpecError, match="resident_layers: shared weights"):
            jobs.job(folder, tmp_path / "out", share_weights=str(file), resident_layers=1)
        return
    outcome = jobs.train(jobs.job(folder, tmp_path / "out", share_weights=str(file)))
    assert outcome.end is End.FAILED
    assert outcome.message.startswith("share_weights: ")
    assert ("is no file of valve tune share" in outcome.message) == (fault == "missing")
