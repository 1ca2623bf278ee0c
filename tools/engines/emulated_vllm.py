"""A CPU build of vLLM lives on the emulated card: its model step is a kernel, its KV cache is device memory.

Loaded by vLLM itself (entry point `vllm.general_plugins`, see mount.py), in the engine's environment, beside Valve's
own plugin; the two know nothing of each other. Where vLLM would allocate the cache with torch.zeros, cuMemAlloc is
called, so the shim in front sees what it would see of a GPU build. Standard library, torch and vLLM only.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

_device: Any = None


def device() -> Any:
    """One per process, made where it is first used: in the worker."""
    global _device  # noqa: PLW0603 - a card belongs to the process
    if _device is None:
        _device = importlib.import_module("valve_emulated.device").Device()
    return _device


def register() -> None:
    if "VALVE_EMU_DIR" not in os.environ:
        return
    from vllm.v1.worker import utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if isinstance(utils.torch, DeviceTorch):
        return
    utils.torch = DeviceTorch(utils.torch)
    for name in ("execute_model", "sample_tokens"):
        setattr(CPUModelRunner, name, as_kernel(getattr(CPUModelRunner, name)))


def as_kernel(function: Any) -> Any:
    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with device().step():
            return function(self, *args, **kwargs)

    return step


class DeviceTorch:
    """torch for one module of vLLM: the one allocation that it makes stands in device memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, **options: Any) -> Any:
        torch = self._torch
        if options.get("dtype") is not torch.int8 or len(size) != 1 or not isinstance(size[0], int):
            return torch.zeros(*size, **options)
        return torch.frombuffer(device().array(size[0]), dtype=torch.int8).zero_()
