"""Starts a script that runs a real SGLang with itself as a plugin beside ours."""

from __future__ import annotations

import json

import pytest


def run_with_plugin(engines, tmp_path, script, argument, *more_paths, timeout_s=900, **variables):
    """The JSON lines that it prints."""
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    mount, node = tmp_path / "mount", tmp_path / "node"
    info = mount / "valve_test-0.dist-info"
    info.mkdir(parents=True)
    node.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: valve-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nvalve_test = {script}:register\n")
    paths = (*more_paths, mount, engines.folder / "stubs")
    variables = {"SGLANG_PLUGINS": "valve,valve_test", "OMP_NUM_THREADS": "1", **variables}
    arguments = (f"{script}.py", str(engines.model), str(node), argument)
    out = engines.run(*arguments, paths=paths, timeout_s=timeout_s, **variables)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
