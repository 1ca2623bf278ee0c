"""The shared memory of one client: creating and sealing the two memfds.

Only the seal protects a page: a read-only descriptor reopens writable through /proc. So the control page is mapped by
the gate first and then sealed against every later writable mapping. That also bars a successor of this daemon: at a
take-over clients get fresh pages.
"""

from __future__ import annotations

import fcntl
import os

from valve_abi import CONTROL_BYTES, GAP_OFFSET, GAPS, REGION_BYTES, REGION_MAGIC

from valved.fds import Fds

__all__ = ["CONTROL_BYTES", "GAPS", "GAP_OFFSET", "REGION_BYTES", "REGION_MAGIC"]  # the header's own

SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module does not name it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memfd(name: str, size: int) -> int:
    """A memory file whose size can no longer change."""
    with Fds() as fds:
        fd = fds.own(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd, size)
        fds.keep()
    return fd


def seal_region(fd: int) -> None:
    """The client writes here; it can neither shrink the file under us nor grow it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)


def seal_control(fd: int) -> None:
    """Precondition: our writable mapping exists. No other will."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | SEAL_FUTURE_WRITE)
