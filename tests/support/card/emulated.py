"""Tests whose body runs in a process of its own on an emulated node: `@on_gpu()` above the test.

The parent starts the node and the child; the child calls the body with a `Cuda`. So every test has a driver, a context
and signal handlers of its own, and a test may kill its context. A failing assertion shows the locals of the child."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import rooms

DEADLINE_S = 200  # only ends a hung test


def child_env(directory: Path, cuda: str = "", env: Mapping[str, str] | None = None) -> dict[str, str]:
    from valve_tools.emulator.node import environment

    path = os.pathsep.join([rooms.PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return environment(directory, {**os.environ, "PYTHONPATH": path, "VALVE_EMU_CUDA": cuda, **(env or {})})


def on_gpu(
    *, gpus: int = 1, gpu_bytes: int = 1 << 30, knobs: Mapping[str, str] | None = None, cuda: str = ""
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run the test on a node of that shape; `cuda` are the settings of the stand-in libcuda."""

    def decorate(body: Callable[..., None]) -> Callable[[], None]:
        @functools.wraps(body)
        def test() -> None:
            from valve_tools.emulator.node import NO_LATENCY, Options, node

            options = Options(gpus=gpus, gpu_bytes=gpu_bytes, knobs={**NO_LATENCY, **(knobs or {})})
            with node(options) as emulator:
                child = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "emulated", body.__code__.co_filename, body.__name__],
                    env=child_env(emulator.directory, cuda),
                    cwd=emulator.directory,  # the installed packages, not the sources of the checkout
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                try:
                    output, _ = child.communicate(timeout=DEADLINE_S)
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGABRT)  # faulthandler shows where every thread stands
                    output, _ = child.communicate()
            if child.returncode:
                pytest.fail(f"exit code {child.returncode}\n{output}", pytrace=False)

        del test.__wrapped__  # type: ignore[attr-defined]  # the body's parameters are no fixtures
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def main(path: str, name: str) -> int:
    from cuda_driver import Cuda

    spec = importlib.util.spec_from_file_location("the_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        getattr(module, name).body(Cuda())
    except BaseException as error:  # whatever it is, the parent wants to show it
        print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(code)
