"""Descriptors that fakes hand to the product: closed before the next test unless the product closed them itself.

All are read ends of one FIFO that has a writer and never any data: they can be polled, never become readable, and their
inode tells them from a later file that got the same number.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile

_lent: set[int] = set()


@functools.cache
def _fifo() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "fifo")
        os.mkfifo(path)
        return os.open(path, os.O_RDWR)  # reader and writer: it never sees an end of file


def is_lent(fd: int) -> bool:
    """Whether it is open, and one of ours."""
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino == os.fstat(_fifo()).st_ino
    return False


def lend() -> int:
    """An open descriptor that never becomes readable."""
    fd = os.open(f"/proc/self/fd/{_fifo()}", os.O_RDONLY | os.O_NONBLOCK)
    _lent.add(fd)
    return fd


def end(fds: list[int]) -> None:
    """Close those that are still ours."""
    for fd in filter(is_lent, fds):
        os.close(fd)


def collect() -> None:
    """The world that had them goes first: what its journeys do at their end they do to their own descriptors, and while
    no other test looks on. Fakes lend by the thousand in a whole run, and a machine may allow 1,024."""
    if _lent:
        gc.collect()
    for fd in _lent:
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == os.fstat(_fifo()).st_ino:
                os.close(fd)
    _lent.clear()
