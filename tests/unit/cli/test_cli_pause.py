"""The local brake: the file comes first, and whoever asks is told at once, whatever valved does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from types import SimpleNamespace

import pytest
from valve.v1 import node_pb2

from valved.cli import pause, policy
from valved.cli.exits import FAILED, CliError
from valved.errors import cure


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


def test_a_resume_that_fails_never_names_another_file_than_the_one_that_stays(folder):
    (folder / "pause").touch()
    (folder / "drain").mkdir()

    with pytest.raises(CliError, match=f"^{folder}/drain: "):
        pause.resume(None)


def test_a_pause_never_waits_for_the_other_end_of_a_pipe(folder):
    """valved takes whatever stands at that name for an order: it is paused already."""
    os.mkfifo(folder / "pause")

    with pytest.raises(CliError) as caught:
        pause.pause(None)

    assert caught.value.next_step


def answering(monkeypatch, module, lost, *, is_paused=True):
    """A valved that does what it is told, and could not write this file."""
    status = node_pb2.Status(mode=node_pb2.MODE_OBSERVE, paused=is_paused, paused_by="alice" if is_paused else "")
    status.unwritten.add(path=str(lost), error="Read-only file system", loss="the order holds until valved ends")
    connection = SimpleNamespace(
        stub=SimpleNamespace(Pause=None, Resume=None, SetPolicy=None),
        call=lambda *_, **__: status,
        status=lambda: status,
    )
    monkeypatch.setattr(module, "node", lambda: contextlib.nullcontext(connection))


def test_a_pause_that_no_file_takes_is_never_refused_nor_called_done(folder, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pause, "open_at_once", refuse)
    answering(monkeypatch, pause, folder / "pause")

    with pytest.raises(CliError, match="only until valved ends") as caught:
        pause.pause(None)

    assert caught.value.code == FAILED
    assert "paused by alice" in capsys.readouterr().out


def test_a_pause_that_was_taken_back_before_its_answer_is_never_a_success(folder, monkeypatch, capsys):
    answering(monkeypatch, pause, folder / "state.json", is_paused=False)

    with pytest.raises(CliError, match="resumed this node") as caught:
        pause.pause(None)

    assert caught.value.code == FAILED
    assert "mode: observe\n" in capsys.readouterr().out


def test_a_resume_after_which_the_node_is_paused_is_never_a_success(folder, monkeypatch, capsys):
    answering(monkeypatch, pause, folder / "state.json")

    with pytest.raises(CliError, match="this node is paused") as caught:
        pause.resume(None)

    assert caught.value.code == FAILED
    assert "paused by alice" in capsys.readouterr().out


def test_a_mode_that_a_restart_forgets_is_never_a_success(folder, monkeypatch, capsys):
    answering(monkeypatch, policy, folder / "state.json")

    with pytest.raises(CliError, match="the mode is observe, but only until valved ends") as caught:
        policy.mode(SimpleNamespace(mode="observe"))

    assert caught.value.code == FAILED
    assert "mode: observe" in capsys.readouterr().out
    assert policy.mode(SimpleNamespace(mode=None)) == 0  # who only asks was promised nothing


def test_a_disk_in_trouble_is_never_called_a_question_of_permission():
    assert "make room" in cure(OSError(errno.ENOSPC, "No space left on device"), "use sudo")
    assert "kernel log" in cure(OSError(errno.EROFS, "Read-only file system"), "use sudo")
    assert cure(PermissionError(errno.EACCES, "Permission denied"), "use sudo") == "use sudo"
