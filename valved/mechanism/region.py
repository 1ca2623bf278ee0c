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
from dataclasses import dataclass

ABI = 1
CONTROL_MAGIC = 0x314C5443564C4156
REGION_MAGIC = 0x314E4752564C4156
PAGE = 4096
SLOTS = 256
SLOT_BYTES = 64
GAPS = 64
CONTROL_BYTES = PAGE
SLOT_OFFSET = PAGE
GAP_OFFSET = PAGE + SLOTS * SLOT_BYTES
REGION_BYTES = GAP_OFFSET + PAGE

FEATURE_GAPS = 1 << 0
FEATURE_HINT = 1 << 1
FEATURE_SELF_GATE = 1 << 2
FEATURE_HOLD = 1 << 3
FEATURE_MEMORY = 1 << 6

ORDER_RUN = 0
ORDER_STOP = 1
ORDER_HOLD = 2

SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module does not name it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where a word stands and how wide it is."""

    offset: int
    bits: int

    @property
    def format(self) -> str:
        return "<Q" if self.bits == 64 else "<I"


def _fields(**places: tuple[int, int]) -> Mapping[str, Field]:
    return {name: Field(offset=offset, bits=bits) for name, (offset, bits) in places.items()}


CONTROL: Mapping[str, Field] = _fields(
    magic=(0, 64),
    abi=(8, 32),
    bytes=(12, 32),
    features=(16, 32),
    role=(20, 32),
    service=(24, 64),
    gate_epoch=(64, 32),
    heartbeat_ns=(128, 64),
    lease_ns=(136, 64),
    online_registered=(144, 32),
    watch=(148, 32),
    order=(152, 32),
    order_seq=(156, 32),
    draining=(160, 32),
    quiet_us=(164, 32),
    kv_handle_bytes=(192, 64),
    kv_budget_bytes=(200, 64),
    kv_size_rule=(208, 64),
)

REGION: Mapping[str, Field] = _fields(
    magic=(0, 64),
    abi=(8, 32),
    bytes=(12, 32),
    features=(16, 32),
    slot_count=(20, 32),
    slot_offset=(24, 32),
    gap_offset=(28, 32),
    gap_count=(32, 32),
    pid=(36, 32),
    busy=(64, 32),
    rung_epoch=(68, 32),
    launch_ns=(72, 64),
    rings=(80, 64),
    idle_submitted=(128, 64),
    idle_ns=(136, 64),
    watcher_ns=(144, 64),
    idle_seq=(152, 32),
    watcher_state=(156, 32),
    gaps=(160, 64),
    probes=(168, 64),
    capture_depth=(192, 32),
    order_done=(256, 32),
    order_status=(260, 32),
    order_ns=(264, 64),
    self_stops=(272, 64),
    open_requests=(320, 32),
    hint_ns=(328, 64),
    requests_started=(336, 64),
    requests_ended=(344, 64),
    useful_tokens=(352, 64),
)


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


def fill_region(region: Page, *, features: int = FEATURE_GAPS) -> None:
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
    """A memory file of a size that nobody can change any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal_region(fd: int) -> None:
    """The client writes here; it can neither shrink the file under us nor grow it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)


def seal_control(fd: int) -> None:
    """Precondition: our writable mapping exists. No other will."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | SEAL_FUTURE_WRITE)
