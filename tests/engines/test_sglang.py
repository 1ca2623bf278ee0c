"""A real SGLang on CPU loses pages in the middle of steps: its tokens are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
PATCH = Path(__file__).resolve().parents[2] / "patches" / "sglang" / "scheduler.patch"
FULL = 2
TRIALS = [{"seed": seed, "events": 6, "held": held} for seed, held in ((1, 4), (2, 2), (3, 0), (4, 8))]


def campaign(engines, tmp_path, plan, *more_paths):
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    mount, node = tmp_path / "mount", tmp_path / "node"
    info = mount / "valve_test-0.dist-info"
    info.mkdir(parents=True)
    node.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: valve-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nvalve_test = sglang_campaign:register\n")
    paths = (*more_paths, mount, engines.folder / "stubs")
    plugins = "valve_test" if "handling" in plan else "valve,valve_test"
    variables = {"SGLANG_PLUGINS": plugins, "OMP_NUM_THREADS": "1", "VALVE_TEST_REMOVE": plan.get("remove", "")}
    variables |= plan.get("variables", {})
    out = engines.run("sglang_campaign.py", str(engines.model), str(node), json.dumps(plan), paths=paths, **variables)
    trials = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(trials) == len(plan["trials"])
    return trials


@pytest.mark.parametrize(("overlap", "page"), [(True, 1), (False, 1), (True, 16)])
def test_tokens_are_identical_after_reclaims(engines, tmp_path, overlap, page):
    """With and without overlap, which skip requests by different paths; pages of one and of sixteen tokens."""
    results = campaign(engines, tmp_path, {"overlap": overlap, "page": page, "trials": TRIALS})

    assert [trial["wrong"] for trial in results] == [0] * len(TRIALS)
    assert sum(trial["events"] for trial in results) >= len(TRIALS)
    assert (results[-1]["mode"], results[-1]["failures"], results[-1]["layout"]) == (FULL, 0, True)


def test_both_tree_cores_forget_chosen_pages_and_nothing_else(engines):
    """Of a, b and c one page of b's own: 64 slots, less what a, c and the common beginning hold, less the lost one."""
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    out = engines.run("sglang_trees.py", paths=(engines.folder / "stubs",), OMP_NUM_THREADS="1")
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    expected = {"forgotten": 1, "cached": {"a": 16, "b": 10, "c": 12}, "free": 35}

    assert told == [{"core": core, **expected} for core in ("RustUnifiedTreeCore", "UnifiedTreeCore")]


def test_the_python_tree_forgets_chosen_pages_too(engines, tmp_path):
    """Rust's is the default and the one of the other tests."""
    variables = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    results = campaign(engines, tmp_path, {"variables": variables, "trials": TRIALS[:2]})

    assert [trial["wrong"] for trial in results] == [0, 0]
    assert (results[-1]["mode"], results[-1]["failures"]) == (FULL, 0)


@pytest.mark.parametrize(
    ("remove", "overlap"), [("forgetting", True), ("withholding", True), ("skipping_without_overlap", False)]
)
def test_without_this_protection_answers_change(engines, tmp_path, remove, overlap):
    results = campaign(engines, tmp_path, {"remove": remove, "overlap": overlap, "trials": TRIALS[:2]})

    assert sum(trial["wrong"] for trial in results) > 0


def patched(engines, folder):
    """SGLang as it is installed, by links, but for the one file that the patch changes."""
    source = next((engines.folder / "lib").glob("python3*/site-packages/sglang"))
    shutil.copytree(source, folder / "sglang", copy_function=os.symlink)
    target = folder / "sglang/srt/managers/scheduler.py"
    target.unlink()
    shutil.copy(source / "srt/managers/scheduler.py", target)
    done = subprocess.run(["patch", "-p1", "-i", str(PATCH)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "fuzz" not in done.stdout
    return folder


def test_the_patch_has_thirteen_lines_and_does_the_same(engines, tmp_path):
    """The second form: the exact released source with the patch applied, plugins off."""
    lines = PATCH.read_text().splitlines()
    assert len([line for line in lines if line.startswith("+") and not line.startswith("+++")]) == 13
    assert [line for line in lines if line.startswith("-") and not line.startswith("---")] == []
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    overlay = patched(engines, tmp_path / "overlay")
    results = campaign(engines, tmp_path, {"handling": "patch", "trials": TRIALS[:2]}, overlay)

    assert [trial["wrong"] for trial in results] == [0, 0]
    assert (results[-1]["mode"], results[-1]["failures"]) == (FULL, 0)


def test_without_the_plugin_the_same_reclaims_change_most_outputs(engines, tmp_path):
    results = campaign(engines, tmp_path, {"handling": "none", "trials": TRIALS[:2]})

    assert sum(trial["wrong"] for trial in results) > 12
