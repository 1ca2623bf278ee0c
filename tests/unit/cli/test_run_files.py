"""What valved and the commands write in the run folder: for whom, through what, and how much of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import msgspec
import pytest

from valved import paths
from valved.cli import up
from valved.cli.exits import CliError
from valved.cli.run import offline
from valved.model.consent import SILENT
from valved.model.events import Event, EventKind
from valved.model.ids import Mode
from valved.state import saved as state
from valved.state.trace import LineFile, read_lines

STRANGER = 1_000_000_000 + os.getpid()  # no user of this machine


def an_event(number=1):
    return Event(seq=number, t_ns=1, kind=EventKind.NOTED, service=0, client=0, gpus=(), reason="x" * 100, detail={})


def a_state(**more):
    empty = {name: [] for name in ("gpus", "services", "clients")}
    words = {"version": state.VERSION, "boot_id": "b", "driver": "d", "counters": {}, "refusals": {}, **more}
    return state.SavedState(**words, **empty, next_client=1, next_service=1)


@pytest.fixture
def in_tmp(monkeypatch):
    """A user without a run folder of the system's or of the session's."""
    monkeypatch.delenv("VALVE_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(paths, "SYSTEM_RUN_DIR", paths.Path("/nonexistent"))
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    folder = paths.Path(f"/tmp/valve-{STRANGER}")
    yield folder
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        folder.rmdir()


def test_a_run_folder_that_another_user_made_is_never_used(in_tmp):
    """It would hold the engines' plugin, which then runs as this user."""
    assert paths.run_dir() == in_tmp

    in_tmp.mkdir()

    with pytest.raises(PermissionError, match="another user may write here"):
        paths.run_dir()


def test_a_run_folder_that_another_user_took_never_keeps_work_from_running_ungated(in_tmp):
    in_tmp.mkdir()

    assert offline("batch", SILENT, "true", ungated=True) == dict(os.environ)
    with pytest.raises(CliError, match="offline work is refused"):
        offline("batch", SILENT, "/bin/true", ungated=False)


def test_a_run_folder_is_never_taken_from_somebody_who_was_quicker(in_tmp):
    folder = paths.run_dir()
    in_tmp.symlink_to("/tmp")  # after the look, before the making

    with pytest.raises(PermissionError):
        state.RunFolder(folder)


def test_a_folder_named_without_its_whole_path_never_becomes_another_one_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", "run")
    monkeypatch.chdir(tmp_path)
    found = paths.run_dir()
    monkeypatch.chdir("/")

    assert found == tmp_path / "run"
    assert found.is_absolute()


def test_what_is_kept_from_users_without_a_group_is_never_in_a_file_that_they_may_read(tmp_path):
    """Channels, names and processes of all users: `view_group` says who may see them."""
    before = os.umask(0)
    try:
        file = LineFile(tmp_path / "audit.jsonl", 1 << 20)
        file.look()
        file.write(an_event())
        file.close()
        state.save(tmp_path / "state.json", a_state())
        state.keep_bad(tmp_path / "state.json")
        up.opened(tmp_path / "valved.log").close()
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("audit.jsonl", "state.json", "state.json.bad", "valved.log"), 0)


def test_the_state_of_a_newer_valved_is_never_lost_to_an_older_one(tmp_path):
    path = tmp_path / "state.json"
    state.save(path, a_state(version=state.VERSION + 1))
    written = path.read_bytes()

    _, problem = state.load(path)
    state.save(path, a_state())

    assert "version 2" in problem
    assert path.with_name("state.json.bad").read_bytes() == written


@pytest.mark.parametrize("more", [{}, {"services": "another form", "counters": 7, "clients": [[1, 2]]}])
def test_a_valved_that_is_put_back_never_harvests_where_its_successor_was_told_not_to(tmp_path, more):
    """Channels and processes of that version are not taken: their numbers may mean something else there."""
    path = tmp_path / "state.json"
    said = msgspec.to_builtins(a_state(policy=state.SavedPolicy(mode=Mode.OFF, cooldown=(1, 2, 3, 4.0, 5))))
    path.write_bytes(msgspec.json.encode({**said, "version": state.VERSION + 1, **more}))

    found, problem = state.load(path)

    assert found is not None
    assert found.policy == state.SavedPolicy(mode=Mode.OFF, cooldown=(1, 2, 3, 4.0, 5))
    assert [*found.services, *found.clients, *found.frozen, *found.ending] == []
    assert "only settings and claims" in problem


def test_events_are_never_written_to_a_pipe_whose_reader_could_hold_up_the_daemon(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file = LineFile(path, 1 << 20)
        file.look()
        file.write(an_event())
        file.close()

        assert os.read(reader, 1 << 16) == b""
    finally:
        os.close(reader)
    assert "events are not written" in caplog.text


@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_file_that_was_deleted_or_moved_never_goes_on_taking_the_events(tmp_path, how):
    path = tmp_path / "audit.jsonl"
    file = LineFile(path, 1 << 20)
    file.look()
    file.write(an_event(1))
    file.flush()
    path.unlink() if how == "unlink" else path.rename(tmp_path / "moved")

    file.flush()
    file.write(an_event(2))
    file.close()

    assert [record["seq"] for record in read_lines(path)] == [2]


def test_a_file_that_cannot_be_put_aside_never_grows_beyond_its_size_nor_fills_the_log(tmp_path, caplog):
    path, older = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    older.mkdir()
    file = LineFile(path, 1000)
    for _ in range(20):  # seconds
        file.look()
        for number in range(5):
            file.write(an_event(number))
        file.flush()

    assert path.stat().st_size < 2000
    assert [record.facts["error"] for record in caplog.records] == [f"{path}: {older}: Is a directory"]
    assert str(older) in file.failure

    older.rmdir()
    file.look()
    file.write(an_event(7))
    file.close()
    assert not file.failure
    assert [record["seq"] for record in read_lines(path)] == [7]


LOG = """
import logging, os, pathlib, sys
from valved import logs
path = pathlib.Path("valved.log")
logs.PARTING_S = 1000.0  # of its end alone
logs.set_up("info", path)
log = logging.getLogger("valved")
handler, = logging.getLogger().handlers
def say(count):
    for number in range(count):
        log.info("line %d" % number)
        handler.flush()
handler._stream._most = 2000
say(200)
assert path.stat().st_size < 3000 and path.with_name("valved.log.1").stat().st_size < 3000
path.with_name("valved.log.1").unlink()
path.with_name("valved.log.1").mkdir()
say(40)
assert path.stat().st_size < 3000 and "line 39" in path.read_text()
path.unlink()
say(2)
print("late words of the C library", file=sys.stderr)
"""


def test_the_log_of_valve_up_never_grows_without_bound_nor_goes_on_in_a_deleted_file(tmp_path):
    with up.opened(tmp_path / "valved.log") as log:
        done = subprocess.run([sys.executable, "-c", LOG], cwd=tmp_path, stderr=log, stdout=log, check=False)

    text = (tmp_path / "valved.log").read_text()
    assert done.returncode == 0, text
    assert "line 1" in text
    assert "late words" in text


def test_a_log_that_is_cut_never_has_a_hole_however_it_was_opened(tmp_path):
    """By a shell, say. It is cut where it cannot be moved: a folder has that name."""
    (tmp_path / "valved.log.1").mkdir()
    program = """
import pathlib
from valved import logs
log = logs._stream(pathlib.Path("valved.log"))
log._most = 4096
for number in range(1000):
    log.write(f"line {number}\\n")
"""
    with (tmp_path / "valved.log").open("wb") as log:
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stderr=log, check=True)

    text = (tmp_path / "valved.log").read_bytes()
    assert text.endswith(b"line 999\n")
    assert b"\0" not in text


def test_an_error_stream_that_is_another_s_file_is_never_moved_or_begun_anew(tmp_path):
    program = "import pathlib; from valved import logs; print(logs._stream(pathlib.Path('valved.log')))"
    (tmp_path / "valved.log").touch()
    with (tmp_path / "other").open("wb") as other:
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, cwd=tmp_path, stderr=other, stdout=subprocess.PIPE, text=True, check=True)

    assert "stderr" in done.stdout
