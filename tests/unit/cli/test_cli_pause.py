"""The local brake: the file comes first, and whoever asks is told at once, whatever valved does."""

from __future__ import annotations

import socket

import pytest

from valved.cli import pause
from valved.cli.exits import CliError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(pause, "ANSWER_S", 0.2)
    return tmp_path


def test_a_pause_is_never_reported_as_failed_because_valved_hangs(folder, capsys):
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(folder / "valved.sock"))
        hung.listen()

        assert pause.pause(None) == 0

    assert (folder / "pause").exists()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"paused: the file {folder}/pause is there"
    assert "answer" in told[1]


def test_without_a_daemon_the_file_is_written_and_taken_away(folder, capsys):
    (folder / "drain").touch()

    assert pause.pause(None) == 0
    assert (folder / "pause").exists()
    assert pause.resume(None) == 0

    assert not list(folder.iterdir())
    assert capsys.readouterr().out.count("no valved answers") == 2


@pytest.mark.parametrize("act", [pause.pause, pause.resume])
def test_a_brake_that_cannot_be_moved_is_an_error_with_a_next_step_and_never_a_traceback(folder, act):
    (folder / "pause").mkdir()

    with pytest.raises(CliError) as caught:
        act(None)

    assert caught.value.next_step
