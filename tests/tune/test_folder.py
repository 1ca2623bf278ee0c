"""The folder of a job: what a kill or a full disk leaves there, and what its reader is told."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import jobs
import pytest
from valve_tune.serve import folder as module
from valve_tune.serve import registry
from valve_tune.serve.folder import GO, JobFolder, replace_file
from valve_tune.train import checkpoint
from valve_tune.train.job import said

FULL = Path("/dev/full")


def by_forced_write(path: Path) -> None:
    path.with_name(f".writing-{path.name}").symlink_to(FULL)
    checkpoint.write_file(path, b"content")


def by_replacing(path: Path) -> None:
    path.with_name(f".{path.name}.new").symlink_to(FULL)
    replace_file(path, "content")


def by_a_wish(path: Path) -> None:
    path.symlink_to(FULL)
    JobFolder(path.parent).want(GO)


@pytest.mark.parametrize("write", [by_forced_write, by_replacing, by_a_wish])
def test_a_full_disk_is_never_told_without_the_file(write, tmp_path):
    """`valve tune: [Errno 28] No space left on device`: a failed write names no file, and disks may be several."""
    with pytest.raises(OSError, match="No space left") as failed:
        write(tmp_path / module.WANTED)
    assert failed.value.errno == errno.ENOSPC
    assert said(failed.value, "out").startswith(f"disk full: {tmp_path}/")


def test_kills_never_fill_the_folder_with_what_they_cut_short(tmp_path, monkeypatch):
    """Each left a file of its own beside the one that it wrote, which is written once a second."""
    monkeypatch.setattr(module.os, "fsync", lambda _: jobs.kill())
    for _ in range(5):
        assert os.WTERMSIG(jobs.in_child(lambda: JobFolder(tmp_path).say("running", 1))) == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    JobFolder(tmp_path).say("running", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert JobFolder(tmp_path).status().step == 2


def test_a_list_of_jobs_never_takes_away_what_another_command_is_writing(tmp_path, monkeypatch):
    """It took the half-written file for a job that is gone, and `valve tune run` ended in an error."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    forced = os.fsync

    def looked(descriptor: int) -> None:
        assert registry.known() == []
        forced(descriptor)

    monkeypatch.setattr(module.os, "fsync", looked)
    registry.remember(JobFolder(tmp_path / "mine"))
    assert [path.read_text() for path in registry.home().iterdir()] == [f"{tmp_path / 'mine'}\n"]
