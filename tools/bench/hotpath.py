"""P9: what the shim adds to a launch while nothing changes.

Paired: the same binary runs with and without the shim in turn, and each pair gives one figure, the difference of the
two medians. A batch of a thousand launches is long against the clock and short against the scheduler's slice, so the
median batch is one that no other thread disturbed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from valve_tools.bench.row import Row, row_of

from valved.paths import preload_library

FOLDER = Path(__file__).resolve().parent / "bin"
PROGRAM = FOLDER / "valve-bench-hotpath"
PAIRS = 15
BATCHES = 2000
LAUNCHES = 1000
ADDED_NS_BUDGET = 5.0  # promise P9


def environment(with_shim: bool) -> dict[str, str]:
    """No daemon: the closed gate is the same word at the same address, with and without a daemon."""
    env = {name: value for name, value in os.environ.items() if name not in {"LD_PRELOAD", "VALVE_RUN_DIR"}}
    env["LD_LIBRARY_PATH"] = os.fspath(FOLDER)
    if with_shim:
        if not preload_library().exists():  # the loader would only warn, and we would time nothing
            raise FileNotFoundError(
                f"{preload_library()}: run from an installed valve (make build), not from its sources"
            )
        env["LD_PRELOAD"] = os.fspath(preload_library())
    return env


def median_ns(door: str, env: Mapping[str, str]) -> float:
    """Nanoseconds per launch in the median batch of one run."""
    command = [os.fspath(PROGRAM), door, str(BATCHES), str(LAUNCHES)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return statistics.median(float(line) for line in done.stdout.split())


def hotpath() -> Iterator[Row]:
    for door in ("dlsym", "getproc"):
        plain: list[float] = []
        added: list[float] = []
        for _ in range(PAIRS):
            plain.append(median_ns(door, environment(with_shim=False)))
            added.append(median_ns(door, environment(with_shim=True)) - plain[-1])
        yield row_of(
            "hotpath",
            f"added per launch, {door}",
            "ns",
            added,
            ADDED_NS_BUDGET,
            judged="p50",
            baseline=statistics.median(plain),
            note="baseline: the call without the shim",
        )
    yield row_of("hotpath", "system calls while closed", "calls", [float(system_calls())], 0.0, judged="max")


def system_calls() -> int:
    """0 when a sealed run of 100,000 launches survives; 1 when its first system call killed it."""
    command = [os.fspath(PROGRAM), "dlsym", "100", "1000", "sealed"]
    return int(subprocess.run(command, env=environment(with_shim=True), check=False).returncode != 0)


BENCHES: dict[str, Callable[[], Iterator[Row]]] = {"hotpath": hotpath}
