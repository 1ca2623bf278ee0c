"""A Hugging Face model that holds nothing of its own: its parameters are the tensors that it is given, not copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from valve_tune.base.weights import BadBase, Tensors


def around(config: Any, tensors: Tensors) -> Any:
    """On the meta device until the tensors are put in; only buffers, which no checkpoint holds, are made."""
    some = next(iter(tensors.values()))
    with _nothing_is_allocated():
        model = AutoModelForCausalLM.from_config(config, dtype=some.dtype)
    unknown = model.load_state_dict(dict(tensors), strict=False, assign=True).unexpected_keys
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or unknown:
        raise BadBase(f"{(left or unknown)[0]}: the model and its checkpoint have different names for this weight")
    for name, parameter in model.named_parameters():
        given = tensors.get(name)
        if given is not None and given.data_ptr() != parameter.data_ptr():
            raise BadBase(f"{name}: the model made a copy of this weight")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(some.device))
    return model.requires_grad_(False)


@contextlib.contextmanager
def _nothing_is_allocated() -> Iterator[None]:
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
