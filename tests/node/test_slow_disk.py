"""What is left in the run folder as valved ends, and a disk that does not answer meanwhile."""

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

from valved.cli.tune import has_valved

StartOn = Callable[[str], tuple[EmulatedNode, "subprocess.Popen[bytes]", Path]]
DISK = """
#include <sys/syscall.h>
#include <unistd.h>
static void answer(void) {
	while (access(HANGS, F_OK) == 0)
		usleep(10000);
}
#ifdef FSYNC
int fsync(int fd) {
	answer();
	return (int)syscall(SYS_fsync, fd);
}
#else
int unlink(const char *path) {
	answer();
	return (int)syscall(SYS_unlink, path);
}
#endif
"""


@pytest.fixture
def start_on_disk(make_node: Callable[..., EmulatedNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartOn:
    """Starts a valved to which a call of the disk has no answer, from now on."""

    def start(call: str) -> tuple[EmulatedNode, subprocess.Popen[bytes], Path]:
        source, library, hangs = (tmp_path / name for name in ("disk.c", "disk.so", "hangs"))
        source.write_text(DISK)
        subprocess.run(["cc", "-shared", "-fPIC", f"-D{call}", f'-DHANGS="{hangs}"', source, "-o", library], check=True)
        node = make_node(start=False)
        plain = node.environment()
        with monkeypatch.context() as slow:
            slow.setattr(
                node, "environment", lambda: {**plain, "LD_PRELOAD": f"{plain.get('LD_PRELOAD', '')} {library}"}
            )
            valved = node.start_valved()
        hangs.touch()
        return node, valved, hangs

    return start


def open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def test_no_successor_ever_begins_while_its_predecessor_may_still_write_the_state(
    start_on_disk: StartOn,
) -> None:
    """It would put an older state over a newer one. What ends last in a process is what its threads do."""
    node, valved, hangs = start_on_disk("FSYNC")

    valved.send_signal(signal.SIGTERM)
    with (node.run_dir / "valved.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # at once when it is free
        assert not open_files(valved.pid)
    assert valved.wait(15) == 0
    hangs.unlink()

    node.start_valved()
    assert node.status().pid


def test_valved_never_stays_for_a_disk_that_removes_no_names(start_on_disk: StartOn) -> None:
    """Sockets go by their names as it ends. Whoever stands frozen, and the next valved, would wait for it."""
    node, valved, hangs = start_on_disk("UNLINK")

    valved.send_signal(signal.SIGTERM)
    assert valved.wait(15) == 0
    hangs.unlink()

    node.start_valved()
    assert node.status().pid


def test_a_valved_that_ended_in_good_order_is_never_taken_for_one_that_lives(
    make_node: Callable[..., EmulatedNode],
) -> None:
    node = make_node(config='view_group = "*"')
    assert has_valved(node.run_dir)

    assert node.stop_valved() == 0

    assert not has_valved(node.run_dir)
    assert not [path for path in node.run_dir.rglob("*") if path.is_socket() or path.name == "valved.pid"]
