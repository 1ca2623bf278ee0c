"""Which traces are swept, so much of each, and the work spread over processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from valve_tools.lab.granted.engine import Bench, Load
from valve_tools.lab.granted.sweep import CellResult, sweep
from valve_tools.replay.work import Workers, silent, spread
from valve_tools.sim.generator import generate
from valve_tools.sim.traces import Trace, TraceError, read_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """So much of a trace, thinned to one replica's share."""

    trace: str
    thin: int = 1
    seconds: float | None = None

    @property
    def label(self) -> str:
        return self.trace if self.thin == 1 else f"{self.trace}/{self.thin}"


PARTS = (
    Part(trace="azure2023_conv_first2100s", thin=16, seconds=900),
    Part(trace="azure2023_conv_first2100s", thin=4, seconds=300),
    Part(trace="inst02_deepseekr1_c65_t0", seconds=1800),
    Part(trace="mooncake_conv_first2100s", thin=8, seconds=600),
    Part(trace="inst10_msmall_c7_t129600", seconds=400),
    Part(trace="azure2023_code_first2100s", thin=4),
    Part(trace="rl_rollout_p180", seconds=1080),
    Part(trace="inst07_msmall_c18_t561600", seconds=1800),
    Part(trace="inst06_msmall_c31_t432000", seconds=400),
)
"""So long that one GPU sees some hundred requests, and so short that all of it takes minutes."""
QUICK = (("chat", 1, 400.0), ("tiny", 1, 300.0), ("rollout", 1, 600.0))
QUICK_COSTS_MS = (0.5, 4.0)


def load_of(folder: Path, part: Part) -> Load:
    file = next(
        (folder / f"{part.trace}{end}" for end in (".csv.gz", ".csv") if (folder / f"{part.trace}{end}").is_file()),
        None,
    )
    trace = read_file(file) if file is not None else None
    if not isinstance(trace, Trace):
        raise TraceError(f"{folder} holds no request trace {part.trace}")
    return Load.of(trace.thinned(part.thin), part.seconds)


Gaps = tuple[float | None, ...]


def of_task(one: tuple[Load, float], gaps: Gaps | None = None) -> list[CellResult]:
    """The cells of one load at one cost."""
    load, cost_ms = one
    if gaps is None:
        return sweep(load, Bench.h100(), costs=(cost_ms,))
    return sweep(load, Bench.h100(), costs=(cost_ms,), gaps=gaps)


def figures(
    loads: Iterable[Load], costs: Iterable[float], jobs: int, gaps: Gaps | None = None
) -> Iterator[list[CellResult]]:
    """The cells of each load; a trace is long, so what is finished is handed over at once."""
    work, prices = partial(of_task, gaps=gaps), tuple(costs)
    for load in loads:
        found = spread(work, [(load, cost_ms) for cost_ms in prices], silent, Workers(processes=jobs))
        yield [cell for cells in found for cell in cells]


def quick() -> list[CellResult]:
    """A part of the sweep over generated traces: what a test can wait for."""
    traces = {trace.name: trace for trace in generate().traces}
    loads = [Load.of(traces[name].thinned(thin), seconds) for name, thin, seconds in QUICK]
    return [cell for cells in figures(loads, QUICK_COSTS_MS, 1, (100.0,)) for cell in cells]


def sources() -> str:
    """A hash of what decided and simulated."""
    import valve_hook.policy
    import valve_tools.lab.granted

    digest = hashlib.sha256()
    for package in (valve_hook.policy, valve_tools.lab.granted):
        for path in sorted(Path(str(package.__file__)).parent.glob("*.py")):
            if path.name != "page.py":
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
