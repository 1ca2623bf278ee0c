"""Greedy answers of a base with a LoRA adapter merged into its weights, by Hugging Face's model: `lora_answers.py MODEL
ADAPTER PROMPTS TOKENS`; prompts and answers are JSON lists of token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def merged(base: str, adapter: Path) -> torch.nn.Module:
    config = json.loads((adapter / "adapter_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            linear = model.get_submodule(stem.removeprefix("base_model.model."))
            with torch.no_grad():
                linear.weight += weights[f"{stem}.lora_B.weight"] @ down * (config["lora_alpha"] / config["r"])
    return model.eval()


def main() -> None:
    base, adapter, prompts, tokens = sys.argv[1:]
    model = merged(base, Path(adapter))
    answers = []
    for prompt in json.loads(prompts):
        ids = torch.tensor([prompt])
        for _ in range(int(tokens)):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
