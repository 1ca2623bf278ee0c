"""The watchdog looks rarely while nothing is late: what it must see is seen in time all the same.

On virtual time: tests/native/looks.c lets it look when it wants to, and no sooner or later.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gates import compile_c


def built(repository: Path, out: Path, *flags: str) -> Path:
    """The program of this name, with the gate in it."""
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in (f"{out.name}.c", "fake_rm.c")]
    compile_c(out, native + ours, "-O1", "-g", *flags)
    return out


def run(program: Path, *arguments: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": ""}
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


@pytest.fixture(scope="module")
def looks(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("looks") / "looks"
    return built(repository, out, "-Wl,--wrap=clock_gettime", "-Wl,--wrap=syscall")


def test_a_stop_that_hangs_just_after_a_look_is_never_reported_later_than_it_was(looks: Path) -> None:
    run(looks, "hang")


def test_a_loop_that_falls_silent_just_after_a_look_never_lets_offline_work_run_longer(looks: Path) -> None:
    run(looks, "loop")


def test_the_heartbeat_never_falls_behind_because_nothing_else_is_to_be_watched(looks: Path) -> None:
    run(looks, "beat")


@pytest.mark.sanitizer
def test_a_doorbell_that_is_muted_while_the_watchdog_looks_is_never_deaf_for_ever(
    repository: Path, tmp_path: Path
) -> None:
    """tests/native/deaf.c keeps the listener half way through the muting until the watchdog has looked."""
    run(built(repository, tmp_path / "deaf", "-fsanitize=address,undefined", "-Wl,--wrap=epoll_ctl"))


def test_no_clock_that_jumps_makes_the_gate_give_up_a_thread_that_ends(repository: Path, tmp_path: Path) -> None:
    run(built(repository, tmp_path / "leave", "-Wl,--wrap=clock_gettime", "-Wl,--wrap=usleep"))
