"""Which compute policy meets which memory policy, by name; each run starts here.

Sources: KernelPreempt is TGS, GPreempt is GPreempt with timeslices, layer is ConServe, edge is a stop-on-drain rival
without cooldown, Prism is kvcached, UVM is CUDA managed memory. docs/replay.md has their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from valve_tools.sim.machine import GIB, Settings
from valve_tools.sim.memory_policies import (
    AllOffline,
    FixedHeadroom,
    NoShare,
    Plan,
    Prism,
    StaticMem,
    Uvm,
    budget_plan,
)
from valve_tools.sim.ours import OurMemory, ProductWake
from valve_tools.sim.pairs import Bound
from valve_tools.sim.world import CHANNEL_STOP, GPREEMPT_STOP, Compute, MemoryPolicy, Result, Stop, World, run

from valved.config import Config
from valved.policy.cooldown import CooldownSettings
from valved.policy.reservation import ReservationSettings

OURS = "Channel+OurMem"
SHIPPED = "Channel+OurMem as shipped"
PRISM = "Channel+Prism"
FIXED = "Channel+fixed 10 % headroom"
ORACLE = "Channel+clairvoyant"
BUDGET_ORACLE = "Channel+clairvoyant in budget"
SAME_ENGINE = "SameEnginePriority"
DISK_BYTES_S = 5e9
START_UP_NS = 20_000_000_000
KVCACHED_PAGES = 10
KVCACHED_PAGE_MIB = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a sensitivity run varies; the defaults are the product's."""

    reservation: ReservationSettings = field(default_factory=ReservationSettings)
    cooldown: CooldownSettings = field(default_factory=CooldownSettings)
    settings: Settings = field(default_factory=Settings)
    stop: Stop = CHANNEL_STOP
    serial_gate: bool = True
    gate_on_hint: bool = True
    offline_step_ns: int = 0
    """Memory is taken between two offline steps so long; 0: under the gate."""


PRODUCT = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """One pair under one seed, with its solo run, from which the clairvoyant and charitable policies learn."""

    bound: Bound
    seed: int
    solo: Result
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def first_hour_peak(self) -> int:
        usage = self.solo.usage
        return int(usage[usage[:, 0] < 3600, 1].max(initial=0))


Memory = Callable[[Context], MemoryPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    name: str
    compute: Compute
    memory: Memory
    stop: Stop | None = None
    """None: the tuning's."""
    hinted: bool = True
    is_baseline: bool = True
    same_model_only: bool = False
    tuned: Callable[[Bound, Tuning], Tuning] = lambda _, tuning: tuning


def as_shipped(bound: Bound, tuning: Tuning) -> Tuning:
    """What moves on a default installation: the column of the engine's own layout, K and V of every layer apart, in
    handles of the default size; and the reserve that the default settings make of it."""
    layers = max(bound.service.model.layers, 0 if bound.job.is_training else bound.job.model.layers)
    column_mib = 2 * layers * Config().memory.handle_mib
    return replace(
        tuning,
        settings=replace(tuning.settings, handle_mib=column_mib),
        reservation=Config().reservation_settings(column_mib << 20),
    )


def _prism(context: Context) -> MemoryPolicy:
    service, settings = context.bound.service, context.tuning.settings
    reserve_mib = KVCACHED_PAGES * KVCACHED_PAGE_MIB * 2 * service.model.layers / service.tp
    return Prism(online_reserve=int(reserve_mib / settings.handle_mib))


def _static(context: Context) -> MemoryPolicy:
    job = context.bound.job
    reload_ns = int(job.model.weights_gib * GIB / DISK_BYTES_S * 1e9)
    return StaticMem(restart_ns=reload_ns + START_UP_NS, first_hour_peak=context.first_hour_peak)


def _ours(context: Context) -> MemoryPolicy:
    return OurMemory(settings=context.tuning.reservation, step_ns=context.tuning.offline_step_ns)


def _oracle(context: Context) -> MemoryPolicy:
    return Plan(usage=context.solo.usage)


def _budget_oracle(context: Context) -> MemoryPolicy:
    per_hour = context.tuning.reservation.target_per_hour
    hold = budget_plan(context.solo.usage, int(context.bound.seconds), per_hour)
    return Plan(usage=context.solo.usage, hold=hold)


COMBINATIONS = (
    Combination(name="KernelPreempt+UVM", compute=Compute.KERNEL_TGS, memory=lambda _: Uvm()),
    Combination(name="KernelPreempt strict+UVM", compute=Compute.KERNEL_STRICT, memory=lambda _: Uvm()),
    Combination(name="GPreempt+UVM", compute=Compute.GPREEMPT, memory=lambda _: Uvm(), stop=GPREEMPT_STOP),
    Combination(name="Channel+UVM", compute=Compute.CHANNEL, memory=lambda _: Uvm()),
    Combination(name=PRISM, compute=Compute.CHANNEL, memory=_prism),
    Combination(name="Channel+StaticMem", compute=Compute.CHANNEL, memory=_static),
    Combination(name=OURS, compute=Compute.CHANNEL, memory=_ours, is_baseline=False),
    Combination(name=SHIPPED, compute=Compute.CHANNEL, memory=_ours, is_baseline=False, tuned=as_shipped),
    Combination(name="Channel without hint+OurMem", compute=Compute.CHANNEL, memory=_ours, hinted=False,
                is_baseline=False),
    Combination(name="Edge+OurMem", compute=Compute.EDGE, memory=_ours),
    Combination(name="Layer+OurMem", compute=Compute.LAYER, memory=_ours),
    Combination(name="GPreempt+OurMem", compute=Compute.GPREEMPT, memory=_ours, stop=GPREEMPT_STOP),
    Combination(name="Channel+fixed 5 % headroom", compute=Compute.CHANNEL, is_baseline=False,
                memory=lambda _: FixedHeadroom(share=0.05)),
    Combination(name=FIXED, compute=Compute.CHANNEL, memory=lambda _: FixedHeadroom(share=0.1), is_baseline=False),
    Combination(name="Channel+fixed 20 % headroom", compute=Compute.CHANNEL, is_baseline=False,
                memory=lambda _: FixedHeadroom(share=0.2)),
    Combination(name=ORACLE, compute=Compute.CHANNEL, memory=_oracle, is_baseline=False),
    Combination(name=BUDGET_ORACLE, compute=Compute.CHANNEL, memory=_budget_oracle, is_baseline=False),
    Combination(name=SAME_ENGINE, compute=Compute.SAME_ENGINE, memory=lambda _: NoShare(), same_model_only=True),
)  # fmt: skip
BY_NAME = {combination.name: combination for combination in COMBINATIONS}


def fits(combination: Combination, bound: Bound) -> bool:
    """Whether the combination exists for the pair: one engine needs one model, and a batch job."""
    same = bound.service.model == bound.job.model and not bound.job.is_training
    return same or not combination.same_model_only


def world_of(bound: Bound, seed: int, tuning: Tuning, **changes: object) -> World:
    world = World(
        trace=bound.trace,
        service=bound.service,
        job=bound.job,
        settings=tuning.settings,
        stop=tuning.stop,
        serial_gate=tuning.serial_gate,
        gate_on_hint=tuning.gate_on_hint,
        seed=seed,
        seconds=bound.seconds,
    )
    return replace(world, **changes)  # type: ignore[arg-type]


def run_solo(bound: Bound, seed: int, tuning: Tuning = PRODUCT) -> Result:
    """Online alone, in the pool that it has beside the job: what every increase is measured against."""
    return run(world_of(bound, seed, tuning, compute=Compute.ALONE), NoShare())


def run_own(bound: Bound, seed: int, tuning: Tuning = PRODUCT) -> Result:
    """Online on a GPU of its own, with all of its memory: what sharing as a whole is measured against."""
    return run(world_of(bound, seed, tuning, compute=Compute.ALONE, job=None), NoShare())


def run_job_alone(bound: Bound, seed: int, tuning: Tuning = PRODUCT) -> Result:
    """The job alone on the GPU: what a saved GPU is measured against."""
    nothing = np.empty(0, dtype=np.int64)
    empty = replace(bound.trace, arrive_ns=nothing, in_tok=nothing, out_tok=nothing)
    seconds = min(bound.seconds, 3600.0)
    return run(world_of(bound, seed, tuning, trace=empty, compute=Compute.CHANNEL, seconds=seconds), AllOffline())


def run_combination(combination: Combination, context: Context) -> Result:
    tuning = combination.tuned(context.bound, context.tuning)
    context = replace(context, tuning=tuning)
    world = world_of(
        context.bound,
        context.seed,
        tuning,
        compute=combination.compute,
        stop=combination.stop or tuning.stop,
        hinted=combination.hinted,
    )
    wake = ProductWake(hinted=combination.hinted, cooldown=tuning.cooldown)
    return run(world, combination.memory(context), wake)
