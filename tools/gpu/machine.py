"""The machine under test: a real one, or the emulated node of a dry run. What the experiments need to know of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from valve_tools.gpu import leash
from valve_tools.gpu.errors import LabError

if TYPE_CHECKING:
    from valve_tools.emulator.client import Emulator

VERSION = Path("/proc/driver/nvidia/version")


class Machine(Protocol):
    """Everything that differs between a card and its stand-in."""

    is_dry: bool
    gpu: str
    driver: str

    def environment(self) -> dict[str, str]: ...
    def kernel_log(self) -> str | None: ...
    def used_mib(self) -> float | None: ...
    def facts(self) -> Mapping[str, str]: ...


def branch_of(driver: str) -> int:
    head = driver.split(".", maxsplit=1)[0]
    return int(head) if head.isdigit() else 0


def commit() -> str:
    """The commit of the checkout this file stands in, or "installed"."""
    folder = Path(__file__).resolve().parent
    argv = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "installed"


def _run(*argv: str) -> str:
    """What a command prints; "" where it is missing or fails."""
    if not shutil.which(argv[0]):
        return ""
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def host() -> dict[str, str]:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"host": f"{model}, {os.cpu_count()} cores", "kernel": platform.release(), "uid": str(os.getuid())}


class RealMachine:
    """The card of this machine. Looks, and changes nothing."""

    is_dry = False

    def __init__(self) -> None:
        if "libfakenv" in os.environ.get("LD_PRELOAD", ""):
            raise LabError(
                "this shell is on the emulated GPU, and nothing found there may look like a card's: --dry-run"
            )
        if not Path("/dev/nvidiactl").exists():
            raise LabError(
                "no NVIDIA GPU here (/dev/nvidiactl is missing).\n"
                "Rehearse everything on the emulated GPU instead: valve gpu-lab --dry-run"
                "  (from a checkout: make gpu GPU_ARGS=--dry-run)"
            )
        text = VERSION.read_text(encoding="utf-8") if VERSION.exists() else ""
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
        self.driver = found[1] if found else _smi("driver_version") or "unknown"
        self.is_open = "Open Kernel Module" in text
        self.gpu = _smi("name") or "unknown"

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def kernel_log(self) -> str | None:
        return _run("dmesg") or None

    def used_mib(self) -> float | None:
        text = _smi("memory.used")
        return float(text) if text.replace(".", "").isdigit() else None

    def facts(self) -> Mapping[str, str]:
        query = _run("nvidia-smi", "-q")

        def said(name: str) -> str:
            match = re.search(rf"^\s*{name}\s*:\s*(.+)$", query, re.MULTILINE)
            return match[1].strip() if match else "?"

        mig = re.search(r"MIG Mode\s*\n\s*Current\s*:\s*(\S+)", query)
        return {
            **host(),
            "gpu": self.gpu,
            "driver": f"{self.driver} ({'open kernel modules' if self.is_open else 'not the open kernel modules'})",
            "gsp firmware": said("GSP Firmware Version"),
            "cuda": said("CUDA Version"),
            "compute mode": said("Compute Mode"),
            "persistence": said("Persistence Mode"),
            "mig": mig[1] if mig else "?",
            "nodes": " ".join(sorted(path.name for path in Path("/dev").glob("nvidia*"))),
            "kernel log": "readable" if self.kernel_log() else "not readable: Xids show only as CUDA errors",
            "nvcc": (_run("nvcc", "--version").strip().splitlines() or ["not installed"])[-1],
        }


def _smi(field: str) -> str:
    lines = _run("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits").splitlines()
    return lines[0].strip() if lines else ""


class EmulatedMachine(AbstractContextManager["EmulatedMachine"]):
    """The emulated node: one of our own, or the running one that VALVE_EMU_DIR names."""

    is_dry = True

    def __init__(self, folder: Path) -> None:
        known = os.environ.get("VALVE_EMU_DIR")
        self._folder = Path(known) if known else folder / "emu"
        self._stack = ExitStack()
        self._emulator: Emulator | None = None
        self.gpu = "emulated H100"
        self.driver = "unknown"

    def __enter__(self) -> EmulatedMachine:
        try:
            from valve_tools.emulator import node
            from valve_tools.emulator.client import Emulator
        except ImportError as error:
            raise LabError(f"a dry run needs the emulated GPU, which is not installed ({error}): make build") from None
        if not (node.LIBRARIES / "valve-emu-server").exists():
            raise LabError("a dry run needs the emulated GPU, which is not built here: make build, then valve gpu-lab")
        if "VALVE_EMU_DIR" not in os.environ:
            server = node.start(self._folder, node.Options())
            self._stack.callback(node.stop, server)
            self._stack.callback(leash.tie(self._folder, [server.pid]))
        self._emulator = self._stack.enter_context(Emulator(self._folder))
        self.driver = str(self._emulator.knobs().get("driver", "580.159.04"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self) -> dict[str, str]:
        from valve_tools.emulator.node import environment

        return environment(self._folder, os.environ)

    def kernel_log(self) -> str | None:
        assert self._emulator is not None, "enter the machine first"
        return self._emulator.kernel_log()

    def used_mib(self) -> float | None:
        assert self._emulator is not None, "enter the machine first"
        return self._emulator.state().used_bytes() / (1 << 20)

    def facts(self) -> Mapping[str, str]:
        return {**host(), "gpu": self.gpu, "driver": f"{self.driver} (emulated)", "kernel log": "readable"}
