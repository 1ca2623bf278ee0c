"""Which compute policy meets which memory policy, by name; each run starts here.

Sources: KernelPreempt is TGS, GPreempt is GPreempt with timeslices, layer is ConServe, edge is a stop-on-drain rival
without cooldown, Prism is kvcached, UVM is CUDA managed memory. docs/replay.md has their parameters; those that have
settings stand in rivals.py, each with the values that are tried.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from valve_tools.sim.memory_policies import AllOffline, Clairvoyant, FixedHeadroom, NoShare, Uvm, budget_plan
from valve_tools.sim.ours import ProductWake
from valve_tools.sim.pairs import Bound
from valve_tools.sim.rivals import SWEEPS
from valve_tools.sim.rungs import cut, rung_of, step_ns
from valve_tools.sim.tuning import Combination, Context, Tuning, ours
from valve_tools.sim.world import Compute, MemoryPolicy, Result, World, run

from valved.config import Config
from valved.model.ids import Remap

OURS = "Channel+OurMem"
SHIPPED = "Channel+OurMem as shipped"
HELPER = "Channel+OurMem by helper"
COOPERATIVE = "Channel+OurMem cooperative"
FIXED = "Channel+fixed 10 % headroom"
ORACLE = "Channel+clairvoyant"
BUDGET_ORACLE = "Channel+clairvoyant in budget"
SAME_ENGINE = "SameEnginePriority"

PRODUCT = Tuning()
JOB_HOUR_S = 3600.0
"""The job alone never changes what it does: an hour tells its speed."""
_alone: dict[bytes, float] = {}


def as_shipped(bound: Bound, tuning: Tuning) -> Tuning:
    """A default installation where the process has passed its trial; else it gets `by_way(Remap.COOPERATIVE)`."""
    return by_way(Remap.AUTO)(bound, tuning)


def by_way(way: Remap) -> Callable[[Bound, Tuning], Tuning]:
    """What moves on an installation that takes memory so: the column of the engine's own layout, K and V of every layer
    apart, in handles of the default size; and the reserve that the default settings make of it."""

    def tuned(bound: Bound, tuning: Tuning) -> Tuning:
        layers = max(bound.service.model.layers, 0 if bound.job.is_training else bound.job.model.layers)
        handles = 2 * layers
        column_mib = handles * Config().memory.handle_mib
        rung = rung_of(way, handles)
        settings = replace(tuning.settings, handle_mib=column_mib)
        reservation = Config().reservation_settings(column_mib << 20)
        return replace(
            tuning,
            settings=settings,
            reservation=replace(reservation, pressure_ratio=rung.pressure_ratio),
            offline_step_ns=step_ns(cut(bound.job, rung.step_tokens), settings) if rung.let_ns else 0,
            offline_step_tokens=rung.step_tokens,
            let_ns=rung.let_ns,
            world={**tuning.world, "remap_ns": rung.take_ns, "map_ns": rung.map_ns},
        )

    return tuned


def _oracle(context: Context) -> MemoryPolicy:
    return Clairvoyant(usage=context.solo.usage)


def _budget_oracle(context: Context) -> MemoryPolicy:
    per_hour = context.tuning.reservation.target_per_hour
    hold = budget_plan(context.solo.usage, int(context.bound.seconds), per_hour)
    return Clairvoyant(usage=context.solo.usage, hold=hold)


COMBINATIONS = (
    Combination(name="KernelPreempt strict+UVM", compute=Compute.KERNEL_STRICT, memory=lambda _: Uvm()),
    Combination(name="Channel+UVM", compute=Compute.CHANNEL, memory=lambda _: Uvm()),
    Combination(name="Layer+OurMem", compute=Compute.LAYER, memory=ours),
    *(one for sweep in SWEEPS for one in sweep.chosen),
    Combination(name=OURS, compute=Compute.CHANNEL, memory=ours, is_baseline=False),
    Combination(name=SHIPPED, compute=Compute.CHANNEL, memory=ours, is_baseline=False, tuned=as_shipped),
    Combination(name=HELPER, compute=Compute.CHANNEL, memory=ours, is_baseline=False, tuned=by_way(Remap.HELPER)),
    Combination(name=COOPERATIVE, compute=Compute.CHANNEL, memory=ours, is_baseline=False,
                tuned=by_way(Remap.COOPERATIVE)),
    Combination(name="Channel without hint+OurMem", compute=Compute.CHANNEL, memory=ours, hinted=False,
                is_baseline=False),
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
        job=cut(bound.job, tuning.offline_step_tokens),
        settings=tuning.settings,
        stop=tuning.stop,
        serial_gate=tuning.serial_gate,
        gate_on_hint=tuning.gate_on_hint,
        seed=seed,
        seconds=bound.seconds,
    )
    return replace(world, **{**tuning.world, **changes})  # type: ignore[arg-type]


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
    seconds = min(bound.seconds, JOB_HOUR_S)
    return run(world_of(bound, seed, tuning, trace=empty, compute=Compute.CHANNEL, seconds=seconds), AllOffline())


def alone_tokens_per_s(bound: Bound, seed: int, tuning: Tuning) -> float:
    """What `run_job_alone` makes, simulated once in a process however many services stand beside the same job."""
    asked = (bound.service, bound.job, tuning, seed, min(bound.seconds, JOB_HOUR_S))
    key = hashlib.sha256(pickle.dumps(asked)).digest()
    if key not in _alone:
        _alone[key] = run_job_alone(bound, seed, tuning).offline_tokens_per_s
    return _alone[key]


def run_combination(combination: Combination, context: Context) -> Result:
    tuning = combination.tuned(context.bound, context.tuning)
    context = replace(context, tuning=tuning)
    world = world_of(
        context.bound,
        context.seed,
        tuning,
        compute=combination.compute,
        hinted=combination.hinted,
    )
    wake = ProductWake(
        hinted=combination.hinted, cooldown=tuning.cooldown, by_arrivals=tuning.by_arrivals and not combination.hinted
    )
    return run(world, combination.memory(context), wake)
