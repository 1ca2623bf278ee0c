"""A CPU build of vLLM lives on the emulated card: its model step is a kernel, its KV cache is device memory.

Loaded by vLLM itself (entry point `vllm.general_plugins`, see mount.py), in the engine's environment, beside Valve's
own plugin; the two know nothing of each other. Where vLLM would allocate the cache with torch.zeros, cuMemAlloc is
called, so the shim in front sees what it would see of a GPU build. Standard library, torch and vLLM only.

VALVE_EMU_STEP_US="20000,200" says how long a step lasts: so many microseconds, and so many more for each token. A tiny
model then has the latency of a large one, made of the card's time and not of this machine's processors.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

ENV_STEP = "VALVE_EMU_STEP_US"
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
    base, _, each = os.environ.get(ENV_STEP, "0,0").partition(",")
    CPUModelRunner.execute_model = as_kernel(CPUModelRunner.execute_model, int(base), int(each))
    CPUModelRunner.sample_tokens = as_kernel(CPUModelRunner.sample_tokens, 0, 0)


def as_kernel(function: Any, base_us: int, token_us: int) -> Any:
    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = getattr(args[0], "total_num_scheduled_tokens", 0) if args else 0
        with device().step(base_us + tokens * token_us if tokens else 0):
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
