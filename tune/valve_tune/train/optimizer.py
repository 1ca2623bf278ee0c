"""AdamW in fp32 over the adapter, with a schedule and clipping; its state is named, so that it can be kept."""

from __future__ import annotations

import math
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes

from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.train.spec import JobSpec

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def rate_at(spec: JobSpec, step: int) -> float:
    """The learning rate of step `step` (from 0), as Hugging Face's schedules of these names have it."""
    name, warm = spec.lr_scheduler_type, spec.warmup_steps
    if name != "constant" and step < warm:
        return spec.learning_rate * step / max(1, warm)
    rest = max(1, spec.max_steps - warm)
    if name == "linear":
        return spec.learning_rate * max(0.0, (spec.max_steps - step) / rest)
    if name == "cosine":
        return spec.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warm) / rest)))
    return spec.learning_rate


class Optimizer:
    """One step at a time; the adapter's tensors are changed in place."""

    def __init__(self, spec: JobSpec, adapter: Adapter, frozen: str = "") -> None:
        """`frozen`: tensors with this in their name are left as they are."""
        self._spec = spec
        self._named = {name: tensor for name, tensor in adapter.tensors() if not frozen or frozen not in name}
        self._adamw = torch.optim.AdamW(
            list(self._named.values()),
            lr=spec.learning_rate,
            betas=(spec.adam_beta1, spec.adam_beta2),
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            foreach=False,
        )

    def norm(self, gradients: Gradients) -> float:
        """Hands the gradients over, clips them and returns their norm before."""
        for path, pair in gradients.items():
            for name, gradient in ((f"{path}.lora_A.weight", pair.a), (f"{path}.lora_B.weight", pair.b)):
                if name in self._named:
                    self._named[name].grad = gradient
        most = self._spec.max_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self._named.values(), most, foreach=False))

    def step(self, step: int) -> float:
        rate = rate_at(self._spec, step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()
        return rate

    def to_bytes(self) -> bytes:
        values = {
            f"{name}/{moment}": self._adamw.state[tensor][moment].detach().cpu().contiguous()
            for name, tensor in self._named.items()
            if tensor in self._adamw.state
            for moment in MOMENTS
        }
        document: bytes = tensor_bytes(values)
        return document

    def load(self, document: bytes) -> None:
        values = parse_tensors(document)
        self._adamw.state.clear()
        for name, tensor in self._named.items():
            if f"{name}/step" in values:
                state: dict[str, Any] = {moment: values[f"{name}/{moment}"].clone() for moment in MOMENTS}
                moved = {moment: value.to(tensor.device) for moment, value in state.items() if moment != "step"}
                self._adamw.state[tensor] = state | moved
