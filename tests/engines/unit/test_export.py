"""The hook as a folder: an engine of any environment finds the plugin through PYTHONPATH, and nothing else of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest
from valve_hook import VERSION
from valve_hook.export import export

from valved.cli import run

FIND = """
import importlib.metadata as metadata, json
groups = ("vllm.general_plugins", "sglang.srt.plugins")
print(json.dumps([point.value for group in groups for point in metadata.entry_points(group=group)]))
"""


def seen_by_a_stranger(folder, program):
    """An interpreter without any installed package."""
    argv = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_both_engines_find_their_plugin_in_the_exported_folder(tmp_path):
    found = seen_by_a_stranger(export(tmp_path / "hook"), FIND)

    assert "valve_hook.vllm.plugin:register" in found
    assert "valve_hook.sglang.plugin:register" in found


def test_the_folder_holds_nothing_that_could_shadow_an_engines_package(tmp_path):
    export(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "valve_abi",
        "valve_hook",
        f"valve_hook-{VERSION}.dist-info",
    ]


def test_exporting_again_changes_no_file(tmp_path):
    export(tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}
    export(tmp_path)

    assert {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()} == before


def test_valve_run_puts_the_hook_first_once_and_keeps_the_users_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/opt/mine")
    env = run.environment("offline", tmp_path)
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])

    assert run.environment("offline", tmp_path)["PYTHONPATH"] == f"{tmp_path}/hook-{VERSION}:/opt/mine"
    assert (tmp_path / f"hook-{VERSION}" / "valve_hook" / "vllm" / "plugin.py").is_file()


def test_a_run_folder_that_cannot_be_written_falls_back_to_the_users_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert run.engine_hook(tmp_path / "file") == tmp_path / "cache" / "valve" / f"hook-{VERSION}"


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
def test_a_question_for_help_never_makes_a_folder_of_that_name(words, code, tmp_path):
    argv = [sys.executable, "-m", "valve_hook.export", *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert "usage: python -m valve_hook.export" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
