"""valved says at its start that it may have fewer tasks than it needs."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from valved.machine import tasks
from valved.machine.tasks import LEAST_LEFT, few_tasks


@pytest.mark.parametrize(
    ("line", "group", "most", "is_told"),
    [
        ("0::/kube/valved\n", "kube/valved", 24 + LEAST_LEFT - 1, True),
        ("0::/kube/valved\n", "kube", 24 + LEAST_LEFT - 1, True),
        ("0::/\n", "", 24, True),
        ("5:pids:/kube/valved\n0::/\n", "pids/kube", 30, True),
        ("0::/kube/valved\n", "kube/valved", 24 + LEAST_LEFT, False),
        ("0::/kube/valved\n", "kube/valved", "max", False),
        ("0::/../other\n", "none", 24, False),
    ],
)
def test_a_want_of_tasks_is_never_told_by_the_end_of_valved_alone(
    tmp_path: Path, line: str, group: str, most: int | str, is_told: bool
) -> None:
    mine, root = tmp_path / "mine", tmp_path / "root"
    mine.write_text(line)
    (root / group).mkdir(parents=True)
    (root / group / "pids.max").write_text(f"{most}\n")
    (root / group / "pids.current").write_text("24\n")

    assert bool(few_tasks(mine, root)) is is_told


@pytest.mark.parametrize("name", [b"\xff", b"a\x0bb", "a\N{LINE SEPARATOR}b".encode()])
def test_the_name_of_a_control_group_never_keeps_valved_from_starting(tmp_path: Path, name: bytes) -> None:
    mine, root = tmp_path / "mine", tmp_path / "root"
    mine.write_bytes(b"0::/" + name + b"\n")
    group = root / os.fsdecode(name)
    group.mkdir(parents=True)
    (group / "pids.max").write_text("24\n")
    (group / "pids.current").write_text("24\n")

    assert few_tasks(mine, root)


def test_a_machine_without_control_groups_is_never_said_to_lack_tasks(tmp_path: Path) -> None:
    assert not few_tasks(tmp_path / "mine", tmp_path)
    (tmp_path / "mine").touch()
    assert not few_tasks(tmp_path / "mine", tmp_path)


@pytest.mark.parametrize(
    ("is_root", "most", "is_told"),
    [
        (False, 3 + LEAST_LEFT - 1, True),
        (False, 3 + LEAST_LEFT, False),
        (False, resource.RLIM_INFINITY, False),
        (True, 3, False),
    ],
)
def test_a_user_who_may_have_no_more_tasks_is_never_told_by_the_end_of_valved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_root: bool, most: int, is_told: bool
) -> None:
    """Root's have no such limit. Each thread counts."""
    for task in ("10/task/10", "10/task/11", "20/task/20", "self/task/10"):
        (tmp_path / task).mkdir(parents=True)
    mine = os.getuid() or 4711
    monkeypatch.setattr(tasks.os, "geteuid", lambda: 0 if is_root else mine)
    monkeypatch.setattr(tasks.resource, "getrlimit", lambda _: (most, most))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda path: SimpleNamespace(st_nlink=2 + len(os.listdir(path)), st_uid=mine))
        told = few_tasks(tmp_path / "none", tmp_path, tmp_path)

    assert ("ulimit -u" in told) is is_told
