"""Builds the lab's programs where it runs: gcc, and nvcc only for drivers without a PTX compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from valve_tools.gpu.errors import LabError

NATIVE = Path(__file__).resolve().parent / "native"
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra")
STRICT = ("-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Werror")
SHARED = ("-fPIC", "-shared")
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "guard": (("guard.c", "rm.c", "share.c"), ()),
    "probe": (("probe.c", "cycles.c", "rm.c", "share.c"), ("-lpthread",)),
    "spin": (("spin.c", "gpu.c", "beatpage.c", "vmm.c", "helper.c", "costs.c", "share.c"), ("-ldl", "-lpthread")),
    "libtrace.so": (("trace.c", "decode.c", "table.c", "serve.c", "rm.c", "share.c"), (*SHARED, "-ldl", "-lpthread")),
    "libstandin.so": (("standin.c",), SHARED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Where the built programs are."""

    folder: Path
    image: Path  # the workload's kernels
    cubin: Path | None = None

    def path(self, name: str) -> str:
        return os.fspath(self.folder / name)


def abi_folder() -> Path:
    """proto/abi beside the sources: in a checkout, or as installed with the package."""
    for folder in (NATIVE / "abi", NATIVE.parents[2] / "proto" / "abi"):
        if (folder / "nvrm.h").is_file():
            return folder
    raise LabError("proto/abi/nvrm.h is neither beside the installed package nor in the checkout")


def build(folder: Path, *, emulated: bool, strict: bool = False) -> Programs:
    """Compile everything into `folder`. Warnings end a strict build; elsewhere an unknown gcc may have new ones."""
    if not shutil.which("gcc"):
        raise LabError("gcc is not installed: apt-get install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in NATIVE.iterdir())
    for name, (sources, more) in PROGRAMS.items():
        made = folder / name
        if made.exists() and made.stat().st_mtime > newest:
            continue
        argv = ["gcc", *FLAGS, *(STRICT if strict else ()), f"-I{abi_folder()}", "-o", str(made)]
        done = subprocess.run(
            [*argv, *(str(NATIVE / source) for source in sources), *more], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LabError(f"gcc could not build {name}:\n{done.stderr[:4000]}")
    if emulated:
        image = folder / "standin.txt"
        image.write_text(f"// valve-emu\n// native {folder / 'libstandin.so'}\n")
        return Programs(folder=folder, image=image)
    return Programs(folder=folder, image=NATIVE / "kernels.ptx")


def cubin(folder: Path) -> Path | None:
    """The same kernels by nvcc for the card at hand, where there is nvcc: for a driver without a PTX compiler."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return None
    made = folder / "kernels.cubin"
    argv = [nvcc, "-cubin", "-arch=native", "-o", str(made), str(NATIVE / "kernels.cu")]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=120)
    return made if done.returncode == 0 and made.is_file() else None
