"""Every setting of valved, with unit, default and reason. The file is TOML; a flag on the command line wins.

An unknown key or a value out of range stops the start: a daemon that ignores half of its configuration is worse than
one that does not run. docs/configuration.md lists the same settings for operators.
"""

from __future__ import annotations

import grp
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from valved.errors import ConfigError, short
from valved.fds import read_file
from valved.model.consent import Consent, Said, consent_of
from valved.model.ids import Mode, Remap
from valved.model.memory import EvictionCost, ReservationRule
from valved.model.rungs import Rung, SliceSettings
from valved.policy.breaker import BreakerSettings
from valved.policy.cooldown import LARGEST_FACTOR, MS, SECOND, CooldownSettings
from valved.policy.eviction import EvictionSettings
from valved.policy.reservation import ReservationSettings
from valved.policy.wake import WakeSettings

MIB = 1 << 20
EVERYBODY = "*"  # as a view_group

# Bounds: what is beyond them is a slip (a wrong unit, one digit too many) and not an opinion. `le` also refuses inf.
HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S
Ms: TypeAlias = Annotated[float, Meta(ge=0.001, le=HOUR_S * 1000)]
MsOrNone: TypeAlias = Annotated[float, Meta(ge=0.0, le=HOUR_S * 1000)]
Factor: TypeAlias = Annotated[float, Meta(gt=1.0, le=LARGEST_FACTOR)]
Window: TypeAlias = Annotated[float, Meta(ge=0.001, le=MONTH_S)]
Lease: TypeAlias = Annotated[float, Meta(ge=0.01, le=HOUR_S)]
Patience: TypeAlias = Annotated[float, Meta(ge=0.001, le=24 * HOUR_S)]
OrNever: TypeAlias = Annotated[float, Meta(ge=0.0, le=MONTH_S)]
Tick: TypeAlias = Annotated[float, Meta(ge=1.0, le=HOUR_S * 1000)]  # more often takes the whole loop
Report: TypeAlias = Annotated[float, Meta(ge=1.0, le=24 * HOUR_S)]  # more often takes the API server of the cluster
Share: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
Ratio: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
Rate: TypeAlias = Annotated[float, Meta(gt=0.0, le=1e6)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 24)]
Mib: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]  # 16 TiB
MibOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 24)]
Nanoseconds: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
FileBytes: TypeAlias = Annotated[int, Meta(ge=4096, le=1 << 50)]
FileBytesOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 50)]
Ring: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]  # a few hundred bytes each
LeaseMs: TypeAlias = Annotated[float, Meta(ge=10.0, le=HOUR_S * 1000)]  # the heartbeat comes five times as often
HangMs: TypeAlias = Annotated[float, Meta(ge=1.0, le=60_000.0)]
Spin: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Quiet: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000)]
SliceUs: TypeAlias = Annotated[int, Meta(ge=200, le=1000)]
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=98)]


class CooldownTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cooldown]: how long a service without hints must be quiet (valved/policy/cooldown.py has the reasons)."""

    start_ms: Ms = 20.0
    floor_ms: Ms = 5.0
    ceiling_ms: Ms = 200.0
    factor: Factor = 2.0
    window_s: Window = 600.0
    arrivals: bool = False  # shortened by how gaps are spread (valved/policy/apart.py)


class WakeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[wake]: whether an engine's count of open requests counts, and for how long."""

    watcher_lease_s: Lease = 2.0  # a watcher silent for longer is dead: its service holds on
    hint_lease_s: Lease = 3.0  # an older report is not believed; a live process renews its own every second


class BreakerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[breaker]: stops harvesting beside a service that Valve delays too much."""

    budget_share: Share = 0.05  # delay over time held; promise P5 is 2.5 % of mean time to first token, doubled
    least_gates: Positive = 50  # a verdict needs this many preemptions in the window
    window_s: Window = 60.0
    rest_s: Window = 600.0  # doubles each time it trips again, up to six times this


class QuotaTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[quota]: what one user of the link socket may take. A hostile user must not starve the others."""

    clients_per_process: Positive = 32  # its shim, its hooks, and those that reconnect; links that nobody claimed
    clients_per_uid: Positive = 256  # 8 GPUs x 32 processes; of one user in one control group, or under one claim
    root_clients: Positive = 4096  # the same for user 0
    kept_for_online: Count = 512  # of 4,096 places; a claimed online process is never refused for a quota
    channels_per_client: Positive = 1024  # a CUDA process has 8 to 64 per GPU
    notes_per_client: Count = 32
    hello_s: Patience = 5.0  # a connection that says nothing for this long is closed


class LinkTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[link]: the conversation with shims."""

    schedule_hold_s: Patience = 30.0  # a SCHEDULE call is held no longer while its GPU is gated; then EAGAIN
    come_back_s: Patience = 2.0  # after a take-over, clients of the predecessor have this long to reconnect


class LadderTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[ladder]: what happens to an offline process that no longer can be gated."""

    freeze: bool = True  # stop it by signal while online holds its GPU
    kill_after_s: OrNever = 30.0  # frozen for longer: its channels are enabled, then it is killed. 0: never


class GrantedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[granted]: what online services offer that say nothing themselves (docs/finetuning.md). Nothing, as it comes."""

    slo: str = ""  # a target, as ttft=500ms,tpot=40ms,gap=100ms
    grant: Literal["", "true", "false"] = ""  # true: pauses within the target may be given to offline work
    share_weights: Literal["", "true", "false"] = ""  # true: trainers may map the weights
    rung: Literal["gate", "timeslice"] = "gate"  # timeslice: no driver call per pause; only with probed_driver
    slice_us: SliceUs = 500  # of offline work beside such a service
    probed_driver: str = ""  # the driver version for which the probe's S2 said OK

    def said(self) -> Said:
        return Said(slo=self.slo, grant=self.grant, share_weights=self.share_weights)

    def slices(self) -> SliceSettings:
        return SliceSettings(rung=Rung(self.rung), slice_us=self.slice_us, probed_driver=self.probed_driver)


class KubeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[kube]: what valved does on a Kubernetes node (valved/kube/README.md). Nothing while `node` is empty."""

    node: str = ""  # this node's name; the chart passes --node
    kubeconfig: str = ""  # empty: the service account of the pod
    device_plugins: str = "/var/lib/kubelet/device-plugins"
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    shim_folder: str = "/var/lib/valve/shim"  # the preload libraries are put there, for containers to mount
    backend: Literal["envvar", "cdi"] = "envvar"  # how offline containers get their GPUs; as the webhook's
    cdi_folder: str = "/var/run/cdi"
    toolkit_folders: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")  # where NVIDIA's toolkit keeps its CDI description
    nri_socket: str = ""  # /var/run/nri/nri.sock: inject online containers as the runtime creates them; empty: off
    all_gpu_pods: bool = False  # pods with whole GPUs that say no role are online work, too
    harvest_unallocated: bool = False  # also GPUs that no pod holds: one may be given away at any moment
    report_s: Report = 30.0  # heartbeat of the node's report; the scheduler distrusts one of 90 s


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[memory]: the pool of KV handles, what online keeps in reserve, how memory is taken (docs/memory.md)."""

    enabled: bool = True  # shims and hooks are told that KV memory is managed
    handle_mib: Mib = 16  # size of a pool handle; the driver maps multiples of 2 MiB (docs/memory.md has the table)
    pool_mib: MibOrNone = 0  # most KV memory on one GPU; 0: what the card has, less spare_mib
    spare_mib: MibOrNone = 1024  # device memory that the pool leaves to everything else
    online_mib: MibOrNone = 0  # of each GPU, so much at least is for online services: offline jobs leave it free
    remember_s: OrNever = 3600.0  # and so much as a service of that name had within this time; 0: only online_mib
    size_rule_mib: MibOrNone = 0  # allocations from this size on are KV memory; 0: only those that an engine brackets
    remap: Remap = Remap.AUTO  # sparse, helper, cooperative, or auto: sparse after a trial in that process, else asked
    target_per_hour: Rate = 30.0  # reclaims an hour and GPU that the operator accepts
    pressure_ratio: Ratio = 1.0  # pressure when used >= this share of what is mapped
    cooperative_ratio: Ratio = (
        0.9  # the same where memory comes only between two offline steps [replayed: docs/memory.md]
    )
    headroom_min_mib: MibOrNone = 128  # at least this much beyond what is used stays mapped for online
    headroom_max_mib: Mib = 16384  # the reserve grows at pressure up to here; 8192 leaves offline work more with `miad`
    reservation: ReservationRule = ReservationRule.BUDGET  # how the reserve follows the load; miad: as published
    headroom_step_mib: Mib = 1024  # budget: the reserve grows by so much at each reclaim
    keep_s: Window = 5.0  # budget: memory that was idle for so long goes back
    tau_s: Window = 60.0  # miad: memory that was idle for so long goes back, at the start; the target steers it
    tau_min_s: Window = (
        20.0  # below, each halving costs a third more reclaims and brings less than 1 % (docs/policies.md)
    )
    tau_max_s: Window = 3600.0  # one window: longer would outlive the evidence that made it so long
    window_s: Window = 3600.0  # over which reclaims are counted
    cost: EvictionCost = EvictionCost.RECOMPUTE_NS  # what losing a column costs
    token_ns: Nanoseconds = 21_000  # time to compute one token again, without attention
    attention_ps_per_pair: Nanoseconds = 1_300  # and its attention to each earlier one
    order_s: Patience = 1.0  # a mapping order under a closed gate that takes longer has hung
    step_s: Patience = 30.0  # the same for one that waits for the next step of the engine
    offline_step_ms: MsOrNone = 30.0  # engines whose memory is taken between two steps are asked for steps so short
    let_ms: MsOrNone = 100.0  # one such step may run so long beside a request that waits for its memory; 0: never
    one_domain: bool = False  # all users and namespaces of this node trust each other: handles move between them
    attach_s: Patience = (
        60.0  # an offline engine that steps without a hook waits so long, then is backed whole or ended
    )
    tick_ms: Tick = 50.0  # how often books are read when nobody rings
    ranges_per_client: Positive = 1024  # 128 layers, K and V apart, on 4 GPUs
    slots_per_client: Positive = 65536  # handles that the ranges of one client have room for


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Top level: paths and how far Valve may go."""

    mode: Mode = Mode.HARVEST
    run_dir: str = ""  # empty: /run/valve for root, XDG_RUNTIME_DIR/valve otherwise
    leave_grace_s: Patience = 60.0  # an offline process that must leave has so long between SIGTERM and SIGKILL
    metrics_port: Port = 0  # HTTP port on loopback for Prometheus; 0: off
    metrics_host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"  # none would mean every address
    trace_file: str = ""  # record every event and decision there, one JSON line each; empty: off
    trace_bytes: FileBytes = 256 * 1024 * 1024  # then the file is moved to NAME.1 and begun anew
    audit_bytes: FileBytesOrNone = 16 * 1024 * 1024  # the same for audit.jsonl in the run folder; 0: no audit file
    ring_events: Ring = 4096  # events kept in memory for `valve explain` and new watchers
    group: str = ""  # its members may use the whole API: claim services, pause, drain; empty: root and its group
    view_group: str = ""  # its members may read status, events and explanations; * for every user; empty: nobody
    guard_bystanders: bool = True  # a GPU that some process uses without Valve is not harvested (Kubernetes: always)
    lease_ms: LeaseMs = 1000.0  # shims treat valved as dead after this; its heartbeat comes five times as often
    hang_ms: HangMs = 100.0  # a gate call that takes longer has failed: the next rung of the ladder
    spin_us: Spin = 0.0  # native threads spin this long before they sleep; needs a core to itself
    quiet_us: Quiet = 500  # quiet time before a watcher probes the GPU
    fifo_priority: Priority = 0  # real-time priority of the native threads where permitted; 0: niceness -20
    loop_priority: Priority = 0  # real-time priority of valved's loop where permitted, below fifo_priority; 0: none
    log_level: str = "info"
    cooldown: CooldownTable = msgspec.field(default_factory=CooldownTable)
    wake: WakeTable = msgspec.field(default_factory=WakeTable)
    breaker: BreakerTable = msgspec.field(default_factory=BreakerTable)
    quota: QuotaTable = msgspec.field(default_factory=QuotaTable)
    link: LinkTable = msgspec.field(default_factory=LinkTable)
    ladder: LadderTable = msgspec.field(default_factory=LadderTable)
    kube: KubeTable = msgspec.field(default_factory=KubeTable)
    memory: MemoryTable = msgspec.field(default_factory=MemoryTable)
    granted: GrantedTable = msgspec.field(default_factory=GrantedTable)

    def cooldown_settings(self) -> CooldownSettings:
        table = self.cooldown
        return CooldownSettings(
            start_ns=round(table.start_ms * MS),
            floor_ns=round(table.floor_ms * MS),
            ceiling_ns=round(table.ceiling_ms * MS),
            factor=table.factor,
            window_ns=round(table.window_s * SECOND),
        )

    def wake_settings(self) -> WakeSettings:
        lease_s, hint_s = self.wake.watcher_lease_s, self.wake.hint_lease_s
        return WakeSettings(watcher_lease_ns=round(lease_s * SECOND), hint_lease_ns=round(hint_s * SECOND))

    def breaker_settings(self) -> BreakerSettings:
        return BreakerSettings(
            budget_share=self.breaker.budget_share,
            least_gates=self.breaker.least_gates,
            window_ns=round(self.breaker.window_s * SECOND),
            rest_ns=round(self.breaker.rest_s * SECOND),
        )

    def reservation_settings(self, column_bytes: int = MIB) -> ReservationSettings:
        """In columns of an engine, which is what moves."""
        table = self.memory

        def columns(mib: int) -> int:
            return max(1, -(-mib * MIB // column_bytes))

        return ReservationSettings(
            target_per_hour=table.target_per_hour,
            pressure_ratio=table.pressure_ratio,
            rule=table.reservation,
            step_handles=columns(table.headroom_step_mib),
            keep_ns=round(table.keep_s * SECOND),
            headroom_min_handles=columns(table.headroom_min_mib),
            headroom_max_handles=columns(table.headroom_max_mib),
            tau_start_ns=round(table.tau_s * SECOND),
            tau_min_ns=round(table.tau_min_s * SECOND),
            tau_max_ns=round(table.tau_max_s * SECOND),
            window_ns=round(table.window_s * SECOND),
        )

    def eviction_settings(self) -> EvictionSettings:
        table = self.memory
        return EvictionSettings(
            cost=table.cost, token_ns=table.token_ns, attention_ps_per_pair=table.attention_ps_per_pair
        )

    def granted_defaults(self) -> Consent:
        """ValueError where a service that says nothing itself would have words that make no sense."""
        consent = consent_of([self.granted.said()])
        if consent.problem:
            raise ValueError(consent.problem)
        return consent

    @property
    def lease_ns(self) -> int:
        return round(self.lease_ms * MS)


def load_config(path: Path | None, flags: Mapping[str, Any]) -> Config:
    """Read the file, lay the flags over it (None means not given), and check everything."""
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = _read_toml(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", field="--config") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not TOML: {short(str(error))}", field="--config") from None
    table.update({key: value for key, value in flags.items() if value is not None})
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        text, key = _named(short(str(error)))
        raise ConfigError(f"{where}{text}", field=key) from None
    check(config)
    return config


def _named(error: str) -> tuple[str, str]:
    """msgspec ends with "- at `$.cooldown.factor`": the key comes first, as people write it."""
    text, found, where = error.partition(" - at `$.")
    key = where.rstrip("`")
    return (f"{key}: {text}", key) if found else (error, "")


def check(config: Config) -> None:
    """What no type of one setting can say."""
    for name, value in effective(config).items():
        if isinstance(value, float) and not math.isfinite(value):  # TOML has nan
            raise ConfigError(f"{name} = {value}: must be a number", field=name)
        if isinstance(value, str) and not value.isprintable():
            text = f"{name} = {short(repr(value))}: must be printable text"
            raise ConfigError(text, field=name)
    _check_order(config)
    group_id(config.group)
    group_id("" if config.view_group == EVERYBODY else config.view_group, "view_group")
    tables = {
        "cooldown": config.cooldown_settings,
        "wake": config.wake_settings,
        "breaker": config.breaker_settings,
        "memory": config.reservation_settings,
        "granted": config.granted_defaults,
    }
    for table, make in tables.items():
        try:
            make()
        except ValueError as error:
            raise ConfigError(f"[{table}] {short(str(error))}", field=table) from None
    if config.memory.handle_mib % 2:
        raise ConfigError(
            f"memory.handle_mib = {config.memory.handle_mib}: must be a multiple of 2", field="memory.handle_mib"
        )
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(
            f"log_level = {short(config.log_level)!r}: must be debug, info, warning or error", field="log_level"
        )


def group_id(name: str, setting: str = "group") -> int:
    """-1, which changes nothing, for no name."""
    try:
        return grp.getgrnam(name).gr_gid if name else -1
    except KeyError:
        text = f"{setting} = {short(name)!r}: this machine has no such group"
        raise ConfigError(text, field=setting) from None


def _check_order(config: Config) -> None:
    """Settings of which one bounds the other."""
    flat = effective(config)
    rising = (
        ("cooldown.floor_ms", "cooldown.start_ms", "cooldown.ceiling_ms"),
        ("memory.tau_min_s", "memory.tau_s", "memory.tau_max_s"),
        ("memory.headroom_min_mib", "memory.headroom_max_mib"),
    )
    for names in rising:
        for low, high in itertools.pairwise(names):
            if flat[low] > flat[high]:
                raise ConfigError(f"{low} = {flat[low]}: must not be greater than {high} = {flat[high]}", field=low)
    if config.loop_priority and (config.loop_priority >= config.fifo_priority or config.spin_us):
        why = "the gate's threads must come before the loop: less than fifo_priority, and spin_us = 0"
        raise ConfigError(f"loop_priority = {config.loop_priority}: {why}", field="loop_priority")


def effective(config: Config) -> dict[str, Any]:
    """Every setting as it applies, flat, for the first log line."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # the reader became part of Python in 3.11
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    raw = read_file(path, MIB + 1)
    if len(raw) > MIB:
        raise ValueError(f"it has more than {MIB} bytes")
    return dict(tomllib.loads(raw.decode()))
