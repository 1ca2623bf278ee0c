"""`valve pause` and `valve resume`: the local brake.

Pausing writes a file in the run folder first and tells valved second. The file alone is enough (valved watches it), so
the brake works without the API, without a cluster, and across a restart of valved.
"""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path
from typing import Any

from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import must_last, node
from valved.cli.exits import FAILED, NOT_RUNNING, OK, CliError
from valved.errors import cure
from valved.fds import open_at_once
from valved.model.plain import plain
from valved.paths import DRAIN_FILE, PAUSE_FILE, make, run_dir

ANSWER_S = 2.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    brake = commands.add_parser("pause", help="Stop harvesting on this node now.")
    brake.set_defaults(run=pause)
    release = commands.add_parser("resume", help="End the pause of this node.")
    release.set_defaults(run=resume)


def _who() -> str:
    try:
        return plain(getpass.getuser())  # which believes the environment
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def pause(_options: argparse.Namespace) -> int:
    path = _brake()
    try:
        with open(path, "w", encoding="utf-8", opener=open_at_once) as file:
            file.write(f"{_who()}\n")
    except PermissionError:
        return _ask("Pause", node_pb2.PauseRequest(by=_who()))
    except OSError as error:
        if not path.is_file():  # a full disk still takes names, and an empty file says enough
            return _without_file(path, error)
    print(f"paused: the file {path} is there", flush=True)  # whatever becomes of the rest: valved watches this file
    return _tell("Pause", node_pb2.PauseRequest(by=_who()), "valved stops offline work when it sees the file")


def resume(_options: argparse.Namespace) -> int:
    path = _brake()
    if not os.access(path.parent, os.W_OK):  # no file is there, perhaps: that would be no permission to say "resumed"
        return _ask("Resume", node_pb2.ResumeRequest())
    try:
        path.unlink(missing_ok=True)
        path.with_name(DRAIN_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise _not_ours(Path(error.filename or path), error) from None  # of the two the one that stays
    print(f"resumed: the files {PAUSE_FILE} and {DRAIN_FILE} are gone from {path.parent}", flush=True)
    return _tell("Resume", node_pb2.ResumeRequest(), "valved lets offline work run when it sees that the file is gone")


def _without_file(path: Path, error: OSError) -> int:
    """A file system in trouble: a valved that answers stops offline work all the same."""
    try:
        return _ask("Pause", node_pb2.PauseRequest(by=_who()))
    except CliError as refusal:
        if refusal.code == NOT_RUNNING:
            raise _not_ours(path, error) from None
        raise


def _ask(method: str, request: Any) -> int:
    """Valved does it, if we may ask: the folder is another user's, or takes no file."""
    with node() as connection:
        status = connection.call(getattr(connection.stub, method), request, deadline_s=ANSWER_S)
    _show(method, status)
    must_last(status, PAUSE_FILE, "offline work is paused")
    return OK


def _tell(method: str, request: Any, otherwise: str) -> int:
    """The file is enough; a valved that answers says what is in force now."""
    try:
        with node() as connection:
            status = connection.call(getattr(connection.stub, method), request, deadline_s=ANSWER_S)
    except CliError as error:
        who = "no valved answers" if error.code == NOT_RUNNING else f"valved does not answer ({error})"
        print(f"{who}; {otherwise}")
        return OK
    _show(method, status)
    return OK


def _show(method: str, status: Any) -> None:
    """CliError: offline work may run, and it was to be paused; or the reverse."""
    print(f"mode: {words.mode(status)}", flush=True)
    if method == "Pause" and not status.paused:
        raise CliError(
            "somebody has resumed this node meanwhile", FAILED, "valve pause once more, if that was not meant"
        )
    if method == "Resume" and (status.paused or status.draining):
        what = f"this node is {'draining' if status.draining else 'paused'}"
        why = "somebody has ordered that meanwhile, or its file could not be removed"
        raise CliError(f"{what}: {why}", FAILED, "valve resume once more, if that was not meant")


def _not_ours(path: Path, error: OSError) -> CliError:
    is_ours = not isinstance(error, PermissionError)
    step = "see that this folder can be written" if is_ours else "use the user that runs valved, for example with sudo"
    return CliError(f"{path}: {error.strerror}", next_step=cure(error, step))


def _brake() -> Path:
    folder = run_dir()
    try:
        make(folder)
    except OSError as error:
        raise _not_ours(folder, error) from None
    return folder / PAUSE_FILE
