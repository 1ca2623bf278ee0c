"""An emulated GPU, and a process that speaks to its driver, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rm_process import RmProcess
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, node


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """A node without model latencies: two cards unless `@pytest.mark.parametrize` on `emulator` says otherwise."""
    options = getattr(request, "param", Options(gpus=2, knobs=NO_LATENCY))
    with node(options) as running:
        yield running


@pytest.fixture
def process(emulator: Emulator) -> Iterator[RmProcess]:
    with RmProcess(emulator.directory) as one:
        yield one


@pytest.fixture
def another(emulator: Emulator) -> Iterator[RmProcess]:
    with RmProcess(emulator.directory) as one:
        yield one
