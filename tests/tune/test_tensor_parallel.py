"""An adapter beside a base that is split over ranks: which half of it is split, and what that costs (FlexLLM 5.1).

`valve tune` trains on one GPU and refuses split bases by name. This is the plan for what may one day train inside an
engine of several: ranks played in one process, every exchange between them counted.

    column-parallel (q, k, v, gate, up): A on every rank, B split by its outputs; dA is a partial sum
    row-parallel (o, down):              A split by its inputs, B on every rank;  dB is a partial sum
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from valve_tune.model.names import MODULE

LAYERS, HEADS, KV, SIZE, HIDDEN, MLP, RANK = 2, 8, 4, 8, 64, 96, 4
COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")
Pair = dict[str, torch.Tensor]
SITES = [(layer, name) for layer in range(LAYERS) for name in (*COLUMN, *ROW)]


class Ranks:
    """`count` ranks in lock step; a list holds one tensor for each."""

    def __init__(self, count: int) -> None:
        self.count, self.exchanges = count, Counter[str]()

    def reduced(self, partial: list[torch.Tensor]) -> list[torch.Tensor]:
        self.exchanges["forward"] += 1
        return [sum(partial[1:], partial[0])] * self.count

    def entered(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank computes its part of what follows: their gradients of x are summed on the way back."""
        whole = x[0].view_as(x[0])
        whole.register_hook(lambda _: self.exchanges.update(["backward"]))
        return [whole] * self.count


def made() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=SIZE,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).double().requires_grad_(False)
    oracle.narrow_nothing(model)
    return model


def adapters(model: Any) -> dict[tuple[int, str], Pair]:
    found = {}
    for layer, name in SITES:
        out, given = model.get_parameter(f"model.layers.{layer}.{MODULE[name]}.weight").shape
        found[layer, name] = {"a": torch.randn(RANK, given).double() * 0.2, "b": torch.randn(out, RANK).double() * 0.2}
    return found


def right(model: Any, pairs: dict[tuple[int, str], Pair], ids: torch.Tensor) -> dict[tuple[int, str], Pair]:
    """Gradients through Hugging Face's own model, adapters merged into its weights."""
    leaves = {site: {half: tensor.clone().requires_grad_() for half, tensor in pairs[site].items()} for site in SITES}
    merged = {}
    for (layer, name), pair in leaves.items():
        key = f"model.layers.{layer}.{MODULE[name]}.weight"
        merged[key] = model.get_parameter(key) + pair["b"] @ pair["a"]
    logits = torch.func.functional_call(model, merged, kwargs={"input_ids": ids, "use_cache": False}).logits
    F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    return {site: {half: tensor.grad for half, tensor in pair.items()} for site, pair in leaves.items()}  # type: ignore[misc]


def split(name: str, pair: Pair, count: int) -> list[Pair]:
    """One rank's halves each; what stands on every rank is a leaf of its own there."""
    halved = {"b": 0} if name in COLUMN else {"a": 1}
    parts: list[Pair] = [{} for _ in range(count)]
    for half, tensor in pair.items():
        pieces = tensor.chunk(count, halved[half]) if half in halved else [tensor] * count
        for part, piece in zip(parts, pieces, strict=True):
            part[half] = piece.clone().requires_grad_()
    return parts


def block(model: Any, layer: int, x: list[torch.Tensor], own: dict[str, list[Pair]], ranks: Ranks, turn: Any) -> Any:
    """One layer as an engine of several ranks computes it; the adapter's part joins the base's before each exchange."""
    module, count = model.model.layers[layer], ranks.count

    def linear(name: str, rank: int, given: torch.Tensor) -> torch.Tensor:
        weight = module.get_submodule(MODULE[name]).weight.chunk(count, 0 if name in COLUMN else 1)[rank]
        pair = own[name][rank]
        return F.linear(given, weight) + given @ pair["a"].t() @ pair["b"].t()

    def attended(rank: int, given: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(name, rank, given).unflatten(-1, (-1, SIZE)).transpose(1, 2) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *turn)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear("o", rank, out.transpose(1, 2).flatten(2))

    def multiplied(rank: int, given: torch.Tensor) -> torch.Tensor:
        return linear("down", rank, F.silu(linear("gate", rank, given)) * linear("up", rank, given))

    for norm, part in ((module.input_layernorm, attended), (module.post_attention_layernorm, multiplied)):
        given = ranks.entered([norm(x[0])] * count)
        added = ranks.reduced([part(rank, given[rank]) for rank in range(count)])
        x = [x[0] + added[0]] * count
    return x


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_split_adapter_has_the_gradients_of_a_whole_one_and_no_exchange_of_its_own_in_a_layer(count: int) -> None:
    model, ids = made(), torch.arange(12)[None] * 5 % 64
    pairs = adapters(model)
    wanted = right(model, pairs, ids)
    own = {site: split(site[1], pair, count) for site, pair in pairs.items()}
    ranks = Ranks(count)
    x = [model.model.embed_tokens(ids).requires_grad_()] * count
    turn = model.model.rotary_emb(x[0], torch.arange(12)[None])
    for layer in range(LAYERS):
        x = block(model, layer, x, {name: own[layer, name] for name in (*COLUMN, *ROW)}, ranks, turn)
    logits = model.lm_head(model.model.norm(x[0]))
    F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    assert ranks.exchanges == {"forward": 2 * LAYERS, "backward": 2 * LAYERS}  # those of the base alone
    for (layer, name), parts in own.items():
        for half, correct in wanted[layer, name].items():
            found = [part[half].grad for part in parts]
            is_split = half == ("b" if name in COLUMN else "a")
            whole = torch.cat(found, 0 if half == "b" else 1) if is_split else torch.stack(found).sum(0)  # type: ignore[arg-type]
            assert torch.allclose(whole, correct, rtol=1e-12, atol=1e-14), (layer, name, half)
            if not is_split and count > 1:  # the one exchange that a step owes, and what leaving it out would train
                assert not torch.allclose(found[0], correct, rtol=1e-2), (layer, name, half)  # type: ignore[arg-type]
