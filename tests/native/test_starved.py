"""Whatever call for a descriptor or a thread fails in the gate, nothing stays open: tests/native/starve.c."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from gates import compile_c

WRAPPED = ("epoll_create1", "epoll_ctl", "eventfd", "timerfd_create", "memfd_create", "dup3", "pthread_create")
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]


@pytest.mark.sanitizer
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_no_call_that_fails_leaves_a_descriptor_of_the_gate_open_or_lets_go_of_one_that_is_in_use(
    repository: Path, tmp_path: Path, number: int
) -> None:
    """The first call fails in the first round, the second in the second. A leak of memory ends it, too."""
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in ("starve.c", "fake_rm.c")]
    compile_c(tmp_path / "starve", native + ours, *FLAGS, *(f"-Wl,--wrap={name}" for name in WRAPPED))
    environment = {**os.environ, "LD_PRELOAD": ""}

    command = [tmp_path / "starve", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
