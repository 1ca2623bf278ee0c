"""The shim's C under sanitizers: the ioctl parser on any bytes, and its threads against each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RM = ("rm", "rmcall", "rmcontrol")
THREADS = ("activity", "contexts", "hint", "lock", "region", "say", "watcher")


def build(repository, out, source, parts, *flags):
    sources = [repository / source, *(repository / "shim/src" / f"{part}.c" for part in parts)]
    include = [f"-I{repository}/proto/abi", f"-I{repository}/shim/src"]
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-U_FILE_OFFSET_BITS", "-U_FORTIFY_SOURCE", "-O1", "-g", "-Wall"]
    subprocess.run([*command, *include, *flags, *sources, "-o", out], check=True)
    return out


@pytest.fixture(scope="session")
def parser(tmp_path_factory, repository):
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_capture"
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return build(repository, out, "tests/fuzz/fuzz_capture.c", RM, *flags)


@pytest.mark.sanitizer
@pytest.mark.parametrize("seed", [1, 20260, 777777])
def test_the_ioctl_parser_survives_any_bytes(parser, seed):
    done = subprocess.run([parser, "-r", "20000", str(seed)], capture_output=True, text=True, timeout=100, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 inputs\n", "")


@pytest.mark.sanitizer
def test_the_ioctl_parser_survives_odd_lengths(parser, tmp_path):
    inputs = []
    for length in (0, 1, 71, 72, 73, 4095, 4096, 9000):
        inputs.append(tmp_path / str(length))
        inputs[-1].write_bytes(bytes(i * 37 % 256 for i in range(length)))

    done = subprocess.run([parser, *inputs], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "8 inputs\n", "")


@pytest.mark.sanitizer
def test_launches_the_watcher_and_the_gate_do_not_race(repository, tmp_path):
    program = build(repository, tmp_path / "races", "tests/shim/c/races.c", THREADS, "-fsanitize=thread", "-lpthread")

    done = subprocess.run([program, "200"], capture_output=True, text=True, timeout=100, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "every launch was counted, every open gate heard, idleness was never claimed too early\n"


def has_libfuzzer() -> bool:
    """clang and its fuzzer runtime: distributions package them apart."""
    if not shutil.which("clang"):
        return False
    asked = ["clang", "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()


@pytest.mark.sanitizer
@pytest.mark.skipif(not has_libfuzzer(), reason="no libFuzzer: apt-get install clang libclang-rt-14-dev")
def test_coverage_guided_inputs_do_not_break_the_ioctl_parser(repository, tmp_path):
    """The same entry point under libFuzzer; `make fuzz` runs it for millions of inputs."""
    out, corpus = tmp_path / "fuzzer", tmp_path / "corpus"
    corpus.mkdir()
    sources = [repository / "tests/fuzz/fuzz_capture.c", *(repository / "shim/src" / f"{part}.c" for part in RM)]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-DFUZZER", "-O1", "-g", f"-I{repository}/proto/abi"]
    flags += [f"-I{repository}/shim/src", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["clang", *flags, *sources, "-o", out], check=True)

    done = subprocess.run(
        [out, "-runs=300000", "-seed=1", "-max_len=9000", corpus],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 300000 runs" in done.stderr
