"""A decoder of Llama's shape with random weights, in plain PyTorch: static KV slots, one decode step for all of them.

Latencies and memory traffic are those of a real model of the same shape; the words mean nothing. Everything is greedy
and seeded, so the same work gives the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchShape:
    """Of a model. Parameters: about 12 * layers * width^2 with these feed-forward ratios, plus the vocabulary."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.width // self.heads


SHAPES = {
    "tiny": TorchShape(layers=2, width=64, heads=4, kv_heads=2, inner=128, vocabulary=256),
    "1b": TorchShape(layers=16, width=2048, heads=32, kv_heads=8, inner=8192, vocabulary=128256),
    "3b": TorchShape(layers=28, width=3072, heads=24, kv_heads=8, inner=8192, vocabulary=128256),
    "8b": TorchShape(layers=32, width=4096, heads=32, kv_heads=8, inner=14336, vocabulary=128256),
}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head] at positions [batch, length]."""
    half = x.shape[-1] // 2
    rates = 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * rates
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: TorchShape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """x [batch, length, width]; keys and values [batch, kv_heads, room, head] are written at `positions`."""
        shape, (batch, length, _) = self.shape, x.shape
        kv = shape.kv_heads * shape.head
        q, k, v = self.qkv(self.before(x)).split((shape.width, kv, kv), dim=-1)
        q = rotate(q.view(batch, length, shape.heads, shape.head).transpose(1, 2), positions)
        k = rotate(k.view(batch, length, shape.kv_heads, shape.head).transpose(1, 2), positions)
        v = v.view(batch, length, shape.kv_heads, shape.head).transpose(1, 2)
        at = positions[:, None, :, None].expand(-1, shape.kv_heads, -1, shape.head)
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        seen = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, shape.width))
        gate, up = self.up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):  # type: ignore[misc]
    """`slots` requests of at most `room` tokens each. prefill() fills a slot, step() makes a token for every slot."""

    def __init__(self, shape: TorchShape, *, slots: int, room: int, device: str, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
        with torch.device(device):
            self.embed = nn.Embedding(shape.vocabulary, shape.width, dtype=kind)
            self.layers = nn.ModuleList(Layer(shape).to(kind) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width, dtype=kind)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=kind)
            size = (shape.layers, slots, shape.kv_heads, room, shape.head)
            self.keys, self.values = torch.zeros(size, dtype=kind), torch.zeros(size, dtype=kind)
            self.tokens = torch.zeros((slots, 1), dtype=torch.long)
            self.positions = torch.zeros((slots, 1), dtype=torch.long)
            self._column = torch.arange(room)
        self.requires_grad_(False)

    def _forward(self, tokens: Tensor, positions: Tensor, slots: slice) -> Tensor:
        mask = self._column <= positions[:, None, :, None]
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.keys[i, slots], self.values[i, slots], positions, mask)
        return self.head(self.norm(x[:, -1:])).argmax(-1)

    def prefill(self, slot: int, prompt: Tensor) -> None:
        """Put a prompt into a slot; its first token is then the slot's current one."""
        positions = torch.arange(prompt.numel(), device=prompt.device)[None]
        self.tokens[slot] = self._forward(prompt[None], positions, slice(slot, slot + 1))[0]
        self.positions[slot] = prompt.numel()

    def step(self) -> None:
        """One token for every slot, also for unused ones: the shape never changes, so it can be a graph."""
        self.tokens.copy_(self._forward(self.tokens, self.positions, slice(None)))
        self.positions.add_(1).clamp_(max=self.keys.shape[3] - 1)


class Stepper:
    """step(), replayed as a CUDA graph where there is one."""

    def __init__(self, model: Decoder, *, graphs: bool) -> None:
        self.model = model
        self._graph: torch.cuda.CUDAGraph | None = None
        if graphs and model.tokens.is_cuda:
            model.step()  # libraries set themselves up on the first call, which a capture would not allow
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model.step()
            self._graph = graph

    def __call__(self) -> None:
        if self._graph is None:
            self.model.step()
        else:
            self._graph.replay()


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
