"""Benches of the gate on the emulated card: `gate-sleep`, `gate-spin`, `gate-8gpu`.

What is measured is our own share, from the launch that finds the gate open (a process of its own stamps it and rings)
to the moment the disable is issued; what the emulated driver then takes is left out. Only `gate-8gpu` is about the
driver: how long until all GPUs of a service are closed, under the stock lock model and the one-word driver patch.

    python -m valve_tools.bench.gate --chart docs/results/gate-8gpu.svg
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from valve_tools.bench.gate_host import GateRun, run_on
from valve_tools.bench.row import Row, percentile, row_of
from valve_tools.emulator.node import Options, node
from valve_tools.replay.svg import curves, picture

from valved.machine.stamps import Stamp

EDGES = 2500
SPIN_NS = 3_000_000  # longer than the quiet between two edges of gate_peers.launch: the threads never sleep
MEDIAN_US, TAIL_US = 10.0, 50.0  # the budgets of the first launch
FAN_OUT = (1, 2, 4, 8)
ROUNDS = 5  # of gate-8gpu: every width once in each, so that all widths meet the same noise
EDGES_PER_ROUND = 25
SLOW_MOTION = 10  # the emulated clock runs so much slower: what eight calls cost this host's few cores must not count
FLAT = 1.3


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """One endless loop for each core, at normal priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _share_us(edges: Sequence[Sequence[Stamp]]) -> list[float]:
    """Launch to ioctl, of edges whose launch was stamped."""
    return [(edge[0].ioctl_ns - edge[0].launch_ns) / 1e3 for edge in edges if edge[0].launch_ns]


def _latency_rows(
    name: str, metric: str, edges: Sequence[Sequence[Stamp]], plain_us: Sequence[float] = (), *, note: str = ""
) -> Iterator[Row]:
    """`plain_us`: wakes of a listener without Valve, by the same launches, in turns: no listener hears sooner."""
    samples = _share_us(edges)
    seen = sorted((edge[0].seen_ns - edge[0].launch_ns) / 1e3 for edge in edges if edge[0].launch_ns)
    if plain_us:
        ours = [(edge[0].ioctl_ns - edge[0].seen_ns) / 1e3 for edge in edges if edge[0].launch_ns]
        yield row_of(name, f"of it, listener awake to ioctl, {metric}", "us", ours, None, note="Valve's own steps")
        yield row_of(name, f"a plain listener awake, {metric}", "us", plain_us, None, note="the floor")
    for judged, q, budget in (("p50", 0.5, MEDIAN_US), ("p99", 0.99, TAIL_US)):
        bound, woke = None if note else budget, round(percentile(seen, q), 2)
        text = note or "baseline: until the listener woke"
        if plain_us:
            text = f"baseline: a plain listener, in turns with ours, which woke after {woke}"
            woke = round(percentile(sorted(plain_us), q), 2)
        more = {"judged": judged, "baseline": woke, "note": text}
        yield row_of(name, f"launch to ioctl, {metric}, {judged}", "us", samples, bound, **more)


def bench_sleep() -> Iterator[Row]:
    run = GateRun(gpus=1, channels=8, edges=EDGES, plain=True)
    with node(Options()) as emulator:
        yield from _latency_rows("gate-sleep", "idle neighbours", *run_on(emulator.directory, run))
        with busy_neighbours():
            yield from _latency_rows("gate-sleep", "busy neighbours", *run_on(emulator.directory, run))


def bench_spin() -> Iterator[Row]:
    """Two threads spin (listener, issuer) beside the client and the emulated driver: each needs a core to itself."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    is_roomy = cores >= 4 and load < cores - 3
    note = "" if is_roomy else f"not judged: {cores} cores at load {load:.1f} leave none to each spinning thread"
    run = GateRun(gpus=1, channels=8, edges=EDGES, spin_ns=SPIN_NS)
    with node(Options()) as emulator:
        yield from _latency_rows("gate-spin", "idle neighbours", run_on(emulator.directory, run).edges, note=note)


def _closed_us(edges: Sequence[Sequence[Stamp]]) -> list[float]:
    """From the first ioctl to the end of the last one, over all GPUs of the edge, in time of the emulated card."""
    return [(max(s.done_ns for s in edge) - min(s.ioctl_ns for s in edge)) / 1e3 / SLOW_MOTION for edge in edges]


def fan_out(lock: str) -> Mapping[int, list[list[float]]]:
    """For each number of GPUs, the samples of each round."""
    found: dict[int, list[list[float]]] = {width: [] for width in FAN_OUT}
    knobs = {"lock": lock, "time_scale": str(1 / SLOW_MOTION)}
    with node(Options(gpus=max(FAN_OUT), knobs=knobs)) as emulator:
        for seed in range(ROUNDS):
            for width in FAN_OUT:
                run = GateRun(gpus=width, channels=8, edges=EDGES_PER_ROUND, seed=seed)
                found[width].append(_closed_us(run_on(emulator.directory, run).edges))
    return found


def _medians(samples: Mapping[int, list[list[float]]]) -> list[float]:
    return [percentile(sorted(itertools.chain(*samples[width])), 0.5) for width in FAN_OUT]


def _ratios(samples: Mapping[int, list[list[float]]]) -> list[float]:
    """Eight GPUs against one, round by round."""
    pairs = zip(samples[FAN_OUT[-1]], samples[FAN_OUT[0]], strict=True)
    return [percentile(sorted(wide), 0.5) / percentile(sorted(narrow), 0.5) for wide, narrow in pairs]


def _straightness(ys: Sequence[float]) -> float:
    """The squared correlation of the medians with the number of GPUs: 1 is a straight line."""
    count = len(FAN_OUT)
    mean_x, mean_y = sum(FAN_OUT) / count, sum(ys) / count
    cross = sum((x - mean_x) * (y - mean_y) for x, y in zip(FAN_OUT, ys, strict=True))
    return cross**2 / (sum((x - mean_x) ** 2 for x in FAN_OUT) * sum((y - mean_y) ** 2 for y in ys))


def rows_of_8gpu(patched: Mapping[int, list[list[float]]], stock: Mapping[int, list[list[float]]]) -> Iterator[Row]:
    one = _medians(patched)[0]
    yield row_of(
        "gate-8gpu",
        "8 GPUs against 1, device-only lock",
        "ratio",
        _ratios(patched),
        FLAT,
        judged="p50",
        note=f"paired rounds, clock slowed {SLOW_MOTION} times; one GPU {one:.0f} us",
    )
    medians = _medians(stock)
    text = ", ".join(f"{width}: {value:.0f}" for width, value in zip(FAN_OUT, medians, strict=True))
    yield row_of(
        "gate-8gpu",
        "stock lock grows in a straight line",
        "r2",
        [_straightness(medians)],
        0.95,
        better="higher",
        judged="p50",
        note=f"median us by GPUs: {text}",
    )


def bench_8gpu() -> Iterator[Row]:
    yield from rows_of_8gpu(fan_out("device-only"), fan_out("stock"))


def chart_of(patched: Mapping[int, list[list[float]]], stock: Mapping[int, list[list[float]]]) -> str:
    series = {"stock driver": _medians(stock), "one-word patch": _medians(patched)}
    points = {name: list(zip(FAN_OUT, medians, strict=True)) for name, medians in series.items()}
    shown = "median us of the card's time until every GPU of the service is closed (emulated driver)"
    return picture(curves(points, x_unit="GPUs of the online service", y_unit=shown))


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {
    "gate-sleep": bench_sleep,
    "gate-spin": bench_spin,
    "gate-8gpu": bench_8gpu,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="valve_tools.bench.gate", description="gate-8gpu, with its chart")
    parser.add_argument("--chart", type=Path, required=True, help="Write the SVG to this file.")
    options = parser.parse_args(arguments)
    patched, stock = fan_out("device-only"), fan_out("stock")
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    options.chart.write_text(chart_of(patched, stock))
    for row in rows_of_8gpu(patched, stock):
        print(f"{row.metric}: {row.p50:.3g} {row.unit} ({row.note})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
