"""Finished tasks are kept, so that a stopped experiment goes on where it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from valve_tools.replay.store import TaskStore
from valve_tools.replay.work import Workers, silent, spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    number: int
    rows: np.ndarray
    diary: Path


def work(task: Task) -> int:
    with task.diary.open("a") as lines:
        lines.write(f"{task.number}\n")
    return int(task.rows.sum()) + task.number


def tasks(diary: Path, count: int = 3) -> list[Task]:
    return [Task(number=n, rows=np.arange(n + 3), diary=diary) for n in range(count)]


def test_a_second_run_works_only_on_what_is_new(tmp_path):
    diary, workers = tmp_path / "diary", Workers(store=TaskStore(folder=tmp_path / "kept"))
    first = spread(work, tasks(diary, 2), silent, workers)

    again = spread(work, tasks(diary, 3), silent, workers)

    assert first == again[:2]
    assert diary.read_text().split() == ["0", "1", "2"]


def test_another_content_is_another_task(tmp_path):
    diary, store = tmp_path / "diary", TaskStore(folder=tmp_path / "kept")
    one, other = tasks(diary)[0], Task(number=0, rows=np.array([7]), diary=diary)

    assert (store.run(work, one), store.run(work, other)) == (3, 7)


def test_a_damaged_file_is_worked_on_again(tmp_path):
    diary, store = tmp_path / "diary", TaskStore(folder=tmp_path / "kept")
    task = tasks(diary)[0]
    result = store.run(work, task)
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(b"half a file")

    assert store.run(work, task) == result
    assert len(diary.read_text().split()) == 2


def test_without_a_folder_nothing_is_kept(tmp_path):
    diary, store = tmp_path / "diary", TaskStore(folder=None)

    assert [store.run(work, task) for task in tasks(diary)[:1] * 2] == [3, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["diary"]
