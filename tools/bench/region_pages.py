"""A client's two pages by the names of proto/abi/region.h, for tests and benches that play a client.

valved reads regions natively and atomically.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping

import valve_abi
from valve_abi import (
    CONTROL_BYTES,
    GAP_OFFSET,
    GAPS,
    REGION_ABI,
    REGION_BYTES,
    REGION_MAGIC,
    SLOT_OFFSET,
    SLOTS,
    Feature,
    Field,
)

CONTROL = valve_abi.CONTROL.fields
REGION = valve_abi.REGION.fields


class Page:
    """Words of a mapped page by name."""

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
        self.memory[field.offset : field.offset + field.bytes] = struct.pack(field.format, value)

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
    region["abi"] = REGION_ABI
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
    at = SLOT_OFFSET + slot * valve_abi.SLOT.size
    region.memory[at : at + 8] = struct.pack("<Q", count)
