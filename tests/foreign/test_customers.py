"""Other people's code over the driver API runs on the emulated GPU, alike with and without the shim in front.

pip install .[foreign] brings the packages; without them these tests say so and are skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from emulated import child_env
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, node

PROGRAMS = Path(__file__).with_name("programs")
CARD = "NVIDIA H100 80GB HBM3 (emulated)"
DEADLINE_S = 200  # only ends a hung test

pytestmark = pytest.mark.foreign


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def need(module: str, package: str) -> None:
    if not is_installed(module):
        pytest.skip(f"{package} is not installed (pip install .[foreign])")


def shim() -> Path | None:
    spec = importlib.util.find_spec("valved")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()
    library = folder / "lib" / "libvalve.so"
    return library if library.exists() else None


def run(emulator: Emulator, program: str, arguments: Sequence[str] = (), preload: str = "") -> dict[str, Any]:
    env = child_env(emulator.directory, env={"LD_PRELOAD": preload, "PYTHONWARNINGS": "ignore"})
    done = subprocess.run(
        [sys.executable, os.fspath(PROGRAMS / program), *arguments],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def with_and_without_shim(program: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """What the program saw; it must see the same behind the preload, which finds no daemon and passes all through."""
    with node(Options(gpus=2, gpu_bytes=1 << 30, knobs=NO_LATENCY)) as emulator:
        plain = run(emulator, program, arguments)
        library = shim()
        if library is not None:
            assert run(emulator, program, arguments, preload=os.fspath(library)) == plain
        return plain


def test_cuda_bindings_sees_a_card_that_works() -> None:
    need("cuda.bindings", "cuda-bindings")
    seen = with_and_without_shim("bindings.py")

    assert seen == {"name": CARD, "version": 13000, "copied": True, "filled": [6, 5, 5], "shared": True}


def test_cuda_core_runs_streams_pools_kernels_and_graphs() -> None:
    need("cuda.core", "cuda-core")
    seen = with_and_without_shim("core.py")

    assert seen == {"name": CARD, "capability": [9, 0], "sms": 132, "event": True, "graph": True}


def test_numba_moves_arrays_and_launches_what_it_compiled() -> None:
    need("numba_cuda", "numba-cuda")
    compiles = ["compile"] if is_installed("nvidia.cu13") and _has_nvvm() else []
    seen = with_and_without_shim("numba_arrays.py", compiles)

    assert seen.pop("unchanged", True)
    assert seen == {"name": CARD, "cards": 2, "copied": True, "event": True, "memory": True}


def _has_nvvm() -> bool:
    spec = importlib.util.find_spec("nvidia.cu13")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(list(Path(folder).rglob("libnvvm.so*")) for folder in folders)
