"""A look at the whole node: what `valve status`, the metrics and the API show. Field names are those of node.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from valved.model.events import Event
from valved.model.ids import Mode, Role
from valved.model.plain import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramState:
    bound_us: tuple[float, ...]
    count: tuple[int, ...]
    sum_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    version: str
    branch: int
    known: bool
    open_modules: bool
    device_only_lock: bool | None = None  # None: not measured yet

    @property
    def blindness(self) -> str:
        """Why valved cannot see or stop anything that this driver runs; empty: it can."""
        if self.known:
            return ""
        if not self.version:
            return "valved found no NVIDIA driver when it began, so it could not stop offline work"
        return f"valved does not know the NVIDIA driver {plain(self.version)}, so it could not stop offline work"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    index: int
    uuid: str
    name: str
    gated: bool
    channels: int
    reach: str
    reach_reason: str
    holders: int
    gated_ns: int
    harvest_ns: int
    preemptions: int
    preempt_latency: HistogramState
    total_bytes: int
    used_bytes: int
    kept_bytes: int = 0  # offline work leaves so much free for online services that will need it
    guarded_because: str = ""  # the processes that use it without Valve


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedState:
    """Granted time: what an online service offers, and what came of it."""

    slo: str = ""  # the target that its owner stated
    grant: bool = False  # and consents to pauses within it
    share_weights: bool = False  # consents to trainers that map its weights
    words: str = ""  # the same for people, with what came of it
    grants: int = 0
    broken: int = 0  # of them, that a launch fell into
    granted_ns: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # requests of its hook, by reason
    worth: str = ""  # what granting would give, or why that is unknown, for people
    worth_points: float | None = None  # of a GPU, for each ms of tpot given, at most; None: unknown
    rung: str = ""  # by which pauses are given


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    id: int
    name: str
    role: Role
    gpus: tuple[int, ...]
    busy: bool
    since_ns: int
    cooldown_ns: int
    hinted: bool
    open_requests: int
    preemptions: int
    requests: int
    max_preemptions_per_request: int
    delay_ns: int
    harvest_ns: int
    useful_tokens: int
    pids: tuple[int, ...]
    state: str
    preemptions_per_request: tuple[int, ...]
    busy_ns: int = 0  # online: time in which it held its GPUs
    idle_ns: int = 0  # and in which it left them
    granted: GrantedState = GrantedState()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    id: int
    pid: int
    comm: str
    role: Role
    service: int
    abi: int
    build: str
    channels: int
    notes: tuple[str, ...]
    watcher_alive: bool
    submitted: int
    busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersState:
    gates: int
    wakes: int
    wake_refused: int
    gate_failures: int
    clients: int
    refused: int
    malformed: int
    refusals: Mapping[str, int]
    restarts: int
    channels_enabled_on_exit: int
    stamps_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryState:
    """Handles of one GPU's pool."""

    index: int
    handles: int
    free: int
    moving: int
    orphaned: int
    online: int
    offline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One attached engine, in its own words where they are claims."""

    service: int
    name: str
    role: Role
    mode: str
    blocks: int
    backed_blocks: int
    used_blocks: int
    wanted_blocks: int
    columns: int
    column_bytes: int
    headroom_columns: int
    tau_ns: int
    reclaims_per_hour: float
    lost_blocks: int
    lost_tokens: int
    hit_requests: int
    dropped_tokens: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseState:
    name: str
    latency: HistogramState


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialState:
    """How memory is taken from one process on one GPU, and what its trial has shown."""

    service: int
    pid: int
    gpu: int
    rung: str
    outcome: str
    reason: str  # empty where it passed
    took_ns: int  # of the driver call that was tried; 0: it has not come back


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    managed: bool = False
    handle_bytes: int = 0
    remap: str = ""
    target_per_hour: float = 0.0
    gpus: tuple[GpuMemoryState, ...] = ()
    engines: tuple[EngineState, ...] = ()
    phases: tuple[PhaseState, ...] = ()
    reclaims: int = 0
    reclaims_short: int = 0
    reclaimed_bytes: int = 0
    lent_bytes: int = 0
    returned_bytes: int = 0
    full: int = 0
    late_orders: int = 0
    demotions: int = 0
    trials_passed: int = 0
    trials_failed: int = 0
    lets: int = 0
    lets_again: int = 0
    let_ns: int = 0
    trials: tuple[TrialState, ...] = ()
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaverState:
    pid: int
    waits_for: str
    until_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenState:
    """A file of valved that its last attempt could not write, and what is lost by it."""

    path: str
    error: str
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    version: str
    pid: int
    monotonic_ns: int
    mode: Mode
    paused: bool
    paused_by: str
    draining: bool
    driver: DriverState
    gpus: tuple[GpuState, ...]
    services: tuple[ServiceState, ...]
    clients: tuple[ClientState, ...]
    counters: CountersState
    lease_ns: int
    run_dir: str
    memory: MemoryState = MemoryState()
    offline_pids: tuple[int, ...] = ()
    leavers: tuple[LeaverState, ...] = ()
    unwritten: tuple[UnwrittenState, ...] = ()
    troubles: tuple[str, ...] = ()  # what it was configured to do and could not begin, for people
    lack: str = ""  # of descriptors or memory: every GPU is held meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    mode: Mode
    cooldown_start_ns: int
    cooldown_floor_ns: int
    cooldown_ceiling_ns: int
    cooldown_factor: float
    cooldown_window_ns: int
    lease_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    summary: str
    facts: tuple[str, ...]
    decisions: tuple[Event, ...]
