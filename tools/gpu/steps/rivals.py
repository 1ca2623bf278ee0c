"""Other ways to share a GPU, in the same run: what each does to the online stand-in, and what offline work gets.

Every rival gets the same work: 1 ms online kernels at half load beside full-occupancy offline kernels of 5 ms.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable

from valve_tools.gpu.errors import LabRefused
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict, figures
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.steps.calls import SET_TIMESLICE
from valve_tools.gpu.steps.gated import REMAP
from valve_tools.gpu.steps.memory import COST
from valve_tools.gpu.steps.pause import duty

LOW_US, HIGH_US = 1, 1_000_000  # what GPreempt gives to its low and its high priority


def outcome(rig: Rig, shared: Figure, offline_per_s: float, *, note: str = "") -> LabOutcome:
    """A rival against running alone, measured in the same minute."""
    alone = duty(rig)
    slower = {f"p{q * 100:g}": shared.at(q) / alone.at(q) for q in (0.5, 0.99)}
    return LabOutcome(
        verdict=LabVerdict.OK,
        detail=f"1 ms kernels [us]: alone {alone.words()}; shared {shared.words()} ({slower['p50']:.2f}x, p99 "
        f"{slower['p99']:.2f}x); offline {offline_per_s:.0f} kernels/s{note}",
        figures={"alone_us": alone, "shared_us": shared},
        answers={
            **{f"slower_{name}": round(value, 3) for name, value in slower.items()},
            "offline_per_s": round(offline_per_s, 1),
        },
    )


def beside(rig: Rig, *more: Callable[[Workload], list[str]]) -> tuple[Figure, float]:
    """The online stand-in beside offline work: its latencies, and offline kernels per second."""
    with rig.workload("alu", rig.effort.ms(30000)) as work:
        flags = [flag for make in more for flag in make(work)]
        start, before = time.monotonic(), work.beat.launches
        shared = duty(rig, *flags)
        rate = (work.beat.launches - before) / (time.monotonic() - start)
    return shared, rate


@experiment("R1", seconds=45, decides="the baseline that everybody knows")
def r1(rig: Rig) -> LabOutcome:
    """Plain time slicing between processes"""
    shared, rate = beside(rig)
    return outcome(rig, shared, rate)


@experiment(
    "R2",
    seconds=45,
    decides="what co-location in one process would give",
    silicon="the emulated GPU knows no stream priorities",
)
def r2(rig: Rig) -> LabOutcome:
    """Stream priorities inside one process"""
    found = {}
    for mate in ("same", "low"):
        with rig.workload("duty", rig.effort.ms(3000), "--mate", mate) as work:
            found[mate] = Figure(samples=tuple(rig.finish(work)["latency_us"]))
    alone = duty(rig)
    words = "; ".join(f"{mate} priority {figure.words()}" for mate, figure in found.items())
    return LabOutcome(
        verdict=LabVerdict.OK,
        detail=f"one process, two streams; 1 ms kernels [us]: alone {alone.words()}; offline stream of {words}",
        figures={"alone_us": alone, **{f"{mate}_us": figure for mate, figure in found.items()}},
    )


@experiment(
    "R3",
    seconds=60,
    decides="what concurrency without preemption costs online work",
    silicon="MPS exists on a card only",
)
def r3(rig: Rig) -> LabOutcome:
    """MPS"""
    if not shutil.which("nvidia-cuda-mps-control"):
        return LabOutcome(verdict=LabVerdict.SKIPPED, detail="nvidia-cuda-mps-control is not installed here")
    pipe = rig.folder / "mps"
    pipe.mkdir(exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **env}, check=True, timeout=30)
    try:
        with rig.spins.also_in_environment(env):
            shared, rate = beside(rig)
    finally:  # the daemon that we started, by its own pipe folder
        stop = subprocess.Popen(["nvidia-cuda-mps-control"], env={**os.environ, **env}, stdin=subprocess.PIPE)
        stop.communicate(b"quit\n", timeout=60)
    return outcome(rig, shared, rate, note="; one context, no preemption")


def set_slice(rig: Rig, work: Workload, us: int) -> int:
    """The status of giving a workload's compute group another time slice, on its passed descriptor."""
    with rig.probe(work, path="b") as probe:
        tsg = next(c["tsg"] for c in probe.do("list")["channels"] if 1 <= c["engine"] <= 8)
        return probe.control("theirs", str(tsg), SET_TIMESLICE, struct.pack("<Q", us))[0]


@experiment("R4", seconds=60, decides="the fallback rung below channel control")
def r4(rig: Rig) -> LabOutcome:
    """Time slices of 1 us against 1 s (the GPreempt and XSched way)"""
    with rig.workload("alu", rig.effort.ms(30000)) as offline:
        try:
            low = set_slice(rig, offline, LOW_US)
        except LabRefused as error:
            return LabOutcome(verdict=LabVerdict.REFUSED, detail=f"the slice could not be set: {error}")
        start, before = time.monotonic(), offline.beat.launches
        with rig.workload("duty", rig.effort.ms(3000)) as online:
            high = set_slice(rig, online, HIGH_US)
            shared = Figure(samples=tuple(rig.finish(online)["latency_us"]))
        rate = (offline.beat.launches - before) / (time.monotonic() - start)
    if low:
        return LabOutcome(verdict=LabVerdict.REFUSED, detail=f"slice of {LOW_US} us: status {low:#x}")
    return outcome(rig, shared, rate, note=f"; offline slice {LOW_US} us, online {HIGH_US} us (status {high:#x})")


@experiment("R5", seconds=45, decides="the last rung: drain of what is queued bounds it")
def r5(rig: Rig) -> LabOutcome:
    """Launch gating in the offline process (the TGS way)"""
    shared, rate = beside(rig, lambda work: ["--gate", str(work.beat_path)])
    return outcome(rig, shared, rate, note="; offline launches held while an online kernel runs")


@experiment("R6", seconds=30, decides="what page-wise reclaim would cost")
def r6(rig: Rig) -> LabOutcome:
    """Map and unmap in 2 MiB handles (the kvcached way)"""
    total = rig.effort.mib(1024)
    with rig.workload("idle", 120_000, helper=True) as work:
        cost = work.helper().ask_json(f"cost 2 {total}", patience_s=90)
    if cost["error"]:
        return LabOutcome(verdict=LabVerdict.BAD, detail=f"CUDA error {cost['error']}")
    shown = figures(cost, *COST)
    remap = sum(shown[f"{call}_us"].at(0.5) for call in REMAP)
    return LabOutcome(
        verdict=LabVerdict.OK,
        detail=f"{cost['handles']} handles of 2 MiB [us]: "
        + "; ".join(f"{name[:-3]} {figure.words()}" for name, figure in shown.items()),
        figures=shown,
        answers={"remap_us": round(remap, 1), "per_gib_ms": round(remap * 512 / 1e3, 1)},
    )


BATCH = ExperimentBatch(
    name="rivals", about="other ways to share a GPU, on the same work", experiments=(r1, r2, r3, r4, r5, r6)
)
