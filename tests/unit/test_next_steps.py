"""What is refused has a next step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from valved.cli.exits import CliError
from valved.errors import ValveError


@pytest.mark.parametrize("refused", [*ValveError.__subclasses__(), CliError])
def test_no_refusal_goes_without_a_next_step(refused):
    assert refused("no").next_step
    assert refused("no", next_step="").next_step


@pytest.mark.parametrize("name", ["client", "link.sock", "valved.sock"])
def test_a_start_that_fails_for_what_stands_in_the_run_folder_is_never_told_without_a_next_step(tmp_path, name):
    """A file in the place of a folder, or a folder in that of a socket."""
    (tmp_path / name).touch() if name == "client" else (tmp_path / name / "full").mkdir(parents=True)
    argv = [sys.executable, "-m", "valved.main", "--run-dir", str(tmp_path), "--mode", "off"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode > 0, done.stderr
    assert '"next": ""' not in done.stderr
    assert '"next": "' in done.stderr
