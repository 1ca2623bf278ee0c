"""The seals of the shared pages: what a client can do to them, and what it cannot."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
from valve_tools.bench import region_pages

from valved.abi import region


def test_a_sealed_control_page_cannot_be_written_by_whoever_holds_the_fd() -> None:
    fd = region.create_memfd("control", region.CONTROL_BYTES)
    ours = mmap.mmap(fd, region.CONTROL_BYTES)
    region.seal_control(fd)

    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, region.CONTROL_BYTES)
    with pytest.raises(PermissionError):
        os.write(reopened, b"x")
    theirs = region_pages.control_page(reopened)
    ours[64:68] = (7).to_bytes(4, "little")

    assert theirs["gate_epoch"] == 7
    theirs.close()
    for used in (fd, reopened):
        os.close(used)


def test_a_region_can_be_written_but_neither_cut_nor_grown_nor_sealed_further() -> None:
    fd = region.create_memfd("region", region.REGION_BYTES)
    region.seal_region(fd)
    page = region_pages.region_page(fd)
    region_pages.fill_region(page)

    for size in (0, 2 * region.REGION_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    assert page["magic"] == region.REGION_MAGIC
    page.close()
    os.close(fd)
