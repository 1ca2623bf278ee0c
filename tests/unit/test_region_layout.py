"""The Python view of the shared pages against the header that the C sides compile."""

from __future__ import annotations

import fcntl
import importlib.util
import mmap
import os
import re
from pathlib import Path
from typing import Any

import cffi
import pytest

from valved.mechanism import region
from valved.model.ids import Role

HEADER = "proto/abi/region.h"


@pytest.fixture(scope="module")
def header(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """region.h through cffi: names from its text, offsets and values from the compiler."""
    text = (repository / HEADER).read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^(#|_Static_assert|VALVE_AT).*(?:\\\n.*)*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\buint\d+_t pad\d(\[\d+\])?;|_Alignas\(64\)", "", text)
    text = re.sub(r"(struct \w+ \{[^}]*)\}", r"\1 ...; }", text)
    ffi = cffi.FFI()
    ffi.cdef(text)
    ffi.set_source("region_layout", '#include "region.h"', include_dirs=[str(repository / "proto/abi")])
    built = ffi.compile(tmpdir=str(tmp_path_factory.mktemp("layout")))
    spec = importlib.util.spec_from_file_location("region_layout", built)
    assert spec is not None
    assert spec.loader is not None

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("struct", "fields"), [("valve_control", region.CONTROL), ("valve_region", region.REGION)])
def test_every_word_stands_where_the_header_puts_it(header: Any, struct: str, fields: dict[str, region.Field]) -> None:
    theirs = {
        name: (field.offset, header.ffi.sizeof(field.type) * 8)
        for name, field in header.ffi.typeof(f"struct {struct}").fields
    }

    assert theirs == {name: (field.offset, field.bits) for name, field in fields.items()}


def test_numbers_are_those_of_the_header(repository: Path, header: Any) -> None:
    text = (repository / HEADER).read_text()
    ffi, lib = header.ffi, header.lib

    assert f"{region.CONTROL_MAGIC:#x}" in text
    assert f"{region.REGION_MAGIC:#x}" in text
    assert re.search(rf"VALVE_SLOTS\s+{region.SLOTS}u", text)
    assert re.search(rf"VALVE_GAPS\s+{region.GAPS}u", text)
    assert ffi.sizeof("struct valve_slot") == region.SLOT_BYTES
    assert (lib.VALVE_ORDER_STOP, lib.VALVE_ORDER_HOLD) == (region.ORDER_STOP, region.ORDER_HOLD)
    assert lib.VALVE_FEATURE_SELF_GATE == region.FEATURE_SELF_GATE
    assert lib.VALVE_FEATURE_HOLD == region.FEATURE_HOLD
    assert list(Role) == [lib.VALVE_ROLE_NONE, lib.VALVE_ROLE_ONLINE, lib.VALVE_ROLE_OFFLINE, lib.VALVE_ROLE_HOOK]


def test_a_sealed_control_page_cannot_be_written_by_whoever_holds_the_fd() -> None:
    fd = region.create_memfd("control", region.CONTROL_BYTES)
    ours = mmap.mmap(fd, region.CONTROL_BYTES)
    region.seal_control(fd)

    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, region.CONTROL_BYTES)
    with pytest.raises(PermissionError):
        os.write(reopened, b"x")
    theirs = region.control_page(reopened)
    ours[64:68] = (7).to_bytes(4, "little")

    assert theirs["gate_epoch"] == 7
    theirs.close()
    for used in (fd, reopened):
        os.close(used)


def test_a_region_can_be_written_but_neither_cut_nor_grown_nor_sealed_further() -> None:
    fd = region.create_memfd("region", region.REGION_BYTES)
    region.seal_region(fd)
    page = region.region_page(fd)
    region.fill_region(page)

    for size in (0, 2 * region.REGION_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    assert page["magic"] == region.REGION_MAGIC
    page.close()
    os.close(fd)
