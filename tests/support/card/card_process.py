"""A process with a CUDA context on the emulated card, under the real shim and a fake valved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rooms
from fake_daemon import FakeDaemon
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import environment

from valved.paths import preload_library

BODY = "import sys, cuda_driver\ncuda = cuda_driver.Cuda().start()\nprint('up', flush=True)\nsys.stdin.readline()\n"


@contextmanager
def process_on(emulator: Emulator, daemon: FakeDaemon, role: str) -> Iterator[subprocess.Popen[str]]:
    env = environment(
        emulator.directory,
        {
            **os.environ,
            "LD_PRELOAD": os.fspath(preload_library()),
            "VALVE_RUN_DIR": os.fspath(daemon.path.parent),
            "VALVE_ROLE": role,
            "PYTHONPATH": rooms.PYTHONPATH,
        },
    )
    child = subprocess.Popen(
        [sys.executable, "-c", BODY], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield child
    finally:
        child.communicate("\n")
