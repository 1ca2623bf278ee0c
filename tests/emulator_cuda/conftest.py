"""The programs of the hardware suite, built once for the tests of this folder."""

from __future__ import annotations

import pytest
from valve_tools.gpu import build
from valve_tools.gpu.build import Programs


@pytest.fixture(scope="session")
def lab_programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Built once, with every warning an error."""
    return build.build(tmp_path_factory.mktemp("lab") / "bin", emulated=True, strict=True)
