"""The fake driver, compiled once; a rig for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import HASTY, FakeDriver, Rig, compile_c, gate_rig


@pytest.fixture(scope="session")
def fake_library(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fake") / "libfake_rm.so"
    compile_c(out, [repository / "tests/native/fake_rm.c"], "-shared", "-fPIC", "-O1")
    return out


@pytest.fixture
def driver(fake_library: Path) -> FakeDriver:
    return FakeDriver(fake_library)


@pytest.fixture
def rig(driver: FakeDriver) -> Iterator[Rig]:
    with gate_rig(driver) as rig:
        yield rig


@pytest.fixture
def hasty(driver: FakeDriver) -> Iterator[Rig]:
    """A gate that soon gives up waiting for its driver."""
    with gate_rig(driver, HASTY) as rig:
        yield rig
