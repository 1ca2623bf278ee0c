"""A disk that does not answer while valved ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from valve_tools.demo.node import EmulatedNode

DISK = """
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int fd) {
	while (access(HANGS, F_OK) == 0)
		usleep(10000);
	return (int)syscall(SYS_fsync, fd);
}
"""


def disk_that_hangs(folder: Path, while_it_is_there: Path) -> Path:
    source, library = folder / "disk.c", folder / "disk.so"
    source.write_text(DISK)
    subprocess.run(["cc", "-shared", "-fPIC", f'-DHANGS="{while_it_is_there}"', source, "-o", library], check=True)
    return library


def open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def test_no_successor_ever_begins_while_its_predecessor_may_still_write_the_state(
    make_node: Callable[..., EmulatedNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would put an older state over a newer one. What ends last in a process is what its threads do."""
    hangs = tmp_path / "hangs"
    library = disk_that_hangs(tmp_path, hangs)
    node = make_node(start=False)
    plain = node.environment()
    with monkeypatch.context() as slow:
        slow.setattr(node, "environment", lambda: {**plain, "LD_PRELOAD": f"{plain.get('LD_PRELOAD', '')} {library}"})
        valved = node.start_valved()
    hangs.touch()

    valved.send_signal(signal.SIGTERM)
    with (node.run_dir / "valved.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # at once when it is free
        assert not open_files(valved.pid)
    assert valved.wait(100) == 0
    hangs.unlink()

    node.start_valved()
    assert node.status().pid
