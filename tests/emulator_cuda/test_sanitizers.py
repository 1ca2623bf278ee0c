"""The stand-in libcuda under gcc's sanitizers, with four threads that do everything at once (exercise.c)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from valve_tools.emulator.node import NO_LATENCY, Options, environment, node

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "tools" / "emulator" / "cuda"
PARTS = ("", "graphs", "kernels", "memory")
INCLUDES = [f"-I{folder}" for folder in (ROOT / "proto" / "abi", ROOM.parent, *(ROOM / part for part in PARTS))]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-fno-omit-frame-pointer", *INCLUDES]
DEADLINE_S = 200  # only ends a hung test


def runtime(name: str) -> str:
    """The sanitizer's own library, which must be the first that is loaded."""
    found = subprocess.run(
        ["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{name} is not installed")
    return os.path.realpath(found)


def build(folder: Path, sanitizer: str) -> Path:
    library, program = folder / "libcuda.so.1", folder / "exercise"
    own = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    sources = [os.fspath(path) for path in sorted(ROOM.rglob("*.c"))]
    compiler = ["cc", *FLAGS, f"-fsanitize={sanitizer}"]
    subprocess.run([*compiler, *own, *sources, "-o", library, "-lpthread", "-ldl"], check=True)
    main = os.fspath(Path(__file__).with_name("exercise.c"))
    subprocess.run([*compiler, main, library, "-o", program, "-lpthread"], check=True)
    return program


@pytest.mark.sanitizer
@pytest.mark.parametrize(("sanitizer", "library"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")])
def test_threads_that_do_everything_at_once_run_clean(tmp_path: Path, sanitizer: str, library: str) -> None:
    first = runtime(library)
    program = build(tmp_path, sanitizer)
    with node(Options(gpu_bytes=1 << 30, knobs=NO_LATENCY)) as emulator:
        env = environment(emulator.directory, {**os.environ, "LD_PRELOAD": first})
        env |= {"LD_LIBRARY_PATH": os.fspath(tmp_path), "UBSAN_OPTIONS": "halt_on_error=1"}
        env |= {f"{name}_OPTIONS": "handle_segv=0:handle_sigbus=0:exitcode=66" for name in ("ASAN", "TSAN")}
        done = subprocess.run([program], env=env, check=False, capture_output=True, text=True, timeout=DEADLINE_S)

    assert (done.returncode, done.stderr) == (0, "")
