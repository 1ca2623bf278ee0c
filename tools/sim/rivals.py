"""Rivals that have settings: the values that are tried for each, and the one that it runs with on the pages.

Which value is best is found by `valve replay rivals` on the traces that settings are chosen on, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from valve_tools.sim.machine import GIB
from valve_tools.sim.memory_policies import Prism, StaticMem, Uvm
from valve_tools.sim.pairs import Bound
from valve_tools.sim.rungs import step_ns
from valve_tools.sim.tuning import Combination, Context, Tuning, ours
from valve_tools.sim.world import GPREEMPT_STOP, Compute, MemoryPolicy, StopTimes

PRISM = "Channel+Prism"
XSCHED = "XSched+kvcached"
TIME_SLICE = "TimeSlice+kvcached"
DISK_BYTES_S = 5e9
START_UP_NS = 20_000_000_000
KVCACHED_PAGES = 10
KVCACHED_PAGE_MIB = 2
MS = 1_000_000
LAYER_KERNELS = 10
"""Kernels of one layer: products, attention, norms, copies."""
LAUNCH_NS = 10_000
"""Idle GPU time when the host learns of a finished kernel before it launches the next."""

Memory = Callable[[Context], MemoryPolicy]
Tuned = Callable[[Bound, Tuning], Tuning]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One rival under every value of its setting."""

    rival: str
    setting: str
    tried: Mapping[str, Combination]
    best: str
    """Under the papers' marks; found by the sweep, and a claim of its page holds it."""
    careful: str = ""
    """Under ours, where that is another."""

    @property
    def chosen(self) -> list[Combination]:
        """What the pages run."""
        found = [self.tried[self.best]]
        if self.careful:
            found.append(replace(self.tried[self.careful], name=f"{self.rival}, careful"))
        return found


def kvcached(share: float) -> Memory:
    """Each engine keeps at least so much of the pool, and never less than ten of kvcached's pages."""

    def memory(context: Context) -> MemoryPolicy:
        service, settings = context.bound.service, context.tuning.settings
        pages_mib = KVCACHED_PAGES * KVCACHED_PAGE_MIB * 2 * service.model.layers / service.tp
        return Prism(online_reserve=max(int(pages_mib / settings.handle_mib), round(share * context.solo.handles)))

    return memory


def static(minutes: int) -> Memory:
    """Offline gets the least that was free in the past so many minutes."""

    def memory(context: Context) -> MemoryPolicy:
        reload_ns = int(context.bound.job.model.weights_gib * GIB / DISK_BYTES_S * 1e9)
        return StaticMem(
            restart_ns=reload_ns + START_UP_NS, first_hour_peak=context.first_hour_peak, window_minutes=minutes
        )

    return memory


def stopped_by(stop: StopTimes, resume_ns: int) -> Tuned:
    return lambda _, tuning: replace(tuning, stop=replace(stop, resume_ns=resume_ns))


def resumed_after(resume_ns: int) -> Tuned:
    return lambda _, tuning: replace(tuning, stop=replace(tuning.stop, resume_ns=resume_ns))


def in_flight(commands: int, after_ms: int) -> Tuned:
    """XSched where the driver offers no preemption: the host holds commands back, those in flight run to their end.
    Fewer in flight are over sooner and leave the GPU idle between them more often."""

    def tuned(bound: Bound, tuning: Tuning) -> Tuning:
        kernels = LAYER_KERNELS * bound.job.model.layers
        kernel_ns = step_ns(bound.job, tuning.settings) / 2 / kernels
        stop = StopTimes(
            median_ns=(commands - 0.5) * kernel_ns,
            sigma=0.3,
            max_ns=commands * kernel_ns,
            resume_ns=50_000 + after_ms * MS,
        )
        gap_ns = 500_000 + round(kernels * LAUNCH_NS / commands)
        return replace(tuning, stop=stop, serial_gate=False, world={**tuning.world, "offline_gap_ns": gap_ns})

    return tuned


def slices(online_ms: float, offline_ms: float) -> Tuned:
    """The driver's default is 2 ms for both."""
    changes = {"slice_ns": round(online_ms * MS), "offline_slice_ns": round(offline_ms * MS)}
    return lambda _, tuning: replace(tuning, world={**tuning.world, **changes})


def rate(units_per_ms: int) -> Tuned:
    return lambda _, tuning: replace(tuning, world={**tuning.world, "tgs_units_per_ms": float(units_per_ms)})


def _one(name: str, compute: Compute, memory: Memory, tuned: Tuned = lambda _, tuning: tuning) -> Combination:
    return Combination(name=name, compute=compute, memory=memory, tuned=tuned)


SHARES = {"10 pages": 0.0, "10 %": 0.1, "20 %": 0.2, "40 %": 0.4, "60 %": 0.6, "80 %": 0.8}
LARGE = ("20 %", "40 %", "60 %")
AFTER_MS = {"at once": 0, "1 ms": 1, "5 ms": 5, "20 ms": 20}


def _resumed(name: str, memory: Memory) -> dict[str, Combination]:
    """GPreempt's stop; offline goes on so long after each launch of online is over."""
    return {
        words: _one(name, Compute.GPREEMPT, memory, stopped_by(GPREEMPT_STOP, GPREEMPT_STOP.resume_ns + after * MS))
        for words, after in AFTER_MS.items()
    }


SWEEPS = (
    Sweep(
        rival=PRISM,
        setting="kept for online",
        tried={words: _one(PRISM, Compute.CHANNEL, kvcached(share)) for words, share in SHARES.items()},
        best="40 %",
    ),
    Sweep(
        rival=XSCHED,
        setting="commands in flight, goes on after, kept for online",
        tried={
            f"{commands}, {after}, {words}": _one(
                XSCHED, Compute.GPREEMPT, kvcached(SHARES[words]), in_flight(commands, AFTER_MS[after])
            )
            for commands in (1, 4, 16)
            for after in ("at once", "5 ms")
            for words in LARGE
        },
        best="4, 5 ms, 40 %",
    ),
    Sweep(
        rival=TIME_SLICE,
        setting="slices of online and offline, kept for online",
        tried={
            f"{online_ms:g} / {offline_ms:g} ms, {words}": _one(
                TIME_SLICE, Compute.TIME_SLICE, kvcached(SHARES[words]), slices(online_ms, offline_ms)
            )
            for online_ms, offline_ms in ((2, 2), (30, 0.5), (30, 0.1))
            for words in LARGE
        },
        best="30 / 0.1 ms, 40 %",
    ),
    Sweep(
        rival="KernelPreempt+UVM",
        setting="thread blocks a ms",
        tried={
            str(units): _one("KernelPreempt+UVM", Compute.KERNEL_TGS, lambda _: Uvm(), rate(units))
            for units in (1250, 5000, 20_000)
        },
        best="5000",
    ),
    Sweep(
        rival="GPreempt+UVM",
        setting="goes on after",
        tried=_resumed("GPreempt+UVM", lambda _: Uvm()),
        best="1 ms",
        careful="5 ms",
    ),
    Sweep(
        rival="GPreempt+OurMem",
        setting="goes on after",
        tried=_resumed("GPreempt+OurMem", ours),
        best="1 ms",
        careful="5 ms",
    ),
    Sweep(
        rival="Channel+StaticMem",
        setting="least free of",
        tried={
            f"{minutes} min": _one("Channel+StaticMem", Compute.CHANNEL, static(minutes)) for minutes in (15, 60, 240)
        },
        best="60 min",
    ),
    Sweep(
        rival="Edge+OurMem",
        setting="goes on after",
        tried={
            words: _one("Edge+OurMem", Compute.EDGE, ours, resumed_after(200_000 + after * MS))
            for words, after in AFTER_MS.items()
        },
        best="1 ms",
        careful="5 ms",
    ),
)
