"""Clients whose files are dear to ring and to close, with real threads: tests/native/greedy.c."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gates import compile_c

WRAPPED = ("syscall", "close", "dup3", "epoll_ctl", "clock_gettime")
FLAGS = ["-fsanitize=thread", "-O1", "-g"]


@pytest.mark.sanitizer
def test_what_a_client_makes_of_its_files_never_delays_a_stop_or_another_ones_order_or_the_loop(
    repository: Path, tmp_path: Path
) -> None:
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in ("greedy.c", "fake_rm.c")]
    compile_c(tmp_path / "greedy", native + ours, *FLAGS, *(f"-Wl,--wrap={name}" for name in WRAPPED))
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "LD_PRELOAD": ""}

    done = subprocess.run([tmp_path / "greedy"], capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
