"""The vLLM of `valve demo tune` (tools/demo/tune_served.py)."""

from pathlib import Path

import pytest
from fake_daemon import until
from valve_tools.demo.endings import DemoError
from valve_tools.demo.tune_served import serve


def test_no_process_of_the_engine_outlives_the_demo(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin" / "python"  # as vLLM does: a server, which starts an engine in a process of its own
    server.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/engine\nexit 1\n")
    server.chmod(0o755)
    with pytest.raises(DemoError, match="does not answer"):
        serve(tmp_path, "python", tmp_path, tmp_path / "adapter")
    engine = (tmp_path / "engine").read_text().strip()
    until(lambda: not is_running(engine))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
