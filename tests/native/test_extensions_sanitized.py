"""The C of each cffi extension under the address and undefined sanitizers: its own property tests, run against it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ABI = "proto/abi"
EXTENSIONS = {  # room, folder of header and source, writer of the binding, property tests
    "booking": ("native", "valved/native/books", "valved/native/build.py", "test_booking_twins.py"),
    "cells": ("cells", "valved/cells", "valved/policy/build.py", "test_cells.py"),
    "greedy": ("policy", "valved/policy", "valved/policy/build.py", "test_policy_eviction.py"),
}
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-std=gnu11", "-w"]
RUN = """
import sys, importlib.util as util
_, name, path, *more = sys.argv
spec = util.spec_from_file_location(name, path)
module = sys.modules[name] = util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.path.remove("")  # the checkout
if more[0] == "overrun":
    room = module.ffi.new("int64_t[]", 4)
    module.lib.valve_columns_fit(room, 4, room, 5, 9, room)
import pytest
code = pytest.main(more)
assert sys.modules[name] is module
raise SystemExit(code)
"""


def build(repository: Path, folder: Path, name: str) -> Path:
    _, source, writer, _ = EXTENSIONS[name]
    binding, out = folder / f"_{name}.c", folder / f"_{name}.so"
    write = [sys.executable, repository / writer, repository / source / f"{name}.h", binding]
    subprocess.run(write, check=True, capture_output=True)
    places = (sysconfig.get_paths()["include"], *(repository / one for one in (source, "valved/native", ABI)))
    compiler = ["cc", "-shared", "-fPIC", *FLAGS, *(f"-I{place}" for place in places)]
    subprocess.run([*compiler, binding, repository / source / f"{name}.c", "-o", out, "-lm"], check=True)
    return out


def run(repository: Path, library: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Memory of Python's own allocator would have no red zones."""
    name = library.stem.removeprefix("_")
    first = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0"}
    environment["LD_PRELOAD"] = first.stdout.strip()
    command = [sys.executable, "-c", RUN, f"valved.{EXTENSIONS[name][0]}._{name}", str(library), *more]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", EXTENSIONS)
def test_no_extension_reads_or_writes_outside_of_what_it_was_given(repository: Path, tmp_path: Path, name: str) -> None:
    tests = f"tests/property/{EXTENSIONS[name][3]}"

    done = run(repository, build(repository, tmp_path, name), "-q", "-p", "no:cacheprovider", tests)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.sanitizer
def test_an_overrun_of_one_number_never_passes_here(repository: Path, tmp_path: Path) -> None:
    done = run(repository, build(repository, tmp_path, "cells"), "overrun")

    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


def test_no_extension_is_left_out(repository: Path) -> None:
    """The gate's is run by race.c (test_gate_sanitized.py)."""
    made = {
        name
        for path in (repository / "valved").rglob("meson.build")
        for name in re.findall(r"extension_module\(\s*'_(\w+)'", path.read_text())
    }

    assert made == EXTENSIONS.keys() | {"gate"}
