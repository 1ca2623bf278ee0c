"""Owners of descriptors. What one step opened is closed unless the step that hands it on is reached, whatever fails in
between; and that nothing could be opened says nothing of what is there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESRCH)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS)
MOST_BYTES = 64 << 20  # beyond any file of ours that is read whole: a state of a million channels has 50 MB


class Fds(contextlib.ExitStack):
    """Descriptors, and whatever else is to be undone, until another part owns all of them."""

    def own(self, fd: int) -> int:
        self.callback(os.close, fd)
        return fd

    def keep(self) -> None:
        """They are another's from here on. The last step, which cannot fail."""
        self.pop_all()


def is_scarce(error: OSError) -> bool:
    """It could not be opened for want of descriptors or memory: ask again, and take it for present until then."""
    return error.errno in _SCARCE


def is_absent(error: OSError) -> bool:
    """It is not there. No other error says so."""
    return error.errno in _ABSENT


def read_file(path: Path, most: int = -1) -> bytes:
    """All, or so many bytes. OSError for what is no file: a pipe or a device may have no end, and nobody may ever write
    into it. And for what is too large to be read whole: a container may have less memory than that, and would be killed
    for it at each start."""
    with Fds() as fds:
        fd = fds.own(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "this is no file", str(path))
        if most < 0 and found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read(most)


def read_if_there(path: Path) -> bytes | None:
    """OSError: nobody knows."""
    try:
        return read_file(path)
    except OSError as error:
        if is_absent(error):
            return None
        raise


def write_private(path: Path, data: bytes, *, sync: bool = False) -> None:
    """For this user alone, whatever its umask says. OSError where a pipe stands that nobody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    with Fds() as fds:
        fd = fds.own(os.open(path, flags, 0o600))
        os.fchmod(fd, 0o600)  # one that an older valved made
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        if sync:
            os.fsync(fd)


def open_at_once(path: str, flags: int) -> int:
    """An opener for open(): a pipe without another end would keep whoever opens it for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def forget_name(path: Path) -> None:
    """At an end: what comes after it never depends on whether a name could be removed (a read-only disk)."""
    with contextlib.suppress(OSError):
        path.unlink()


def names_in(folder: Path) -> list[str]:
    """Sorted; none where there is no folder. To a glob of Python 3.12 a folder that it cannot open is an empty one."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if is_absent(error):
            return []
        raise
