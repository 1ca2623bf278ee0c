"""Any other Hugging Face decoder: autograd inside a tile, over its own layer modules, with detached edges.

A tile keeps its input and is computed once more in backward. Whole sequences only. Layers are asked for their arguments
by running the model with layers that only write down what they are called with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from valve_tune.base.memory import StashMemory, TorchMemory
from valve_tune.base.weights import BadBase, FrozenWeights
from valve_tune.model.adapter import Adapter, Gradients, LoraPair
from valve_tune.model.dropout import Draw
from valve_tune.model.interface import nothing
from valve_tune.model.loss import targets_of
from valve_tune.model.maths import wide
from valve_tune.model.names import BadTarget
from valve_tune.model.stash import Stash
from valve_tune.tiles.grid import Frontier, Grid, Phase, Tile
from valve_tune.tiles.orders import whole
from valve_tune.train.batch import IGNORED, IntArray, MicroBatch


class BadModel(BadBase):
    """A model that cannot be cut into tiles with the same gradients."""


def decoder_layers(model: Any) -> tuple[str, list[Any]]:
    """(path, modules) of the one list of decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    checkpointed = [each for each in lists if type(each[1][0]).__mro__[1].__name__ == "GradientCheckpointingLayer"]
    if len(checkpointed) != 1:
        raise BadModel(f"{type(model).__name__}: found {len(checkpointed)} lists of {count} decoder layers")
    return checkpointed[0]


def linears(path: str, layers: Sequence[Any], targets: Sequence[str]) -> dict[str, Any]:
    """Linears of the layers by path, chosen by the last part of their names."""
    everything = {
        f"{path}.{number}.{name}": module
        for number, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    wanted = set(targets)
    chosen = {name: module for name, module in everything.items() if {name.rpartition(".")[2], "all-linear"} & wanted}
    if not chosen:
        names = sorted({name.rpartition(".")[2] for name in everything})
        raise BadTarget(f"target_modules: this model has none of {', '.join(targets)}; it has {', '.join(names)}")
    return chosen


def nodes(last: Any) -> list[Any]:
    """The operators of a backward pass from its last one on. Sums into leaves are left out: they compute nothing."""
    found: dict[int, Any] = {}
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in found or type(node).__name__ == "AccumulateGrad":
            continue
        found[id(node)] = node
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())


class AutogradModel:
    """A Hugging Face model with our adapter on hooks: the modules themselves stay as they are."""

    spans = False

    def __init__(
        self,
        model: Any,
        weights: FrozenWeights,
        targets: Sequence[str],
        make: Callable[[dict[str, tuple[int, int]]], Adapter],
        memory: StashMemory | None = None,
    ) -> None:
        self.model, self.weights = model.eval().requires_grad_(False), weights
        self.memory: StashMemory = TorchMemory()
        path, self.modules = decoder_layers(model)
        self.layers = len(self.modules)
        chosen = linears(path, self.modules, targets)
        self.adapter = make({name: (each.in_features, each.out_features) for name, each in chosen.items()})
        self.layer_of = {name: int(name[len(path) + 1 :].partition(".")[0]) for name in chosen}
        self.first = min(self.layer_of.values())
        self.draw = Draw(seed=0, step=0, sequence=0)
        for name, module in chosen.items():
            module.register_forward_hook(self._beside(name))
        for _, tensor in self.adapter.tensors():
            tensor.requires_grad_()
        self._tuples = False
        self._tuples = self._returns_tuples()
        self._check_cut()
        self.memory = memory or self.memory

    def _beside(self, name: str) -> Callable[[Any, Any, torch.Tensor], torch.Tensor]:
        def add(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
            pair = self.adapter.pairs[name]
            x = given[0].to(pair.a.dtype)
            if self.draw.share:
                if x.dim() != 3:
                    raise BadTarget(f"lora_dropout: {name} does not see rows by position; set it to 0")
                x = x * self.draw.mask(name, x.shape, 0, x.shape[1], x)
            return (out + (x @ pair.a.t() @ pair.b.t()) * self.adapter.scale).to(out.dtype)

        return add

    def _returns_tuples(self) -> bool:
        """Some layers return (hidden states, ...): stand-ins must do the same."""
        seen: list[bool] = []
        handle = self.modules[0].register_forward_hook(lambda module, given, out: seen.append(isinstance(out, tuple)))
        with torch.no_grad():
            self.model.get_decoder()(input_ids=self.here(np.zeros((1, 2), dtype=np.int64)), use_cache=False)
        handle.remove()
        return seen[0]

    def here(self, integers: IntArray) -> torch.Tensor:
        """Where the model is: no tensor of a batch comes to it in another way."""
        return torch.from_numpy(integers).to(next(self.model.parameters()).device)

    def hidden(self, out: Any) -> torch.Tensor:
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    @contextmanager
    def standing_in(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Each layer answers with `forward(number, hidden, *args, **kwargs)`."""

        def answer(number: int) -> Callable[..., Any]:
            def call(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                out = forward(number, hidden, *args, **kwargs)
                return (out,) if self._tuples else out

            return call

        for number, module in enumerate(self.modules):
            module.forward = answer(number)
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward

    def start(self, batch: MicroBatch, *, scale: float, draw: Draw, grid: Grid) -> AutogradPass:
        self.draw = draw
        return AutogradPass(self, batch, scale=scale, grid=grid)

    def _check_cut(self) -> None:
        """Tiles against one whole backward on eight tokens: a model that hands more than hidden states from layer to
        layer would train wrongly and look right.
        """
        ids = np.arange(8, dtype=np.int64)[None] % self.model.config.get_text_config().vocab_size
        batch = MicroBatch(input_ids=ids, labels=ids, segments=ids * 0 + 1, positions=np.arange(8)[None])
        grid = Grid(layers=self.layers, tokens=8)
        work = self.start(batch, scale=1 / 7, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
        for tile in whole(grid):
            work.run(tile)
        _, ours = work.gradients()
        for path, gradient in zip(self.adapter.pairs, self._uncut(self.here(ids)), strict=True):
            theirs = torch.zeros_like(ours[path].b) if gradient is None else gradient
            if float((ours[path].b - theirs).norm()) > 0.02 * float(theirs.norm()) + 1e-6:
                raise BadModel(f"{type(self.model).__name__}: {path} has another gradient when cut into tiles")

    def _uncut(self, ids: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of each site's B, by one backward through the whole model."""
        out = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(wide(out), ids[0, 1:])
        wanted = [pair.b for pair in self.adapter.pairs.values()]
        gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(loss, wanted, allow_unused=True)
        return gradients


class AutogradPass:
    """One micro-batch of whole sequences."""

    def __init__(self, model: AutogradModel, batch: MicroBatch, *, scale: float, grid: Grid) -> None:
        if grid.forward != grid.backward or len(grid.token_cuts(Phase.FORWARD)) > 1:
            raise ValueError("tiles of autograd are whole sequences, the same layers forward and backward")
        if bool((batch.segments > 1).any()) and model.model.config.model_type not in PACKED:
            raise BadModel(f"packing: unproven for model type {model.model.config.model_type}; set packing to false")
        self.model, self.scale, self.loss = model, scale, 0.0
        self.inputs = {
            "input_ids": model.here(batch.input_ids),
            "position_ids": model.here(batch.positions),
            "use_cache": False,
        }
        self.targets = targets_of(model.here(batch.labels))
        self.frontier = Frontier(grid.layers, grid.tokens)
        self.stash = Stash(model.memory, *batch.input_ids.shape)
        self.sums = model.adapter.zeros()
        self.ask: Callable[[], None] = nothing
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        with torch.no_grad(), model.standing_in(self._record):
            model.model.get_decoder()(**self.inputs)

    def _record(self, number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls[number] = args, kwargs
        if not number:
            self.flow = hidden.detach().clone()
        return hidden

    def run(self, tile: Tile, ask: Callable[[], None] = nothing) -> None:
        """Left before any layer, and in backward before any operator: the model's author need not know of it."""
        self.ask = ask
        self.frontier.take(tile)
        if tile.phase is Phase.FORWARD:
            self.stash.write(tile.layer, "x_in", 0, self.flow)
            with torch.no_grad():
                self.flow = self._layers(tile, self.flow)
        else:
            self._backward(tile)

    def _layers(self, tile: Tile, x: torch.Tensor) -> torch.Tensor:
        for number in range(tile.layer, tile.layer_end):
            self.ask()
            args, kwargs = self.calls[number]
            x = self.model.hidden(self.model.modules[number](x, *args, **kwargs))
        return x

    def _backward(self, tile: Tile) -> None:
        if tile.layer_end == self.model.layers:
            self.flow = self._head()
        if tile.layer_end <= self.model.first:
            return
        inner = [path for path, layer in self.model.layer_of.items() if tile.layer <= layer < tile.layer_end]
        pairs = [self.model.adapter.pairs[path] for path in sorted(inner)]
        leaves = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        with torch.enable_grad():
            x = self.stash.read(tile.layer, "x_in", 0, self.targets.shape[1]).detach().clone().requires_grad_()
            last = self._layers(tile, x)
            for node in [] if self.ask is nothing else nodes(last.grad_fn):
                node.register_prehook(lambda _: self.ask())
            out = torch.autograd.grad(last, [x, *leaves], self.flow, allow_unused=True)
        self.flow = out[0]
        for number, path in enumerate(sorted(inner)):
            self._add(self.sums[path], out[1 + 2 * number], out[2 + 2 * number])
        self.stash.drop(tile.layer)

    @staticmethod
    def _add(total: LoraPair, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        if a is not None and b is not None:  # a linear the model did not use for these tokens
            total.a += a
            total.b += b

    def _head(self) -> torch.Tensor:
        """The model itself from its last hidden states on: whatever it does to logits is in."""
        with torch.enable_grad():
            x = self.flow.detach().requires_grad_()
            last = self.model.layers - 1
            with self.model.standing_in(lambda number, hidden, *args, **kwargs: x if number == last else hidden):
                logits = wide(self.model.model(**self.inputs).logits)
            chosen = self.targets != IGNORED
            loss = F.cross_entropy(logits[chosen], self.targets[chosen], reduction="sum") * self.scale
            (dx,) = torch.autograd.grad(loss, [x])
        self.loss += float(loss.detach()) if bool(chosen.any()) else 0.0
        return dx.detach() if math.isfinite(self.loss) else torch.full_like(x, math.nan)

    def border(self) -> None:
        self.stash.border()

    def close(self) -> None:
        self.stash.close()

    def forward_loss(self) -> float:
        if self.frontier.forward[-1] < self.frontier.tokens:
            raise RuntimeError("the forward pass is not done")
        self._head()
        self.stash.check(self.targets.device)
        return self.loss

    def gradients(self) -> tuple[float, Gradients]:
        if not self.frontier.is_complete:
            raise RuntimeError("the micro-batch is not done")
        self.stash.check(self.targets.device)
        return self.loss, self.sums


# Proven to see segments from positions alone, in the tests.
PACKED = frozenset({"llama", "gemma2", "phi3", "olmo2", "granite", "stablelm", "qwen3_moe"})
