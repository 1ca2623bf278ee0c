"""The Llama family by written-out tiles: one micro-batch from embedding to adapter gradients in any legal order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from valve_tune.base.memory import StashMemory, TorchMemory
from valve_tune.base.weights import FrozenWeights
from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.model.block import BlockBackward, Sums, forward
from valve_tune.model.dropout import Draw
from valve_tune.model.family import shape_of
from valve_tune.model.interface import nothing
from valve_tune.model.loss import head_loss, targets_of
from valve_tune.model.names import path
from valve_tune.model.rows import LayerRows, Scene
from valve_tune.model.stash import Stash
from valve_tune.tiles.decoder import Keeping, kept_names
from valve_tune.tiles.grid import Frontier, Grid, Phase, Tile
from valve_tune.tiles.memory import widths
from valve_tune.train.batch import MicroBatch

EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class ExplicitModel:
    """A base and an adapter; makes one pass for each micro-batch."""

    def __init__(
        self,
        config: Any,
        weights: FrozenWeights,
        adapter: Adapter,
        *,
        again_mlp: bool = True,
        memory: StashMemory | None = None,
    ) -> None:
        self.config, self.weights, self.adapter, self.again_mlp = config, weights, adapter, again_mlp
        self.shape = shape_of(config)
        self.layers, self.spans = self.shape.layers, True
        self.memory = memory or TorchMemory()
        self.embedding = weights.outer[EMBEDDING]
        self.rotary = LlamaRotaryEmbedding(config).to(self.embedding.device)
        trained = {layer: _targets(adapter, layer) for layer in range(self.layers)}
        self.first = min(layer for layer, names in trained.items() if names)
        self.keeping = Keeping(
            targets=frozenset().union(*trained.values()),
            rank=adapter.rank,
            first_layer=self.first,
            again_mlp=again_mlp,
            bits=self.embedding.element_size() * 8,
        )
        self.kept = kept_names(self.shape, self.keeping)

    def start(self, batch: MicroBatch, *, scale: float, draw: Draw, grid: Grid) -> ExplicitPass:
        return ExplicitPass(self, batch, scale=scale, draw=draw, grid=grid)


def _targets(adapter: Adapter, layer: int) -> frozenset[str]:
    return frozenset(name for name in SHORTS if path(layer, name) in adapter.pairs)


SHORTS = ("q", "k", "v", "o", "gate", "up", "down")


def adapter_sites(config: Any, targets: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Paths and widths of the linears to train, as an `Adapter` takes them."""
    shape = shape_of(config)
    return {path(layer, name): widths(shape, name) for layer in range(shape.layers) for name in sorted(targets)}


class ExplicitPass:
    """One micro-batch. Its gradients exist only when its last tile is done and its memory was never taken away."""

    def __init__(self, model: ExplicitModel, batch: MicroBatch, *, scale: float, draw: Draw, grid: Grid) -> None:
        self.model, self.grid, self.scale = model, grid, scale
        device = model.embedding.device
        ids = torch.from_numpy(batch.input_ids).to(device)
        positions = torch.from_numpy(batch.positions).to(device)
        self.targets = targets_of(torch.from_numpy(batch.labels)).to(device)
        one = bool((batch.segments == batch.segments[:, :1]).all())
        cos, sin = model.rotary(model.embedding[:1], positions)
        self.scene = Scene(
            shape=model.shape,
            adapter=model.adapter,
            eps=model.config.rms_norm_eps,
            ids=ids,
            segments=None if one else torch.from_numpy(batch.segments).to(device),
            cos=cos,
            sin=sin,
            embedding=model.embedding,
            draw=draw,
            again_mlp=model.again_mlp,
        )
        self.frontier = Frontier(model.layers, grid.tokens)
        self.stash = Stash(model.memory, *ids.shape)
        self.sums = Sums(model.adapter, *ids.shape)
        self.loss = 0.0
        # Upward it carries hidden states, downward their gradients: a token needs one of both at a time.
        self.flow = torch.empty((*ids.shape, model.shape.hidden), dtype=model.embedding.dtype, device=device)
        self.kept = model.kept
        self.spans = len(grid.token_cuts(Phase.FORWARD)) > 1

    def run(self, tile: Tile, ask: Callable[[], None] = nothing) -> None:
        """Never left inside: how long a tile takes is the grid's to say."""
        self.frontier.take(tile)
        with torch.no_grad():
            (self._forward if tile.phase is Phase.FORWARD else self._backward)(tile)

    def _forward(self, tile: Tile) -> None:
        own = slice(tile.token, tile.token_end)
        x = self.flow[:, own] if tile.layer else F.embedding(self.scene.ids[:, own], self.scene.embedding)
        for layer in range(tile.layer, tile.layer_end):
            weights = self.model.weights.enter(layer, Phase.FORWARD)
            rows = LayerRows(self.scene, self.stash, weights, layer, (tile.token, tile.token_end))
            x = forward(rows, x, sorted(self.kept[layer] | self._lent(layer)))
            if tile.token_end == self.grid.tokens:
                self.model.weights.leave(layer, Phase.FORWARD)
                for name in self._lent(layer):
                    self.stash.drop(layer, name)
        self.flow[:, own] = x

    def _lent(self, layer: int) -> set[str]:
        """Keys and values that later spans of the forward pass read though backward does not."""
        kept = self.kept[layer]
        if not self.spans:
            return set()
        return {name for name in ("k_turned", "v") if name not in kept and (name == "v" or "k" not in kept)}

    def _backward(self, tile: Tile) -> None:
        own = slice(tile.token, tile.token_end)
        if tile.layer_end == self.model.layers:
            self._head(own)
        dx: torch.Tensor | None = self.flow[:, own]
        for layer in range(tile.layer_end - 1, max(tile.layer, self.model.first) - 1, -1):
            assert dx is not None
            weights = self.model.weights.enter(layer, Phase.BACKWARD)
            rows = LayerRows(self.scene, self.stash, weights, layer, (tile.token, tile.token_end))
            dx = BlockBackward(rows, self.sums, below=layer > self.model.first).run(dx)
            if not tile.token:
                self.model.weights.leave(layer, Phase.BACKWARD)
                self.stash.drop(layer)
                self.sums.drop(layer)
        if dx is not None:
            self.flow[:, own] = dx

    def _head(self, own: slice) -> None:
        outer = self.model.weights.outer
        loss, dx = head_loss(
            self.flow[:, own],
            self.targets[:, own],
            outer[LAST_NORM],
            outer[HEAD],
            self.scene.eps,
            self.scale,
        )
        self.loss += float(loss)
        self.flow[:, own] = dx

    def border(self) -> None:
        self.stash.border()

    def close(self) -> None:
        self.stash.close()

    def forward_loss(self) -> float:
        """Of the whole micro-batch; its hidden states are used up."""
        if self.frontier.forward[-1] < self.grid.tokens:
            raise RuntimeError("the forward pass is not done")
        with torch.no_grad():
            self._head(slice(0, self.grid.tokens))
        self.stash.check(self.flow.device)
        return self.loss

    def gradients(self) -> tuple[float, Gradients]:
        """(loss, adapter gradients), both times scale."""
        if not self.frontier.is_complete:
            raise RuntimeError("the micro-batch is not done")
        self.stash.check(self.flow.device)
        return self.loss, self.sums.adapter
