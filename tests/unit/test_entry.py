"""Ctrl-C while a program of Valve starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The import of a module of each program sends the signal: as if somebody had pressed Ctrl-C just then.
PRESSED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
class Pressed:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
from valved import entry
sys.exit(getattr(entry, sys.argv[2])())
"""


@pytest.mark.parametrize(("module", "program"), [("grpc", "valve"), ("asyncio", "valved"), ("msgspec", "valved")])
def test_a_program_that_is_interrupted_while_it_starts_never_writes_a_traceback(module, program, tmp_path):
    argv = [sys.executable, "-c", PRESSED, module, program]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_command_that_runs_still_ends_with_130(tmp_path):
    text = "import signal; from valved import entry; from valved.cli import main\n"
    text += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    text += "main.dispatch = lambda _: signal.raise_signal(signal.SIGINT)\nraise SystemExit(entry.valve())"
    argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (130, "")
