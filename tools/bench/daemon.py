"""Benches of valved: what it costs a node (daemon-cost) and how often a request is preempted (once-per-request)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from valve_tools.bench.once import bench_once
from valve_tools.bench.row import Row, row_of
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options
from valve_tools.emulator.process import ProcessPage

ONLINE, OFFLINE, CHANNELS, GPUS = 100, 64, 64, 8
CYCLES_PER_S = 500  # each is two edges: busy and idle
WINDOWS, WINDOW_S = 8, 1.0
TICK = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process: scheduler's nanoseconds where the kernel tells them."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def core_speed() -> str:
    """CPU time of a fixed Python loop just now. A core shared with busy neighbours does less per second of its time."""
    began = time.thread_time()
    for _ in range(1_000_000):
        pass
    return f"an empty loop of 1M steps takes {1e3 * (time.thread_time() - began):.0f} ms here now"


def shares(*clocks_s: Callable[[], float]) -> list[list[float]]:
    """Percent of a core by each of the clocks, one figure per window. All clocks are read in the same windows."""
    found: list[list[float]] = [[] for _ in clocks_s]
    for _ in range(WINDOWS):
        began, used = time.monotonic(), [clock() for clock in clocks_s]
        time.sleep(WINDOW_S)
        for figures, clock, before in zip(found, clocks_s, used, strict=True):
            figures.append(100 * (clock() - before) / (time.monotonic() - began))
    return found


def driver_cpu_s(page: ProcessPage) -> float:
    """CPU time of a process's own threads inside the calls of the emulated driver."""
    return sum(kind.cpu_ns for kind in page.spent().values()) / 1e9


def driver_calls(page: ProcessPage) -> int:
    return sum(kind.count for kind in page.spent().values())


def bench_cost() -> Iterator[Row]:
    name, unit = "daemon-cost", "% of a core"
    with (
        tempfile.TemporaryDirectory(prefix="valve-bench-") as folder,
        EmulatedNode(Path(folder), options=Options(gpus=GPUS)) as node,
    ):
        pid = node.start_valved().pid
        time.sleep(WINDOW_S)
        yield row_of(name, "idle-empty", unit, shares(lambda: cpu_s(pid))[0], 0.5, judged="p50")
        crowd = start_crowd(node)
        try:
            size = f"{ONLINE} online, {OFFLINE} offline x {CHANNELS} channels, {GPUS} GPUs"
            yield row_of(name, "idle-full", unit, shares(lambda: cpu_s(pid))[0], 0.5, judged="p50", note=size)
            yield from busy(node, crowd, pid)
            yield row_of(name, "rss", "MB", [rss_mb(pid)], 80.0, judged="max", note=size)
        finally:
            crowd.kill()
            crowd.wait()


def start_crowd(node: EmulatedNode) -> subprocess.Popen[str]:
    """The crowd in a process of its own, under the emulated driver; returns when every process is welcomed."""
    sizes = [ONLINE, OFFLINE, CHANNELS, GPUS]
    crowd = subprocess.Popen(
        [sys.executable, "-m", "valve_tools.bench.daemon", str(node.run_dir), *map(str, sizes)],
        env=node.environment(),
        cwd=node.run_dir,  # never this checkout, whose packages are not built
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert crowd.stdout is not None
    if not crowd.stdout.readline():
        raise RuntimeError(f"the crowd did not come up: exit code {crowd.wait()}")
    return crowd


def busy(node: EmulatedNode, crowd: subprocess.Popen[str], pid: int) -> Iterator[Row]:
    assert crowd.stdin is not None
    crowd.stdin.write(json.dumps([CYCLES_PER_S, WINDOWS * WINDOW_S + 2]) + "\n")
    crowd.stdin.flush()
    time.sleep(1)
    page = node.emulator.process(pid)
    before, began, calls = node.status().counters.wakes, time.monotonic(), driver_calls(page)
    used, inside = shares(lambda: cpu_s(pid), lambda: driver_cpu_s(page))
    took = time.monotonic() - began
    edges = 2 * (node.status().counters.wakes - before) / took
    yield from busy_rows(used, inside, edges=edges, calls=(driver_calls(page) - calls) / took)


def busy_rows(used: list[float], inside: list[float], *, edges: float, calls: float) -> Iterator[Row]:
    """All of valved is judged. What the emulated driver takes of it is a row of its own and is subtracted nowhere: a
    real driver has a cost of its own, which nobody knows here.
    """
    name, unit = "daemon-cost", "% of a core"
    note = f"{edges:.0f} edges/s reached; includes the next row; {core_speed()}"
    yield row_of(name, "1000-edges/s", unit, used, 4.0, judged="p50", note=note)
    note = f"the emulated driver's client side in valved's own threads, {calls:.0f} calls/s; part of the row above"
    yield row_of(name, "1000-edges/s-in-driver", unit, inside, None, note=note)


def crowd_main(argv: list[str]) -> None:
    from valve_tools.bench.crowd import BenchCrowd

    online, offline, channels, gpus = map(int, argv[1:])
    with BenchCrowd(Path(argv[0]), online=online, offline=offline, channels=channels, gpus=gpus) as crowd:
        print("up", flush=True)
        for line in sys.stdin:
            crowd.play(*json.loads(line))


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"daemon-cost": bench_cost, "once-per-request": bench_once}

if __name__ == "__main__":
    crowd_main(sys.argv[1:])
