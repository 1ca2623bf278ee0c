"""Hugging Face + peft as the oracle of gradients, in fp32 as it stands and in fp64 without its casts to fp32."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from valve_tune.model.adapter import PEFT, Adapter, Gradients
from valve_tune.train.batch import IGNORED, MicroBatch

WIDTHS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**WIDTHS, attention_bias=True, mlp_bias=True),
    "smollm": LlamaConfig(
        **WIDTHS, tie_word_embeddings=True, rope_parameters={"rope_theta": 5e4, "rope_type": "default"}
    ),
    "llama3": LlamaConfig(
        **WIDTHS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**WIDTHS, sliding_window=None, head_dim=32),
    "qwen2": Qwen2Config(**WIDTHS),
    "qwen3": Qwen3Config(**WIDTHS, head_dim=16),
}


class Segments:
    """What the oracle's attention looks at; set before each of its runs."""

    now: torch.Tensor


def plain_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float = 1.0, **_more: Any) -> Any:
    """Softmax over a square matrix, in the dtype of its inputs, block mask from `Segments.now`."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = torch.ones(length, length, dtype=torch.bool).tril() & (Segments.now[:, :, None] == Segments.now[:, None, :])
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("plain", plain_attention)


def make(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="plain").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(3)  # so that softmax and SiLU are not near their linear parts
    return model.requires_grad_(False)


def narrow_nothing(model: Any) -> None:
    """Norms in the dtype of their input: Hugging Face casts to fp32 even where all is fp64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )


def batch_of(length: int = 24, rows: int = 2, *, packed: bool = False, seed: int = 0) -> MicroBatch:
    random = np.random.default_rng(seed)
    ids = random.integers(0, WIDTHS["vocab_size"], (rows, length))
    labels = np.where(random.random(ids.shape) < 0.3, IGNORED, ids)
    segments, positions = np.ones_like(ids), np.tile(np.arange(length), (rows, 1))
    if packed:
        for row in range(rows):
            cuts = np.sort(random.choice(np.arange(1, length), 3, replace=False))
            segments[row] = 1 + (np.arange(length)[:, None] >= cuts).sum(1)
            segments[row, cuts[-1] :] = 0
            starts = np.concatenate([[0], cuts])[(np.arange(length)[:, None] >= cuts).sum(1)]
            positions[row] = np.arange(length) - starts
        labels[(positions == 0) | (segments == 0)] = IGNORED
    labels[:, 0] = IGNORED
    return MicroBatch(input_ids=ids, labels=labels, segments=segments, positions=positions)


def randomised(adapter: Adapter, dtype: torch.dtype = torch.float32) -> Adapter:
    """B starts at zero, where the gradient of A is zero too: give it values."""
    generator = torch.Generator().manual_seed(5)
    for pair in adapter.pairs.values():
        pair.b.normal_(std=0.2, generator=generator)
    return adapter.to(dtype=dtype)


def with_peft(model: Any, adapter: Adapter) -> tuple[Any, dict[str, torch.Tensor]]:
    modules = sorted({path.rpartition(".")[2] for path in adapter.pairs})
    layers = sorted({int(path.split(".")[2]) for path in adapter.pairs})
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=modules,
        layers_to_transform=layers,
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(copy.deepcopy(model), config).to(model.dtype)
    parameters = dict(wrapped.named_parameters())
    found = {name: parameters[PEFT + name.replace(".weight", ".default.weight")] for name, _ in adapter.tensors()}
    with torch.no_grad():
        for name, tensor in adapter.tensors():
            found[name].copy_(tensor)
    return wrapped, found


def reference(model: Any, adapter: Adapter, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean loss over labels, gradients by name)."""
    wrapped, parameters = with_peft(model, adapter)
    if model.dtype == torch.float64:
        narrow_nothing(wrapped)
    Segments.now = torch.from_numpy(batch.segments)
    out = wrapped(input_ids=torch.from_numpy(batch.input_ids), position_ids=torch.from_numpy(batch.positions))
    labels = torch.from_numpy(batch.labels)[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].reshape(-1, out.logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED
    )
    loss.backward()
    return loss.item(), {name: each.grad for name, each in parameters.items()}


def flat(gradients: Gradients) -> dict[str, torch.Tensor]:
    found = {}
    for path, pair in gradients.items():
        found[f"{path}.lora_A.weight"], found[f"{path}.lora_B.weight"] = pair.a, pair.b
    return found


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest relative distance of any one gradient."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)
