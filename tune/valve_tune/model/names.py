"""Names of linears: the short ones of the tiles, those of checkpoints, and those of peft."""

from __future__ import annotations

from collections.abc import Sequence

from valve_tune.tiles.decoder import LINEARS

MODULE = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SHORT = {module.rpartition(".")[2]: short for short, module in MODULE.items()}


class BadTarget(ValueError):
    """A target module that this model has not, or that engines do not serve."""


def path(layer: int, short: str) -> str:
    return f"model.layers.{layer}.{MODULE[short]}"


def short_targets(modules: Sequence[str]) -> frozenset[str]:
    """`all-linear` and names as peft takes them."""
    found: set[str] = set()
    for module in modules:
        if module == "all-linear":
            found.update(LINEARS)
            continue
        last = module.rpartition(".")[2]
        if last not in SHORT:
            raise BadTarget(f"target_modules: {module!r} is none of {', '.join(SHORT)}")
        found.add(SHORT[last])
    if not found:
        raise BadTarget("target_modules is empty")
    return frozenset(found)
