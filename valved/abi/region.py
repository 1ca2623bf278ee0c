"""The shared memory of one client: creating and sealing the two memfds, and a Python view of proto/abi/region.h.

Only the seal protects a page: a read-only descriptor reopens writable through /proc. So the control page is mapped by
the gate first and then sealed against every later writable mapping. That also bars a successor of this daemon: at a
take-over clients get fresh pages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Mapping

import valve_abi
from valve_abi import (
    CONTROL_BYTES,
    GAP_OFFSET,
    GAPS,
    REGION_BYTES,
    REGION_MAGIC,
    SLOT_OFFSET,
    SLOTS,
    Feature,
    Field,
)

from valved.fds import Fds

__all__ = ["CONTROL_BYTES", "GAPS", "GAP_OFFSET", "REGION_BYTES", "REGION_MAGIC"]  # the header's own

ABI = valve_abi.REGION_ABI
SLOT_BYTES = valve_abi.SLOT.size

SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module does not name it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


CONTROL = valve_abi.CONTROL.fields
REGION = valve_abi.REGION.fields


class Page:
    """Words of a mapped page by name. For tools and tests; the daemon reads regions natively and atomically."""

    def __init__(self, fd: int, size: int, fields: Mapping[str, Field], *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self._fields = fields

    def __getitem__(self, name: str) -> int:
        field = self._fields[name]
        value: int = struct.unpack_from(field.format, self.memory, field.offset)[0]
        return value

    def __setitem__(self, name: str, value: int) -> None:
        field = self._fields[name]
        struct.pack_into(field.format, self.memory, field.offset, value)

    def close(self) -> None:
        self.memory.close()


def control_page(fd: int) -> Page:
    """A client's look at its control page."""
    return Page(fd, CONTROL_BYTES, CONTROL, writable=False)


def region_page(fd: int) -> Page:
    """A client's own region."""
    return Page(fd, REGION_BYTES, REGION, writable=True)


def fill_region(region: Page, *, features: int = Feature.GAPS) -> None:
    """What a client writes first: the header, magic last."""
    region["abi"] = ABI
    region["bytes"] = REGION_BYTES
    region["features"] = features
    region["slot_count"] = SLOTS
    region["slot_offset"] = SLOT_OFFSET
    region["gap_offset"] = GAP_OFFSET
    region["gap_count"] = GAPS
    region["pid"] = os.getpid()
    region["magic"] = REGION_MAGIC


def set_submitted(region: Page, slot: int, count: int) -> None:
    """One launching thread's counter."""
    struct.pack_into("<Q", region.memory, SLOT_OFFSET + slot * SLOT_BYTES, count)


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
