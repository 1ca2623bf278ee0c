"""Other decoders by autograd in tiles: the gradients of plain peft, or a refusal by name."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoXConfig, GraniteConfig, Olmo2Config, Phi3Config
from valve_tune.base.own import LoadedModel
from valve_tune.model.adapter import Adapter
from valve_tune.model.autograd import AutogradModel, BadModel, decoder_layers, linears, nodes
from valve_tune.model.dropout import Draw
from valve_tune.model.names import BadTarget
from valve_tune.tiles.grid import Grid, TileShape
from valve_tune.tiles.orders import whole
from valve_tune.train.batch import IGNORED, MicroBatch
from valve_tune.train.report import Answer, End

W = oracle.WIDTHS
CONFIGS: dict[str, Any] = {
    "gemma2": Gemma2Config(**W, head_dim=16, sliding_window=8, final_logit_softcapping=3.0),
    "phi3": Phi3Config(**W, pad_token_id=0),
    "olmo2": Olmo2Config(**W),
    "granite": GraniteConfig(**W, logits_scaling=2.0, residual_multiplier=0.5),
}


def loaded(name: str) -> Any:
    torch.manual_seed(3)
    attention = "eager" if name == "gemma2" else "sdpa"  # its capped scores are no fused kernel's
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.requires_grad_(False)


def made(model: Any, targets: tuple[str, ...] = ("all-linear",)) -> AutogradModel:
    cut = copy.deepcopy(model)

    def adapter(sites: dict[str, tuple[int, int]]) -> Adapter:
        return oracle.randomised(Adapter(sites, rank=4, alpha=8))

    return AutogradModel(cut, LoadedModel(cut.state_dict()), targets, adapter)


def trained(model: AutogradModel, batch: MicroBatch, layers: int) -> tuple[float, dict[str, torch.Tensor]]:
    shape = TileShape(layers=layers)
    grid = Grid(layers=model.layers, tokens=batch.input_ids.shape[1], forward=shape, backward=shape)
    draw = Draw(seed=0, step=0, sequence=0)
    work = model.start(batch, scale=1 / max(1, batch.label_count), draw=draw, grid=grid)
    for tile in whole(grid):
        work.run(tile)
    loss, gradients = work.gradients()
    return loss, {name: each.detach() for name, each in oracle.flat(gradients).items()}


@pytest.mark.parametrize("layers", [1, 2, 0])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_decoder_gives_the_gradients_of_peft(name: str, layers: int) -> None:
    model, batch = loaded(name), oracle.batch_of()
    cut = made(model)
    loss, gradients = trained(cut, batch, layers)
    wrapped, parameters = oracle.with_peft(model, cut.adapter)
    out = wrapped(input_ids=torch.from_numpy(batch.input_ids), labels=torch.from_numpy(batch.labels))
    out.loss.backward()
    assert loss == pytest.approx(float(out.loss), rel=1e-5)
    assert oracle.farthest(gradients, {name: each.grad for name, each in parameters.items()}) <= 1e-5


@pytest.mark.parametrize("name", ["olmo2", "phi3", "granite", "gemma2"])
def test_packed_examples_are_blind_to_each_other(name: str) -> None:
    cut = made(loaded(name))
    batch = oracle.batch_of(rows=1, packed=True, seed=4)
    loss, gradients = trained(cut, batch, 1)
    alone, total = 0.0, None
    for segment in sorted(set(batch.segments[0].tolist()) - {0}):
        where = batch.segments[0] == segment
        parts = {name: array[:, where] for name, array in batch.arrays().items()}
        part = MicroBatch(**parts)
        if (part.labels[:, 1:] == IGNORED).all():
            continue
        weight = part.label_count / batch.label_count
        part_loss, part_gradients = trained(cut, part, 1)
        alone += part_loss * weight
        scaled = {name: each * weight for name, each in part_gradients.items()}
        total = scaled if total is None else {name: total[name] + scaled[name] for name in total}
    assert loss == pytest.approx(alone, rel=1e-5)
    assert total is not None
    assert oracle.farthest(gradients, total) <= 1e-5


def test_a_model_whose_layers_share_more_than_hidden_states_is_refused() -> None:
    model = loaded("olmo2")
    seen: list[torch.Tensor] = []

    def remember(module: Any, given: Any, out: torch.Tensor) -> None:
        seen[:] = [out]

    model.model.layers[0].register_forward_hook(remember)
    model.model.layers[2].register_forward_hook(lambda module, given, out: out + seen[0])
    cut = model
    with pytest.raises(BadModel, match="another gradient"):
        AutogradModel(
            cut,
            LoadedModel(cut.state_dict()),
            ("all-linear",),
            lambda sites: oracle.randomised(Adapter(sites, rank=4, alpha=8)),
        )


def test_a_model_on_a_card_is_never_handed_a_tensor_of_the_host(monkeypatch) -> None:
    """No card is needed: fake tensors know where they are, and refuse what lies in two places. When the model is opened
    it is asked twice, and then once for each micro-batch.
    """
    cut, batch = made(loaded("olmo2")), oracle.batch_of()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            cut.model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["olmo2"])).requires_grad_(False)
            for pair in cut.adapter.pairs.values():
                pair.a, pair.b = (torch.empty(each.shape, requires_grad=True) for each in (pair.a, pair.b))
        path, cut.modules = decoder_layers(cut.model)
        for name, module in linears(path, cut.modules, ("all-linear",)).items():
            module.register_forward_hook(cut._beside(name))
        assert not cut._returns_tuples()
        monkeypatch.setattr(torch.autograd, "grad", lambda loss, *_, **__: (loss,))  # backward needs a driver
        (loss,) = cut._uncut(cut.here(batch.input_ids[:1]))
        assert loss.device.type == "cuda"
        grid = Grid(layers=cut.layers, tokens=batch.input_ids.shape[1])
        work = cut.start(batch, scale=1.0, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
        assert {work.targets.device.type, work.flow.device.type} == {"cuda"}


def test_a_target_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(BadTarget, match="gate_up_proj"):
        made(loaded("phi3"), ("c_attn",))


def test_a_model_without_one_list_of_layers_is_refused() -> None:
    model = torch.nn.Module()
    model.config = GPTNeoXConfig(num_hidden_layers=2)
    with pytest.raises(BadModel, match="0 lists"):
        AutogradModel(model, LoadedModel({}), ("all-linear",), lambda sites: Adapter(sites, rank=1, alpha=1))


def test_a_job_over_such_a_model_survives_a_kill_and_refuses_spans_by_name(tmp_path: Path) -> None:
    loaded("olmo2").save_pretrained(tmp_path / "base")
    right = jobs.finished(jobs.job(tmp_path / "base", tmp_path / "whole", span=0))
    spec = jobs.job(tmp_path / "base", tmp_path / "killed", span=0)
    status = jobs.in_child(lambda: jobs.train(spec, jobs.At(21, jobs.kill)))
    assert os.WIFSIGNALED(status)
    assert jobs.finished(spec) == right
    outcome = jobs.train(jobs.job(tmp_path / "base", tmp_path / "spans", span=4))
    assert outcome.end is End.FAILED
    assert outcome.message.startswith("span: ")


def one_tile(base: Path, out: Path) -> Any:
    return jobs.job(base, out, span=0, layers_per_tile=1024, max_steps=2, save_steps=1)


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_a_job_stops_and_pauses_inside_the_backward_of_a_model_that_is_one_tile(tmp_path: Path, name: str) -> None:
    loaded(name).save_pretrained(tmp_path / "base")
    counted, events = jobs.At(), []
    right = jobs.finished(one_tile(tmp_path / "base", tmp_path / "whole"), control=counted, events=events)
    tiles = 2 * 2 * 2  # of two phases of two micro-batches in two steps
    assert counted.asked > 50 * tiles
    per_micro_batch = counted.asked // 4
    for number in (per_micro_batch // 2, per_micro_batch - 3):  # both in its backward
        spec, said = one_tile(tmp_path / "base", tmp_path / f"stopped-{number}"), jobs.At(number)
        outcome = jobs.train(spec, said)
        assert (outcome.end, outcome.step) == (End.STOPPED, 0), outcome.message
        assert said.asked == number  # nothing of the backward ran on
        assert jobs.finished(spec) == right
    for number in range(7, counted.asked, counted.asked // 5):
        answers = iter([Answer.PAUSE, Answer.PAUSE])
        spec, told = one_tile(tmp_path / "base", tmp_path / f"paused-{number}"), []
        control = Pausing(number, answers)
        assert jobs.finished(spec, control=control, events=told) == right
        assert [each.message[:3] for each in told if each.kind == "paused"] == ["in "]
        assert control.waits == 2


class Pausing(jobs.At):
    def __init__(self, tile: int, answers: Iterator[Answer]) -> None:
        super().__init__(tile)
        self.answers = answers

    def answer(self) -> Answer:
        self.asked += 1
        return next(self.answers, Answer.GO) if self.asked >= self.tile else Answer.GO


def adapter_after(model: AutogradModel, turns: Callable[[], None] | None, steps: int = 20) -> dict[str, torch.Tensor]:
    """After some steps of plain descent; `turns` is called before each operator."""
    shape = TileShape(layers=0)
    for step in range(steps):
        batch = oracle.batch_of(seed=step)
        grid = Grid(layers=model.layers, tokens=batch.input_ids.shape[1], forward=shape, backward=shape)
        draw = Draw(seed=0, step=step, sequence=0)
        work = model.start(batch, scale=1 / batch.label_count, draw=draw, grid=grid)
        for tile in whole(grid):
            work.run(tile, *([turns] if turns else []))
        _, gradients = work.gradients()
        with torch.no_grad():
            for path, pair in model.adapter.pairs.items():
                pair.a -= 0.1 * gradients[path].a
                pair.b -= 0.1 * gradients[path].b
    return {name: tensor.detach().clone() for name, tensor in model.adapter.tensors()}


class Dropped(Exception):
    """Its owner wants no more of it."""


def test_jobs_suspended_in_turn_inside_a_backward_train_as_alone_and_one_dropped_there_harms_nobody() -> None:
    """Two threads, one at work at a time, hand over before operators drawn by chance; a third leaves in the middle."""
    models = {name: made(loaded(name)) for name in ("olmo2", "granite")}
    right = {name: adapter_after(made(loaded(name)), None) for name in models}
    chance, turn, found = random.Random(5), threading.Lock(), {}
    handed = dict.fromkeys(models, 0)

    def hand_over(name: str) -> None:
        if chance.random() < 0.02:
            handed[name] += 1
            turn.release()
            time.sleep(0)
            turn.acquire()

    def work(name: str) -> None:
        with turn:
            found[name] = adapter_after(models[name], lambda: hand_over(name))

    left = iter(range(40))

    def leave() -> None:
        if next(left, None) is None:
            raise Dropped

    dropped = made(loaded("olmo2"))
    alive = weakref.ref(dropped)
    with pytest.raises(Dropped):
        adapter_after(dropped, leave)
    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(handed.values()) > 10
    for name, tensors in right.items():
        assert all(torch.equal(found[name][each], tensor) for each, tensor in tensors.items()), name
    del dropped
    gc.collect()
    assert alive() is None


def test_every_operator_of_a_backward_is_asked_before_and_leaves_never() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3, requires_grad=True)
    out = ((x * weight).exp() + x).sum()
    asked: list[str] = []
    found = nodes(out.grad_fn)
    for node in found:
        node.register_prehook(lambda _, node=node: asked.append(type(node).__name__))
    assert sorted(type(node).__name__ for node in found) == [
        "AddBackward0",
        "ExpBackward0",
        "MulBackward0",
        "SumBackward0",
    ]
    torch.autograd.grad(out, [x, weight])
    assert asked == ["SumBackward0", "AddBackward0", "ExpBackward0", "MulBackward0"]
