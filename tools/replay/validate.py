"""`valve replay validate`: the simulator against the product's own binaries on the emulated GPU.

The same drawn arrivals are served twice: in real time by the demo's service beside its batch job under valved, and in
the simulator with the timings that the service was told. Two figures of the machine are measured and given to the
simulator: how long a stop takes, and what an iteration costs beyond those timings when the service runs alone.
Simulator and service each find for themselves which work is stopped, when, how often, what it costs and what it leaves.

The rule, set before any run: at least ten seeds; each is served alone, shared, and alone again; a seed whose two runs
alone differ by more than 3 % in mean TTFT or mean TPOT was disturbed from outside and is dropped, and no other is; of
the rest, the median of the ratios with its 95 % interval by their order, judged by the worse end. An interval wider
than the mark, or fewer than six seeds left, is void: neither a pass nor a miss. Everything takes five times as long as
in the model, so that what this machine adds is small beside it.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from valve_tools.demo.command import perform
from valve_tools.demo.figures import DemoRun, Latency
from valve_tools.demo.rounds import UNIT_US, RoundsPlan
from valve_tools.replay.report import Cell, Report, ReportTable
from valve_tools.replay.work import TellProgress
from valve_tools.sim.machine import GIB, Gpu, Model, Settings
from valve_tools.sim.memory_policies import NoShare
from valve_tools.sim.metrics import Claim, at_most, void
from valve_tools.sim.ours import OurMemory, ProductWake
from valve_tools.sim.traces import NS, Trace
from valve_tools.sim.world import Compute, HostGap, OfflineSide, OnlineSide, Result, StopTimes, World, run

AGREES = 0.10
FEWEST_SEEDS, FEWEST_KEPT = 10, 6
DISTURBED = 0.03
COVERS = 0.95
SCALE = 5.0
"""Times, the stop's excepted: that is the driver's."""
PREFILL_US, DECODE_US, SEQUENCE_US, GAP_MS = 40.0 * SCALE, 10_000.0 * SCALE, 50.0 * SCALE, 0.5 * SCALE
GAP_SIGMA = 0.5
"""The service's host gaps; tools/demo/online.c has the sigma."""
RATE, BURST = 1.5, 4.0
FEWEST_PROMPT = 256
"""Prompts that cost at least a decode step: below that the two engines batch differently."""
JUDGED = ("preemptions", "harvested share of time", "TTFT ms", "TPOT ms")
ALONE = ("TTFT ms, alone", "TPOT ms, alone")
FIGURES = (*JUDGED, *ALONE)
TINY_GPU = Gpu(
    name="emulated",
    memory_gib=78.0,
    bandwidth_bytes_s=GIB / (DECODE_US / 1e6),
    flops=2e9 / (PREFILL_US / 1e6),
    linear_efficiency=1.0,
    stream_efficiency=1.0,
    kv_efficiency=1.0,
    seq_ns=SEQUENCE_US * 1e3,
)
TINY = Model(name="demo", params=1e9, layers=1, hidden=0, weights_gib=1.0, kv_kib_per_token=0.125)
"""Weights that a decode step reads in `DECODE_US`, parameters that make a prompt token `PREFILL_US`."""
SETTINGS = Settings(gpu=TINY_GPU, lm_head_ns=0.0, online_budget_tokens=16_384)
JOB = OfflineSide(
    model=TINY,
    train_tokens=round(UNIT_US / (2 * PREFILL_US)),
    train_memory_gib=1.0,
    train_efficiency=1.0,
)
"""Steps as long as a unit of the demo's batch job: 4 FLOP a parameter and token, of which a prompt costs 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One seed: each figure on the emulated GPU and in the simulator."""

    seed: int
    emulated: dict[str, float]
    simulated: dict[str, float]
    again: dict[str, float]
    """The service alone once more, after the shared run."""
    load: float = 0.0
    """Runnable processes per CPU of the machine while the emulated GPU kept real time, at the end of the run."""

    def ratio(self, figure: str) -> float:
        return self.simulated[figure] / self.emulated[figure]

    @property
    def apart(self) -> float:
        """By how much the runs alone, before and after, differ."""
        return max(abs(self.again[name] / self.emulated[name] - 1) for name in ALONE)

    @property
    def is_disturbed(self) -> bool:
        return self.apart > DISTURBED


@dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """A median with the interval that the order of the values gives it."""

    median: float
    low: float
    high: float


def middle(values: Sequence[float]) -> Middle:
    """The narrowest pair of order statistics that covers the median with at least 95 %; all of the values where none
    does."""
    ordered, n = sorted(values), len(values)
    outside = 0
    for cut in range(n // 2):
        total = sum(math.comb(n, i) for i in range(cut + 1))
        if 1 - 2 * total / 2**n < COVERS:
            break
        outside = cut
    return Middle(median=float(np.median(ordered)), low=ordered[outside], high=ordered[n - 1 - outside])


def arrivals(seed: int, seconds: float) -> Trace:
    """Bursty arrivals (hyperexponential gaps) of short chats, drawn."""
    rng = np.random.default_rng(seed)
    fast = 0.5 * (1 + ((BURST - 1) / (BURST + 1)) ** 0.5)
    count = int(3 * RATE * seconds) + 10
    phase = np.where(rng.random(count) < fast, fast, 1 - fast)
    at = np.cumsum(rng.exponential(1.0, count) / (2 * phase * RATE))
    at = at[at < seconds] * SCALE
    prompts = np.clip(rng.lognormal(np.log(400), 0.5, len(at)), FEWEST_PROMPT, 1500)
    answers = np.clip(rng.lognormal(np.log(20), 0.6, len(at)), 2, 120)
    return Trace(
        name=f"drawn-{seed}",
        arrive_ns=(at * NS).astype(np.int64),
        in_tok=prompts.astype(np.int64),
        out_tok=answers.astype(np.int64),
    )


def run_validation(seconds: float, seeds: Sequence[int], progress: TellProgress) -> Report:
    found = []
    progress("validate", 0, len(seeds))
    for seed in seeds:
        found.append(compare(arrivals(seed, seconds), seed, seconds))
        progress("validate", len(found), len(seeds))
    return report(found, seconds, seeds)


def compare(trace: Trace, seed: int, seconds: float) -> Compared:
    with tempfile.TemporaryDirectory(prefix="valve-validate-") as scratch:
        folder = Path(scratch)
        path = folder / "arrivals.csv"
        rows = zip(trace.arrive_ns / NS, trace.in_tok, trace.out_tok, strict=True)
        path.write_text("t_s,in_tok,out_tok\n" + "".join(f"{at:.6f},{prompt},{out}\n" for at, prompt, out in rows))
        order = ("alone", "valve", "alone")
        plan = RoundsPlan(seconds=seconds * SCALE, order=order, trace=path, seed=seed, timings=_timings())
        (alone, valve, again), units_per_s = perform(plan, folder, quiet=True)
    after = Latency.of(again.requests).values
    return Compared(
        seed=seed,
        again={name: after[f"{name[:4].lower()}-mean"] for name in ALONE},
        emulated=_emulated(alone, valve, units_per_s),
        simulated=_simulated(trace, alone, valve, seed),
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
    )


def _timings() -> tuple[str, ...]:
    named = {"prefill-us": PREFILL_US, "decode-us": DECODE_US, "sequence-us": SEQUENCE_US, "gap-ms": GAP_MS}
    return tuple(word for name, value in named.items() for word in (f"--{name}", str(value)))


def _emulated(alone: DemoRun, valve: DemoRun, units_per_s: float) -> dict[str, float]:
    before, after = Latency.of(alone.requests).values, Latency.of(valve.requests).values
    return {
        "preemptions": float(len(valve.gates)),
        "harvested share of time": valve.units / units_per_s / valve.wall_s,
        "TTFT ms": after["ttft-mean"],
        "TTFT ms, alone": before["ttft-mean"],
        "TPOT ms": after["tpot-mean"],
        "TPOT ms, alone": before["tpot-mean"],
    }


def _simulated(trace: Trace, alone: DemoRun, valve: DemoRun, seed: int) -> dict[str, float]:
    told = _world(trace, valve, seed, host_ms=GAP_MS)
    measured_ms = Latency.of(alone.requests).values["tpot-mean"]
    # The median gap at which the service alone takes as long per token as it took: sleep, launches, events.
    host_ms = GAP_MS + max(0.0, measured_ms - _mean(_alone(told), "tpot_ms")) / math.exp(GAP_SIGMA**2 / 2)
    world = _world(trace, valve, seed, host_ms=host_ms)
    shared, solo = run(world, OurMemory(), ProductWake(hinted=True)), _alone(world)
    return {
        "preemptions": float(len(shared.gate_at_ns)),
        "harvested share of time": shared.utilisation_gain,
        "TTFT ms": _mean(shared, "ttft_ms"),
        "TTFT ms, alone": _mean(solo, "ttft_ms"),
        "TPOT ms": _mean(shared, "tpot_ms"),
        "TPOT ms, alone": _mean(solo, "tpot_ms"),
    }


def _alone(world: World) -> Result:
    return run(replace(world, compute=Compute.ALONE), NoShare())


def _world(trace: Trace, valve: DemoRun, seed: int, host_ms: float) -> World:
    took = np.array([gate.total_ms for gate in valve.gates]) * 1e6
    return World(
        trace=trace,
        service=OnlineSide(model=TINY, gap=HostGap(median_ns=host_ms * 1e6, sigma=GAP_SIGMA)),
        job=JOB,
        settings=SETTINGS,
        stop=StopTimes(
            median_ns=float(np.median(took)),
            sigma=float(np.std(np.log(took))),
            max_ns=float(took.max()),
            resume_ns=200_000,
        ),
        gate_on_hint=False,  # the demo's service launches as soon as it has told its hint
        seed=seed,
        seconds=valve.wall_s,
    )


def _mean(result: Result, figure: str) -> float:
    return float(np.nanmean(getattr(result, figure)))


def report(found: Sequence[Compared], seconds: float, seeds: Sequence[int]) -> Report:
    """Also for figures that were measured elsewhere."""
    kept = [one for one in found if not one.is_disturbed]
    dropped = ", ".join(f"{one.seed} ({100 * one.apart:.1f} %)" for one in found if one.is_disturbed)
    rows: list[tuple[Cell, ...]] = []
    for one in found:
        words = f"{one.seed}, dropped" if one.is_disturbed else str(one.seed)
        rows += [(words, name, one.emulated[name], one.simulated[name], one.ratio(name)) for name in FIGURES]
        rows.append((words, "alone before and after differ by %", 100 * one.apart, None, None))
        rows.append((words, "processes per CPU", one.load, None, None))
    return Report(
        name="validate",
        title="Validation: the simulator against the product on the emulated GPU",
        summary=(
            f"{seconds:g} s of drawn arrivals, {SCALE:g} times as slow, served in real time by the demo's service and "
            "batch job under valved on the emulated GPU, and by the simulator with the same timings. The time of a "
            "stop, and what an iteration takes beyond its timings when the service runs alone, are measured there and "
            "given to the simulator; everything else is predicted.",
            f"The rule, set beforehand: at least {FEWEST_SEEDS} seeds; one whose runs alone, before and after, differ "
            f"by more than {DISTURBED:.0%} in mean TTFT or TPOT is dropped, and no other; medians of the rest with "
            "their 95 % interval, judged by the worse end; wider than the mark, or fewer than "
            f"{FEWEST_KEPT} seeds left, is void, which is no pass. Dropped here: {dropped or 'none'}.",
        ),
        claims=tuple(_judge(name, kept, len(found)) for name in JUDGED),
        tables=(
            ReportTable(
                title="Figures", columns=("seed", "figure", "emulated", "simulated", "ratio"), rows=tuple(rows)
            ),
        ),
        data={"seeds": [asdict(one) for one in found]},
        seeds=tuple(seeds),
    )


def _judge(name: str, kept: Sequence[Compared], seeds: int) -> Claim:
    claim, bound = f"{name}: simulated over emulated", 1 + AGREES
    if seeds < FEWEST_SEEDS or len(kept) < FEWEST_KEPT:
        return void(claim, "validate", bound, f"{len(kept)} of {seeds} seeds undisturbed")
    found = middle([one.ratio(name) for one in kept])
    note = f"median {found.median:.3f}, {found.low:.3f} to {found.high:.3f}, {len(kept)} of {seeds} seeds"
    if found.high - found.low > AGREES:
        return void(claim, "validate", bound, f"wider than the mark: {note}")
    return at_most(claim, "validate", max(found.high, 2 - found.low), bound, note)
