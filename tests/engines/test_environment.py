"""The time-outs that Valve lengthens for offline work are ones that the engines read."""

from pathlib import Path
from typing import Any

import pytest

from valved.cli.run import OFFLINE_TIMEOUTS

pytestmark = pytest.mark.engine

# vLLM's releases of 2025 read these; the pinned ones do not.
FORMER = {"VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_RPC_TIMEOUT"}


def test_no_time_out_is_set_that_no_pinned_engine_reads(engines: Any) -> None:
    site = next((engines.folder / "lib").glob("python3*")) / "site-packages"
    sources = [site / "vllm/envs.py", *(site / "torch/lib").glob("libtorch_*.so")]

    unread = {name for name in OFFLINE_TIMEOUTS if not any(mentions(source, name) for source in sources)}

    assert unread == FORMER


def mentions(source: Path, name: str) -> bool:
    return name.encode() in source.read_bytes()
