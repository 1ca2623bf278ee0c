"""One simulated GPU group: an online service on a trace, an offline job, a compute policy and a memory policy.

`run` builds the C core, lets the memory policy and the product's wake and cooldown policies answer its callbacks, and
returns what was measured. Same world, same result: every draw is keyed by the seed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from valve_tools.sim.machine import (
    Gpu,
    Model,
    Settings,
    Timing,
    blocks_per_handle,
    pool_handles,
    timing,
)
from valve_tools.sim.native import load
from valve_tools.sim.traces import JobLengths, Trace

NS = 1_000_000_000
IntArray = npt.NDArray[np.int64]


class Compute(enum.IntEnum):
    """Values of enum sim_compute."""

    ALONE = 0
    CHANNEL = 1
    GPREEMPT = 2
    KERNEL_STRICT = 3
    KERNEL_TGS = 4
    LAYER = 5
    EDGE = 6
    SAME_ENGINE = 7
    TIME_SLICE = 8


class SimEvent(enum.IntEnum):
    """Values of enum sim_event."""

    PRESSURE = 0
    TICK = 1
    WAKE = 2
    GAP = 3
    SHORT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGap:
    """Host time between two iterations, lognormal."""

    median_ns: float = 0.5e6
    sigma: float = 0.99
    """p99 is ten times the median: 5 ms."""
    max_ns: float = 20e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTimes:
    """How long a stop takes on one GPU, lognormal, and what resuming costs."""

    median_ns: float
    sigma: float
    max_ns: float
    hintless_ns: float = 0.0
    resume_ns: int = 0


CHANNEL_STOP = StopTimes(median_ns=0.35e6, sigma=0.406, max_ns=5e6, resume_ns=200_000)
"""p99 0.9 ms; 0.2 ms to enable."""
GPREEMPT_STOP = StopTimes(median_ns=0.1e6, sigma=0.538, max_ns=5e6, resume_ns=100_000)
"""p99 0.35 ms with its hint; 0.1 ms to switch back in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSide:
    """The online side."""

    model: Model
    tp: int = 1
    gap: HostGap = HostGap()
    skew_max: float = 0.0
    """Largest share of a busy period by which the last rank leaves the GPU later than the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSide:
    """The offline side: a batch job over `lengths`, or training steps."""

    model: Model
    tp: int = 1
    lengths: JobLengths | None = None
    budget_tokens: int = 2048
    train_tokens: int = 0
    """Tokens per optimiser step; 0 for a batch job."""
    train_memory_gib: float = 0.0
    train_efficiency: float = 0.45
    """Share of peak FLOP/s of a LoRA step (4 FLOP per parameter and token: forward and activation gradients)."""

    @property
    def is_training(self) -> bool:
        return self.train_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    trace: Trace
    service: OnlineSide
    job: OfflineSide | None
    settings: Settings = field(default_factory=Settings)
    compute: Compute = Compute.CHANNEL
    stop: StopTimes = CHANNEL_STOP
    hinted: bool = True
    gate_on_hint: bool = True
    """The stop begins when a hinted service's first request arrives, not at its first launch."""
    serial_gate: bool = True
    seed: int = 1
    seconds: float = 6 * 3600.0
    keep_prefix: bool = True
    remap_ns: int = 100_000
    map_ns: int = 40_000
    tgs_units_per_ms: float = 5000.0
    slice_ns: int = 2_000_000
    """The driver's default time slice; what offline has between two of online's follows."""
    offline_slice_ns: int = 2_000_000
    offline_gap_ns: int = 500_000
    log: bool = False

    @property
    def handles(self) -> int:
        """KV handles per GPU; the same with and without the job, so that solo sees the same pool."""
        weights = self.service.model.weights_gib / self.service.tp
        job = self.job
        if job is None:
            return pool_handles(weights, 1, self.settings)
        same = self.compute is Compute.SAME_ENGINE
        weights += 0.0 if same else job.model.weights_gib / job.tp
        return pool_handles(weights, 1 if same else 2, self.settings)


@dataclass(slots=True, kw_only=True)
class MemoryPolicy:
    """Says which engine gets which handles; answers the core through `HandleView`. By itself it shares nothing and
    decides nothing."""

    online_elastic: bool = False
    """Online maps free handles by itself when it needs them."""
    online_reserve: int = 0
    """Handles that an elastic online keeps mapped when they fall empty."""
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    """Used over mapped at which the core reports pressure; 0: never."""
    uvm: bool = False

    def begin(self, memory: HandleView) -> None: ...
    def on_pressure(self, now_ns: int, unmet_handles: int) -> None: ...
    def on_tick(self, now_ns: int) -> None: ...


class WakePolicy(Protocol):
    """The product's wake and cooldown decisions for one service."""

    def begin(self, memory: HandleView) -> None: ...
    def on_wake(self, now_ns: int, open_requests: int, quiet_ns: int) -> int: ...
    def on_gap(self, now_ns: int, gap_ns: int, held: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What one run measured."""

    ttft_ms: npt.NDArray[np.float64]
    """Per request that was begun; NaN where it never was."""
    waited_ms: npt.NDArray[np.float64]
    """From arrival to the end of the run."""
    tpot_ms: npt.NDArray[np.float64]
    """NaN where there is one token or the request did not finish."""
    gates_per_request: IntArray
    gate_at_ns: IntArray
    gate_took_ns: IntArray
    idle_ns: npt.NDArray[np.int64]
    """(n, 2): from, to."""
    usage: IntArray
    """Peak online handles in each second that saw a launch: (n, 2)."""
    totals: dict[str, int]
    reclaim_at_ns: IntArray
    kills: int
    handles: int
    seconds: float
    trace_rows: IntArray

    @property
    def offline_tokens_per_s(self) -> float:
        return self.totals["offline_useful_tokens"] / self.seconds

    @property
    def utilisation_gain(self) -> float:
        return self.totals["offline_busy_ns"] / NS / self.seconds


class HandleView:
    """The core's handles as a memory policy sees them."""

    def __init__(self, ffi: Any, lib: Any, sim: Any, world: World) -> None:
        self._ffi, self._lib, self._sim = ffi, lib, sim
        self._view = ffi.new("struct sim_memory *")
        self.world = world
        self.handles = world.handles
        self.reclaims: list[int] = []
        self.kills = 0

    def view(self) -> Any:
        """free, online_backed, online_busy, offline_backed, offline_busy."""
        self._lib.sim_memory(self._sim, self._view)
        return self._view

    def peak(self) -> int:
        """Most handles that online used at once since the last call."""
        return int(self._lib.sim_take_peak(self._sim))

    def take_free(self, handles: int) -> int:
        return int(self._lib.sim_take_free(self._sim, handles))

    def take_columns(self, columns: list[int]) -> int:
        return int(self._lib.sim_take_columns(self._sim, len(columns), self._ffi.new("int32_t[]", columns)))

    def delay(self, wait_ns: int) -> None:
        """What is taken from offline work next waits so long first."""
        self._lib.sim_delay_mappings(self._sim, wait_ns)

    def give(self, handles: int) -> int:
        return int(self._lib.sim_give(self._sim, handles))

    def back_offline(self, handles: int) -> int:
        return int(self._lib.sim_back_offline(self._sim, handles))

    def kill_offline(self, back_at_ns: int, took_ns: int) -> None:
        self.kills += 1
        self._lib.sim_kill_offline(self._sim, back_at_ns, took_ns)

    def tick_at(self, at_ns: int) -> None:
        self._lib.sim_set_tick(self._sim, at_ns)

    def set_cooldown(self, cooldown_ns: int, floor_ns: int) -> None:
        self._lib.sim_set_cooldown(self._sim, cooldown_ns, floor_ns)

    def columns(self) -> tuple[list[int], list[int]]:
        """Backed columns of offline and the free blocks of each."""
        column = np.empty(self.handles, dtype=np.int32)
        free = np.empty(self.handles, dtype=np.int32)
        n = self._lib.sim_offline_columns(self._sim, self.handles, *self._int32(column, free))
        return column[:n].tolist(), free[:n].tolist()

    def block_tables(self) -> tuple[IntArray, IntArray, IntArray]:
        """(ptr, column of each block in token order, tokens with KV) of every offline request."""
        world = self.world
        per_handle = blocks_per_handle(world.job.model, world.job.tp, world.settings) if world.job else 0
        cap = self.handles * per_handle
        block = [np.empty(cap, dtype=np.int32) for _ in range(3)]
        n = int(self._lib.sim_offline_blocks(self._sim, cap, *self._int32(*block)))
        ids = [np.empty(4096, dtype=np.int32) for _ in range(2)]
        count = int(self._lib.sim_offline_requests(self._sim, 4096, *self._int32(*ids)))
        ptr = np.searchsorted(block[0][:n], np.arange(count + 1))
        return ptr.astype(np.int64), block[2][:n].astype(np.int64), ids[1][:count].astype(np.int64)

    def _int32(self, *arrays: npt.NDArray[np.int32]) -> list[Any]:
        return [self._ffi.cast("int32_t *", self._ffi.from_buffer(array)) for array in arrays]


def run(world: World, memory_policy: MemoryPolicy, wake_policy: WakePolicy | None = None) -> Result:
    """One simulation from 0 to `world.seconds`."""
    ffi, lib = load()
    params = _params(ffi, world, memory_policy)
    trace = world.trace.first(world.seconds)
    arrive_ns = np.ascontiguousarray(trace.arrive_ns, dtype=np.int64)
    tokens = _int32(trace.in_tok, trace.out_tok)
    lengths = _lengths(world.job)
    failure: list[BaseException] = []
    answers: dict[int, Any] = {}

    def on_event(event: int, now_ns: int, a: int, b: int) -> int:
        if failure:
            return 0
        try:
            return int(answers[event](now_ns, a, b) or 0)
        except BaseException as error:
            failure.append(error)
            return 0

    callback = ffi.callback("sim_callback", on_event)
    sim = lib.sim_new(
        params,
        len(arrive_ns),
        ffi.cast("int64_t *", ffi.from_buffer(arrive_ns)),
        *(ffi.cast("int32_t *", ffi.from_buffer(column)) for column in tokens),
        len(lengths[0]),
        *(ffi.cast("int32_t *", ffi.from_buffer(column)) for column in lengths),
        callback,
    )
    if sim == ffi.NULL:
        raise MemoryError("the simulator could not be set up")
    try:
        memory = HandleView(ffi, lib, sim, world)
        answers.update(
            {
                SimEvent.PRESSURE: lambda now, a, b: memory_policy.on_pressure(now, 0),
                SimEvent.SHORT: lambda now, a, b: memory_policy.on_pressure(now, a),
                SimEvent.TICK: lambda now, a, b: memory_policy.on_tick(now),
            }
        )
        if wake_policy is not None:
            wakes = wake_policy
            answers[SimEvent.WAKE] = wakes.on_wake
            answers[SimEvent.GAP] = lambda now, a, b: wakes.on_gap(now, a, bool(b))
            wakes.begin(memory)
        memory_policy.begin(memory)
        failed = lib.sim_run(sim)
        if failure:
            raise failure[0]
        if failed:
            raise AssertionError(f"simulator invariant broken: {ffi.string(lib.sim_error(sim)).decode()}")
        return _result(ffi, lib, sim, trace, world, memory)
    finally:
        lib.sim_free(sim)


def _lengths(job: OfflineSide | None) -> list[npt.NDArray[np.int32]]:
    if job is None or job.lengths is None:
        return [np.ones(1, dtype=np.int32), np.ones(1, dtype=np.int32)]
    return _int32(job.lengths.in_tok, job.lengths.out_tok)


def _int32(*columns: IntArray) -> list[npt.NDArray[np.int32]]:
    return [np.ascontiguousarray(column, dtype=np.int32) for column in columns]


def _params(ffi: Any, world: World, policy: MemoryPolicy) -> Any:
    settings, service, job = world.settings, world.service, world.job
    p = ffi.new("struct sim_params *")
    p.seed = world.seed
    p.end_ns = int(world.seconds * NS)
    p.compute = int(world.compute)
    p.hinted = world.hinted
    p.gate_on_hint = world.gate_on_hint
    p.handles = world.handles
    p.block_tokens = settings.block_tokens
    p.blocks_per_handle = blocks_per_handle(service.model, service.tp, settings)
    p.offline_blocks_per_handle = p.blocks_per_handle
    _fill_timing(
        p.online,
        timing(
            service.model,
            service.tp,
            settings,
            budget_tokens=settings.online_budget_tokens,
            max_seqs=settings.online_max_seqs,
        ),
    )
    p.gap.median_ns, p.gap.sigma, p.gap.max_ns = service.gap.median_ns, service.gap.sigma, service.gap.max_ns
    p.gpus = service.tp
    p.serial_gate = world.serial_gate
    p.skew_max = service.skew_max
    p.stop_median_ns, p.stop_sigma, p.stop_max_ns = world.stop.median_ns, world.stop.sigma, world.stop.max_ns
    p.stop_hintless_ns, p.resume_ns = world.stop.hintless_ns, world.stop.resume_ns
    p.remap_ns, p.map_ns = world.remap_ns, world.map_ns
    p.online_elastic, p.offline_elastic = policy.online_elastic, policy.offline_elastic
    p.online_reserve = policy.online_reserve
    p.pressure_ratio = policy.pressure_ratio
    p.keep_prefix = world.keep_prefix
    p.uvm = policy.uvm
    handle_bytes = settings.handle_mib * (1 << 20)
    p.uvm_evict_ns = handle_bytes / 22e9 * 1e9 + 40_000
    p.uvm_fault_ns = handle_bytes / 3.7e9 * 1e9
    p.tgs_units_per_ms = world.tgs_units_per_ms
    p.slice_ns, p.offline_slice_ns = world.slice_ns, world.offline_slice_ns
    p.offline_gap_ns = world.offline_gap_ns
    p.trace = world.log
    if job is not None:
        _fill_job(p, job, settings)
    return p


def _fill_job(p: Any, job: OfflineSide, settings: Settings) -> None:
    gpu = settings.gpu
    p.job = 2 if job.is_training else 1
    p.offline_blocks_per_handle = blocks_per_handle(job.model, job.tp, settings)
    p.offline_layers = job.model.layers
    max_seqs = settings.offline_max_seqs
    _fill_timing(p.offline, timing(job.model, job.tp, settings, budget_tokens=job.budget_tokens, max_seqs=max_seqs))
    if job.is_training:
        p.train_step_ns = train_step_ns(job, gpu)
        p.train_step_tokens = job.train_tokens
        p.train_handles = int(job.train_memory_gib * 1024 / settings.handle_mib)


def train_step_ns(job: OfflineSide, gpu: Gpu) -> int:
    """One optimiser step."""
    flop = 4 * job.model.params * job.train_tokens
    return int(flop / (job.tp * gpu.flops * job.train_efficiency) * 1e9)


def _fill_timing(target: Any, source: Timing) -> None:
    for name in Timing.__slots__:
        setattr(target, name, getattr(source, name))


def _pairs(ffi: Any, read: Any, sim: Any) -> IntArray:
    cap = int(read(sim, 0, ffi.NULL, ffi.NULL))
    out = np.empty((2, max(cap, 1)), dtype=np.int64)
    read(sim, cap, *(ffi.cast("int64_t *", ffi.from_buffer(row)) for row in out))
    pairs: IntArray = out[:, :cap].T
    return pairs


def _result(ffi: Any, lib: Any, sim: Any, trace: Trace, world: World, memory: HandleView) -> Result:
    n = trace.requests
    first, last = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    lib.sim_online_times(sim, *(ffi.cast("int64_t *", ffi.from_buffer(a)) for a in (first, last)))
    totals = ffi.new("struct sim_totals *")
    lib.sim_totals(sim, totals)
    gates = _pairs(ffi, lib.sim_gates, sim)
    ttft = np.where(first > 0, (first - trace.arrive_ns) / 1e6, np.nan)
    many = (last > 0) & (trace.out_tok > 1)
    tpot = np.where(many, (last - first) / np.maximum(trace.out_tok - 1, 1) / 1e6, np.nan)
    until = np.where(last > 0, last, np.where(first > 0, int(world.seconds * NS), trace.arrive_ns - 1))
    at = np.sort(gates[:, 0])
    per_request = np.searchsorted(at, until, "right") - np.searchsorted(at, trace.arrive_ns, "left")
    rows = int(lib.sim_trace(sim, 0, ffi.NULL))
    log = np.empty((rows, 4), dtype=np.int64)
    lib.sim_trace(sim, rows, ffi.cast("int64_t *", ffi.from_buffer(log)) if rows else ffi.NULL)
    return Result(
        ttft_ms=ttft,
        waited_ms=((world.seconds * NS - trace.arrive_ns) / 1e6).astype(np.float64),
        tpot_ms=tpot,
        gates_per_request=np.maximum(per_request, 0),
        gate_at_ns=gates[:, 0],
        gate_took_ns=gates[:, 1],
        idle_ns=_pairs(ffi, lib.sim_idles, sim),
        usage=_pairs(ffi, lib.sim_usage, sim),
        totals={name: int(getattr(totals, name)) for name, _ in ffi.typeof("struct sim_totals").fields},
        reclaim_at_ns=np.asarray(memory.reclaims, dtype=np.int64),
        kills=memory.kills,
        handles=memory.handles,
        seconds=world.seconds,
        trace_rows=log,
    )
