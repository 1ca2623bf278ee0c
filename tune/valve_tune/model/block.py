"""One decoder layer over some rows: forward keeps what pruning says, backward is its vector-Jacobian product."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce

import torch
import torch.nn.functional as F

from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.model.maths import attend_backward, norm_backward, rotate_backward, silu_backward, wide
from valve_tune.model.names import MODULE, path
from valve_tune.model.rows import LayerRows
from valve_tune.tiles.decoder import ATTENTION

KEYS_VALUES = ("k", "k_turned", "v")


class Sums:
    """What a micro-batch adds up: gradients of keys and values for the layers in work, and of the adapter."""

    def __init__(self, adapter: Adapter, rows: int, tokens: int) -> None:
        self.adapter: Gradients = adapter.zeros()
        self._shape = (rows, tokens)
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.peak_layers = 0

    def kv(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, tokens, heads, size] each, zero at first: nothing of another sequence may be left in them."""
        if layer not in self._kv:
            shape = (*self._shape, *like.shape[2:])
            dk = torch.zeros(shape, dtype=wide(like[:0]).dtype, device=like.device)
            self._kv[layer] = dk, torch.zeros_like(dk)
            self.peak_layers = max(self.peak_layers, len(self._kv))
        return self._kv[layer]

    def drop(self, layer: int) -> None:
        self._kv.pop(layer, None)


def forward(rows: LayerRows, x_in: torch.Tensor, keep: Iterable[str]) -> torch.Tensor:
    """Keys and values are kept first: attention reads those of all spans so far from the stash."""
    rows.known["x_in"] = x_in
    for name in sorted(keep, key=lambda name: name not in KEYS_VALUES):
        rows.stash.write(rows.layer, name, rows.first, rows.get(name))
    return rows.get("x_out")


class BlockBackward:
    """Gradients of one layer's rows, from the last operator to the first. `below`: does any adapter lie deeper?"""

    def __init__(self, rows: LayerRows, sums: Sums, *, below: bool) -> None:
        rows.only_cheap = True
        self.rows, self.sums, self.below = rows, sums, below
        self.trained = {name for name in MODULE if path(rows.layer, name) in rows.scene.adapter.pairs}

    def run(self, dx_out: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the layer's input, or None where it is not needed."""
        in_attention = self.below or bool(self.trained & set(ATTENTION))
        dx_mid = self.mlp(dx_out, onward=in_attention)
        return self.attention(dx_mid) if dx_mid is not None and in_attention else None

    def mlp(self, dx_out: torch.Tensor, *, onward: bool) -> torch.Tensor | None:
        rows = self.rows
        inward = onward or bool(self.trained & {"gate", "up"})
        dinner = self.linear("down", lambda: rows.get("inner"), dx_out, onward=inward)
        if dinner is None:
            return None
        gate, up = rows.get("gate"), rows.get("up")
        dup = dinner * F.silu(gate)
        dgate = silu_backward(gate, dinner * up)
        parts = [
            self.linear("gate", lambda: rows.get("normed_mid"), dgate, onward=onward),
            self.linear("up", lambda: rows.get("normed_mid"), dup, onward=onward),
        ]
        return self.through_norm("x_mid", "post_attention_layernorm.weight", parts, dx_out) if onward else None

    def attention(self, dx_mid: torch.Tensor) -> torch.Tensor | None:
        rows = self.rows
        onward = self.below or bool(self.trained & {"q", "k", "v"})
        dmixed = self.linear("o", lambda: rows.get("mixed"), dx_mid, onward=onward)
        if dmixed is None:
            return None
        parts = []
        for name, gradient in zip(("q", "k", "v"), self.through_attention(dmixed), strict=True):
            if not self.below and name not in self.trained:
                continue
            back = gradient if name == "v" else self.through_turn(name, gradient)
            parts.append(self.linear(name, lambda: rows.get("normed_in"), back.flatten(2), onward=self.below))
        return self.through_norm("x_in", "input_layernorm.weight", parts, dx_mid) if self.below else None

    def through_attention(self, dmixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds to the gradients of all keys and values so far; those of these rows are complete with that."""
        rows = self.rows
        q, k, v = rows.heads(rows.get("q_turned")), rows.until_now("k_turned"), rows.until_now("v")
        _, dq, dk, dv = attend_backward(q, k, v, rows.scene.mask(rows.first, rows.end), dmixed)
        all_k, all_v = self.sums.kv(rows.layer, k)
        all_k[:, : rows.end] += dk
        all_v[:, : rows.end] += dv
        own = slice(rows.first, rows.end)
        return dq, all_k[:, own].to(dq.dtype), all_v[:, own].to(dq.dtype)

    def through_turn(self, name: str, dy: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        back = rotate_backward(dy, *rows.turns)
        if rows.scene.shape.qk_norm:
            weight = rows.weights[f"self_attn.{name}_norm.weight"]
            back = norm_backward(rows.heads(rows.get(name)), weight, rows.scene.eps, back)
        return back

    def through_norm(self, x: str, weight: str, parts: list[torch.Tensor | None], past: torch.Tensor) -> torch.Tensor:
        dnormed = reduce(operator.add, [part for part in parts if part is not None])
        return past + norm_backward(self.rows.get(x), self.rows.weights[weight], self.rows.scene.eps, dnormed)

    def linear(
        self, name: str, x: Callable[[], torch.Tensor], dy: torch.Tensor, *, onward: bool
    ) -> torch.Tensor | None:
        """Adds the adapter's gradients; the frozen weight has none, so `x` is only computed for an adapter."""
        rows = self.rows
        dx = dy @ rows.weights[f"{MODULE[name]}.weight"] if onward else None
        if name not in self.trained:
            return dx
        site = path(rows.layer, name)
        pair, total = rows.scene.adapter.pairs[site], self.sums.adapter[site]
        given = x().to(pair.a.dtype)
        mask = rows.drop_mask(site, given) if rows.scene.draw.share else None
        seen = (given if mask is None else given * mask).flatten(0, 1)
        dhigh = dy.to(pair.a.dtype).flatten(0, 1) * rows.scene.adapter.scale
        dlow = dhigh @ pair.b
        total.b += dhigh.t() @ (seen @ pair.a.t())
        total.a += dlow.t() @ seen
        if dx is None:
            return None
        more = (dlow @ pair.a).view_as(given)
        return dx + (more if mask is None else more * mask).to(dx.dtype)
