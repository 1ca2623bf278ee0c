"""Channels that the state file does not name yet."""

from __future__ import annotations

import os

from node_world import FakePrompt

from valved.machine.helpers import Prompt
from valved.state.saved import SavedChannel, SavedClient
from valved.state.unsaved import Unsaved


def client(pid: int) -> SavedClient:
    return SavedClient(pid=pid, start_time=1, role=2, service=1, channels=[SavedChannel(0, 1, 2, 3, 4, 5, True)])


def test_a_line_that_a_full_disk_cut_short_never_takes_the_next_one_with_it(tmp_path, monkeypatch):
    unsaved = Unsaved(tmp_path / "unsaved.jsonl", "now", FakePrompt())
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, line: write(fd, line[: len(line) // 2]))
        unsaved.put(client(300))

    unsaved.put(client(301))
    unsaved.put(client(302))

    assert [one.pid for one in unsaved.read(with_older=False)] == [301, 302]


def test_no_file_waits_behind_a_pipe_that_nobody_reads(tmp_path):
    """Orders and the look at the run folder take the same way, one after another."""
    os.mkfifo(tmp_path / "unsaved.jsonl")
    prompt = Prompt()

    Unsaved(tmp_path / "unsaved.jsonl", "now", prompt).put(client(300))

    assert prompt._last.wait(100)
