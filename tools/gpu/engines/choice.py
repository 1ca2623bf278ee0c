"""Which engine stands on the GPU: `torch` on a card, `demo` (tools/demo) on the emulated one, with the same output."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from valve_tools.gpu.errors import LabError
from valve_tools.gpu.rig import Rig

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrograms:
    """Command lines of one engine's two programs."""

    name: str
    online: Callable[[float], list[str]]  # seconds of arrivals
    offline: Callable[[], list[str]]  # until told to stop; takes --units, --duration and --report


def python_with_torch() -> str:
    """An interpreter that has PyTorch: VALVE_LAB_PYTHON, ours, or python3."""
    candidates = [os.environ.get("VALVE_LAB_PYTHON", ""), sys.executable, shutil.which("python3") or ""]
    for each in filter(None, candidates):
        done = subprocess.run([each, "-c", "import torch; torch.cuda.init()"], capture_output=True, check=False)
        if done.returncode == 0:
            return each
    raise LabError("no python with PyTorch and a GPU: name one in VALVE_LAB_PYTHON")


def torch_engine(folder: Path, shape: str) -> EnginePrograms:
    python = python_with_torch()
    digests = str(folder / f"digests-{shape}.json")
    return EnginePrograms(
        name=f"torch {shape}",
        online=lambda seconds: [python, str(HERE / "torch_online.py"), "--shape", shape, "--duration", f"{seconds:g}"],
        offline=lambda: [python, str(HERE / "torch_offline.py"), "--shape", shape, "--digests", digests],
    )


def demo_engine() -> EnginePrograms:
    from valve_tools.demo.rounds import OFFLINE, ONLINE, UNIT_US

    online = [str(ONLINE), "--rate", "3", "--out-tokens", "8", "--in-tokens", "100"]
    return EnginePrograms(
        name="demo",
        online=lambda seconds: [*online, "--duration", f"{seconds:g}"],
        offline=lambda: [str(OFFLINE), "--unit-us", str(UNIT_US)],
    )


def engine_of(rig: Rig) -> EnginePrograms:
    """The engine for this machine; VALVE_LAB_SHAPE chooses 1b, 3b or 8b on a card."""
    if rig.machine.is_dry:
        return demo_engine()
    return torch_engine(rig.folder, os.environ.get("VALVE_LAB_SHAPE", "1b"))


def need_product() -> None:
    """The product itself must be importable, with its dependencies: the lab alone is not enough here."""
    missing = [name for name in ("valved", "valve", "cffi", "grpc", "msgspec") if not importlib.util.find_spec(name)]
    if missing:
        raise LabError(
            f"not installed for {sys.executable}: {', '.join(missing)}. These experiments run the product: install its "
            "wheel and dependencies first (docs/hardware.md), then run the lab with that interpreter"
        )
