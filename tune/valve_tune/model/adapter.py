"""The trained matrices: low-rank pairs beside frozen linears, made from a seed and written as peft reads them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes

PEFT = "base_model.model."


class BadAdapter(ValueError):
    """An adapter file that does not belong to this job."""


@dataclass(slots=True)
class LoraPair:
    """y += scale * (x A^T) B^T"""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]


Gradients = dict[str, LoraPair]


class Adapter:
    """One pair a site; sites are module paths as in the model. Every walk is in the order of paths."""

    def __init__(self, sites: Mapping[str, tuple[int, int]], *, rank: int, alpha: float, seed: int = 0) -> None:
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.pairs: dict[str, LoraPair] = {}
        for path in sorted(sites):
            inputs, outputs = sites[path]
            generator = torch.Generator().manual_seed(_seed(seed, path))
            bound = 1 / math.sqrt(inputs)
            a = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
            self.pairs[path] = LoraPair(a, torch.zeros(outputs, rank))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Adapter:
        for pair in self.pairs.values():
            pair.a, pair.b = pair.a.to(device, dtype), pair.b.to(device, dtype)
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, pair in self.pairs.items():
            yield f"{path}.lora_A.weight", pair.a
            yield f"{path}.lora_B.weight", pair.b

    def zeros(self) -> Gradients:
        return {path: LoraPair(torch.zeros_like(p.a), torch.zeros_like(p.b)) for path, p in self.pairs.items()}

    def to_bytes(self) -> bytes:
        values = {PEFT + name: tensor.detach().float().cpu().contiguous() for name, tensor in self.tensors()}
        document: bytes = tensor_bytes(values, metadata={"format": "pt"})
        return document

    def load(self, document: bytes) -> None:
        try:
            values = parse_tensors(document)
        except Exception as error:
            raise BadAdapter(f"adapter_model.safetensors: {error}") from error
        if values.keys() != {PEFT + name for name, _ in self.tensors()}:
            raise BadAdapter("adapter_model.safetensors has other target modules than this job")
        for name, tensor in self.tensors():
            stored = values[PEFT + name]
            if stored.shape != tensor.shape:
                raise BadAdapter(f"{name} is {tuple(stored.shape)} in the file and {tuple(tensor.shape)} in this job")
            with torch.no_grad():
                tensor.copy_(stored)

    def config(self, base: str, dropout: float) -> str:
        """What vLLM and SGLang read alike: one rank, one alpha, no bias."""
        modules = sorted({path.rpartition(".")[2] for path in self.pairs})
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "lora_dropout": dropout,
            "target_modules": modules,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "use_dora": False,
            "use_rslora": False,
            "modules_to_save": None,
        }
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    def write(self, folder: Path, base: str, dropout: float = 0.0) -> None:
        """For tests and tools; a job writes through its checkpoints."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.to_bytes())
        (folder / "adapter_config.json").write_text(self.config(base, dropout))


def _seed(seed: int, path: str) -> int:
    """A site's own, so that its start does not depend on which other sites are trained."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest(), "little")
