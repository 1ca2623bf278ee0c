"""Starts a script that runs a real SGLang with itself as a plugin beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def mounted(engines, mount, script):
    """What makes a script a plugin of SGLang: paths for Python, and variables."""
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    info = mount / "valve_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: valve-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nvalve_test = {script}:register\n")
    here = Path(__file__).resolve().parents[2] / "engines"
    return (here, mount, engines.folder / "stubs"), {"SGLANG_PLUGINS": "valve,valve_test", "OMP_NUM_THREADS": "1"}


def run_with_plugin(engines, tmp_path, script, argument, *more_paths, timeout_s=900, **variables):
    """The JSON lines that it prints."""
    paths, plugin = mounted(engines, tmp_path / "mount", script)
    node = tmp_path / "node"
    node.mkdir()
    arguments = (f"{script}.py", str(engines.model), str(node), argument)
    out = engines.run(*arguments, paths=(*more_paths, *paths), timeout_s=timeout_s, **{**plugin, **variables})
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
