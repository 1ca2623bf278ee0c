"""Claims in files: `valve run --online` leaves one when no valved answers in time, and the next valved picks it up.

A file in the folder `claims`. Only users who may call the API may write there. Nothing but an online claim
is taken from a file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from valved.fds import Fds, is_scarce

FOLDER = "claims"
MOST_BYTES = 4096
MOST_FILES = 1024


class PendingClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an older valved does not know is left out where nothing was said."""

    pid: int
    start_time: int
    name: str
    slo: str = ""
    grant: str = ""
    share_weights: str = ""


def make_folder(run_dir: Path, group: int = -1) -> None:
    """For the user of valved, and for the group that may claim through the API as well."""
    folder = run_dir / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if group >= 0:
            os.chown(folder, -1, group)
            folder.chmod(0o1770)  # each of the group removes its own alone


def leave(run_dir: Path, claim: PendingClaim) -> bool:
    """False: there is no valved's folder here, or it is not ours to write to."""
    path = run_dir / FOLDER / f"{claim.pid}-{claim.start_time}"
    fresh = path.with_name(f".{path.name}")
    try:
        _write_new(fresh, msgspec.json.encode(claim))
        fresh.replace(path)
    except OSError:
        return False
    return True


def read(run_dir: Path) -> list[tuple[str, PendingClaim]]:
    """With the names of their files, which `drop` removes; oldest names first. What makes no sense is thrown away. What
    cannot be read for want of a descriptor stays."""
    found: list[tuple[str, PendingClaim]] = []
    try:
        with os.scandir(run_dir / FOLDER) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError:
        return found
    for name in names[:MOST_FILES]:
        path = run_dir / FOLDER / name
        try:
            found.append((name, msgspec.json.decode(_read_plain(path), type=PendingClaim)))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            if isinstance(error, OSError) and is_scarce(error):
                return found
            drop(run_dir, name)
    return found


def drop(run_dir: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        (run_dir / FOLDER / name).unlink()


def _write_new(path: Path, data: bytes) -> None:
    """Never through a link, nor into a file that somebody else put there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with Fds() as fds:
        fd = fds.own(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        with open(fd, "wb", closefd=False) as file:
            file.write(data)


def _read_plain(path: Path) -> bytes:
    """A user who may write there could leave a pipe, a folder or a link instead of a claim."""
    with Fds() as fds:
        fd = fds.own(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("no plain file")
        return os.read(fd, MOST_BYTES)
