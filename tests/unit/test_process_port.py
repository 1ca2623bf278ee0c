"""Who a process is: from a /proc of our own making, and from the real one where a real process is the point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from valved.machine.processes import LinuxProcesses


def world(root: Path, **processes: tuple[str, int, int, str]) -> LinuxProcesses:
    """A /proc: pN = (name, parent, start time, state)."""
    for key, (name, parent, start, state) in processes.items():
        folder = root / key[1:]
        folder.mkdir()
        between = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{key[1:]} ({name}) {state} {parent} {between} {start} 0 0\n")
        (folder / "comm").write_text(name + "\n")
    return LinuxProcesses(root)


def test_start_time_survives_a_name_with_blanks_and_brackets(tmp_path: Path) -> None:
    processes = world(tmp_path, p5=("a) S 1 (b", 1, 777, "S"))

    assert processes.start_time(5) == 777


def test_a_process_that_is_gone_has_no_start_time_and_no_name(tmp_path: Path) -> None:
    processes = world(tmp_path)

    assert processes.start_time(5) is None
    assert processes.comm(5) == ""
    assert processes.cgroup(5) is None
    assert list(processes.ancestors(5)) == []


def test_a_zombie_counts_as_gone(tmp_path: Path) -> None:
    assert world(tmp_path, p5=("x", 1, 777, "Z")).start_time(5) is None


def test_ancestors_lead_up_to_one(tmp_path: Path) -> None:
    processes = world(tmp_path, p1=("init", 0, 1, "S"), p5=("sh", 1, 5, "S"), p9=("vllm", 5, 9, "S"))

    assert list(processes.ancestors(9)) == [9, 5, 1]


def test_ancestors_of_a_torn_tree_end(tmp_path: Path) -> None:
    processes = world(tmp_path, p5=("a", 9, 5, "S"), p9=("b", 5, 9, "S"))

    assert len(processes.ancestors(9)) <= 64


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/kubepods/pod1/c\n", "/kubepods/pod1/c"),
        ("3:cpu:/old\n0::/new\n", "/new"),
        ("3:cpu:/\n2:pids:/kubepods/pod1/c\n0::/\n", "/kubepods/pod1/c"),
        ("3:cpu:/\n0::/\n", "/"),
        ("3:cpu:/old:odd\n", "/old:odd"),
        ("nonsense\n", None),
    ],
)
def test_cgroup_is_the_unified_path_where_there_is_one(tmp_path: Path, text: str, path: str | None) -> None:
    processes = world(tmp_path, p5=("a", 1, 5, "S"))
    (tmp_path / "5/cgroup").write_text(text)

    assert processes.cgroup(5) == path


def test_a_real_process_is_known_until_it_is_killed() -> None:
    processes = LinuxProcesses()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = processes.open_pidfd(child.pid)

    assert processes.start_time(child.pid) is not None
    assert processes.ancestors(child.pid)[:2] == [child.pid, os.getpid()]

    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    child.communicate()

    assert processes.start_time(child.pid) is None
    assert processes.open_pidfd(child.pid) == -1
    os.close(pidfd)
