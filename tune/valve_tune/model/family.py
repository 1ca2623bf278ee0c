"""Which models the written-out blocks compute, and their widths."""

from __future__ import annotations

from typing import Any

from valve_tune.tiles.decoder import DecoderShape

TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROTATIONS = ("default", "linear", "llama3", "yarn")


def obstacle(config: Any, max_length: int) -> str:
    """Why a model is trained by autograd inside its tiles instead; empty if its blocks are written out."""
    if config.model_type not in TYPES:
        return f"model type {config.model_type} is not written out"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act} is not written out"
    if getattr(config, "attention_dropout", 0.0):
        return "attention dropout is not written out"
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in ROTATIONS:
        return f"rotary embedding of type {rotation} is not written out"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_length:
        return f"sliding windows of {window} tokens are not written out"
    return ""


def shape_of(config: Any) -> DecoderShape:
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        qk_norm=config.model_type == "qwen3",
    )
