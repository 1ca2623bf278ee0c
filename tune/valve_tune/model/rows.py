"""Some rows of one layer: whatever is asked for is taken from the stash or computed from what is there.

Forward and backward use the same recipes. Backward may only use those the pruning counts as cheap; that what it kept is
enough is therefore checked in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from valve_tune.model.adapter import Adapter
from valve_tune.model.dropout import Draw
from valve_tune.model.maths import attend, norm, rotate
from valve_tune.model.names import MODULE, path
from valve_tune.model.stash import Stash
from valve_tune.tiles.decoder import DecoderShape


class NotKept(Exception):
    """Backward asked for a tensor that pruning had removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all tiles of one micro-batch share."""

    shape: DecoderShape
    adapter: Adapter
    eps: float
    ids: torch.Tensor
    segments: torch.Tensor | None  # none: one example a row
    cos: torch.Tensor
    sin: torch.Tensor
    embedding: torch.Tensor
    draw: Draw
    again_mlp: bool

    def mask(self, first: int, end: int) -> torch.Tensor | None:
        """Which keys [0, end) queries [first, end) see."""
        if self.segments is None and first == 0:
            return None
        device = self.ids.device
        seen = torch.arange(end, device=device) <= torch.arange(first, end, device=device).unsqueeze(1)
        if self.segments is None:
            return seen
        same = self.segments[:, first:end].unsqueeze(2) == self.segments[:, None, :end]
        return (seen & same).unsqueeze(1)


class LayerRows:
    """Rows [first, end) of one layer."""

    def __init__(
        self, scene: Scene, stash: Stash, weights: Mapping[str, torch.Tensor], layer: int, rows: tuple[int, int]
    ) -> None:
        self.scene, self.stash, self.weights, self.layer = scene, stash, weights, layer
        self.first, self.end = rows
        self.known: dict[str, torch.Tensor] = {}
        self.only_cheap = False

    def get(self, name: str) -> torch.Tensor:
        value = self.known.get(name)
        if value is None:
            if self.only_cheap and self.stash.has(self.layer, name):
                value = self.stash.read(self.layer, name, self.first, self.end)
            else:
                value = self._compute(name)
            self.known[name] = value
        return value

    def _compute(self, name: str) -> torch.Tensor:
        dear = name in (DEAR if self.scene.again_mlp else DEAR | {"gate", "up"})
        if (self.only_cheap and dear) or (name == "x_in" and self.layer):
            raise NotKept(f"layer {self.layer}: {name}")
        return RECIPES[name](self)

    def until_now(self, name: str) -> torch.Tensor:
        """Keys or values of all tokens up to the last of these rows, from the stash: [rows, tokens, heads, size]."""
        if not self.first and name in self.known:
            return self.heads(self.known[name])
        if self.stash.has(self.layer, name):
            return self.heads(self.stash.read(self.layer, name, 0, self.end))
        rows = self if not self.first else LayerRows(self.scene, self.stash, self.weights, self.layer, (0, self.end))
        rows.only_cheap = self.only_cheap or bool(self.first)
        return self.heads(rows.get(name))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], -1, self.scene.shape.head_size)

    @property
    def turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scene.cos[:, self.first : self.end], self.scene.sin[:, self.first : self.end]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module, site = MODULE[name], path(self.layer, name)
        y = F.linear(x, self.weights[f"{module}.weight"], self.weights.get(f"{module}.bias"))
        pair = self.scene.adapter.pairs.get(site)
        if pair is not None:
            low = self.dropped(site, x.to(pair.a.dtype)) @ pair.a.t()
            y = (y + (low @ pair.b.t()) * self.scene.adapter.scale).to(y.dtype)
        return y

    def dropped(self, site: str, x: torch.Tensor) -> torch.Tensor:
        return x * self.drop_mask(site, x) if self.scene.draw.share else x

    def drop_mask(self, site: str, like: torch.Tensor) -> torch.Tensor:
        return self.scene.draw.mask(site, like.shape, self.first, self.scene.ids.shape[1], like)

    def normed(self, name: str, weight: str) -> torch.Tensor:
        return norm(self.get(name), self.weights[weight], self.scene.eps)

    def turned(self, name: str) -> torch.Tensor:
        x = self.heads(self.get(name))
        if self.scene.shape.qk_norm:
            x = norm(x, self.weights[f"self_attn.{name}_norm.weight"], self.scene.eps)
        return rotate(x, *self.turns).flatten(2)

    def mixed(self) -> torch.Tensor:
        q = self.heads(self.get("q_turned"))
        return attend(q, self.until_now("k_turned"), self.until_now("v"), self.scene.mask(self.first, self.end))


DEAR = frozenset({"x_mid", "x_out", "q", "k", "v"})
RECIPES: Mapping[str, Callable[[LayerRows], torch.Tensor]] = {
    "x_in": lambda rows: F.embedding(rows.scene.ids[:, rows.first : rows.end], rows.scene.embedding),
    "normed_in": lambda rows: rows.normed("x_in", "input_layernorm.weight"),
    "q": lambda rows: rows.linear("q", rows.get("normed_in")),
    "k": lambda rows: rows.linear("k", rows.get("normed_in")),
    "v": lambda rows: rows.linear("v", rows.get("normed_in")),
    "q_turned": lambda rows: rows.turned("q"),
    "k_turned": lambda rows: rows.turned("k"),
    "mixed": LayerRows.mixed,
    "x_mid": lambda rows: rows.get("x_in") + rows.linear("o", rows.get("mixed")),
    "normed_mid": lambda rows: rows.normed("x_mid", "post_attention_layernorm.weight"),
    "gate": lambda rows: rows.linear("gate", rows.get("normed_mid")),
    "up": lambda rows: rows.linear("up", rows.get("normed_mid")),
    "inner": lambda rows: F.silu(rows.get("gate")) * rows.get("up"),
    "x_out": lambda rows: rows.get("x_mid") + rows.linear("down", rows.get("inner")),
}
