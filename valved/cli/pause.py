"""`valve pause` and `valve resume`: the local brake.

Pausing writes a file in the run folder first and tells valved second. The file alone is enough (valved watches it), so
the brake works without the API, without a cluster, and across a restart of valved.
"""

from __future__ import annotations

import argparse
import getpass
from pathlib import Path

from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import node
from valved.cli.exits import NOT_RUNNING, OK, CliError
from valved.paths import PAUSE_FILE, run_dir


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    brake = commands.add_parser("pause", help="stop harvesting on this node now")
    brake.set_defaults(run=pause)
    release = commands.add_parser("resume", help="take the brake off")
    release.set_defaults(run=resume)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody"


def pause(_options: argparse.Namespace) -> int:
    path = _brake()
    path.write_text(f"{_who()}\n")
    try:
        with node() as connection:
            status = connection.call(connection.stub.Pause, node_pb2.PauseRequest(by=_who()))
    except CliError as error:
        if error.code != NOT_RUNNING:
            raise
        print(f"no valved answers; the brake is on for when one starts: {path}")
        return OK
    print(f"mode: {words.mode(status)}")
    return OK


def resume(_options: argparse.Namespace) -> int:
    _brake().unlink(missing_ok=True)
    try:
        with node() as connection:
            status = connection.call(connection.stub.Resume, node_pb2.ResumeRequest())
    except CliError as error:
        if error.code != NOT_RUNNING:
            raise
        print("no valved answers; the brake is off for when one starts")
        return OK
    print(f"mode: {words.mode(status)}")
    return OK


def _brake() -> Path:
    folder = run_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise CliError(f"cannot write in {folder}", next_step="the brake belongs to the user who runs valved") from None
    return folder / PAUSE_FILE
