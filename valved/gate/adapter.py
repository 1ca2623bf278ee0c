"""GatePort over the native gate (valved/native): the cold half in Python, everything between doorbell and ioctl in C.

Order of ownership: a client is created before its channels and removed after them; a service outlives its clients.
Fds: the control and region memfds are closed at `remove_client`; the doorbell, the order eventfd and passed
nvidiactl fds belong to the native client.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from valve_abi import CONTROL_BYTES, REGION_BYTES, Feature

from valved.abi import region
from valved.gate import readings
from valved.gate.armed import LADDER, Channel, Channels, RmClient, is_worse, weakest
from valved.gate.grants import NativeGrants
from valved.machine import cards
from valved.machine.ports import (
    ArmResult,
    ClientFds,
    ClientView,
    GpuInfo,
    Stamp,
    WakeLook,
    WakeOutcome,
    WakeRule,
)
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.native._gate import ffi, lib

SETTLE_NS = 5_000_000_000  # how long close waits for the issuers
_STAMP_BATCH = 256
_WAKE = (WakeOutcome.WOKEN, WakeOutcome.REFUSED, WakeOutcome.NOT_HOLDING)
_STOPPING = (lib.VALVE_GPU_STOPPED, lib.VALVE_GPU_STOPPING, lib.VALVE_GPU_FAILED)
_INVALID_CHANNEL = 0x21
_NOT_SUPPORTED = 0x56
_GONE = frozenset({_INVALID_CHANNEL, 0x23, 0x31, 0x33, 0x57})  # RM statuses of a channel that does not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What the native threads are told at the start."""

    lease_ns: int = 2_000_000_000
    hang_ns: int = 100_000_000  # a disable has taken 0.2 to 1 ms; a hundred times that is not coming back soon
    order_ns: int = 20_000_000
    loop_ns: int = 0  # Python silent for longer than this: every GPU is held; 0: nobody looks
    spin_ns: int = 0
    quiet_us: int = 500
    fifo_priority: int = 0  # 0: niceness -20, which is quicker unless every core is busy (worker.c)


@dataclass(slots=True, kw_only=True)
class _Client:
    native: Any
    role: Role
    service: ServiceId
    fds: ClientFds
    is_given_up: bool = False
    rm_clients: dict[int, RmClient] = field(default_factory=dict)


class NativeGate:
    """The one gate of this process. `machine` is a `struct valve_os *` for tests; None means the real one."""

    def __init__(self, settings: GateSettings, machine: Any = None) -> None:
        names = ("lease_ns", "hang_ns", "order_ns", "loop_ns", "spin_ns", "quiet_us", "fifo_priority")
        config = ffi.new("struct valve_config *", {name: getattr(settings, name) for name in names})
        self._gate = lib.valve_gate_open(config, machine if machine is not None else ffi.NULL)
        if self._gate == ffi.NULL:
            raise OSError(errno.EMFILE, "the native gate could not start its threads: check ulimit -n and -u")
        self._clients: dict[ClientId, _Client] = {}
        self._services: dict[ServiceId, int] = {}
        self.granting = NativeGrants(self._gate, self._services, self._clients)
        self._channels = Channels()
        self._reasons: dict[tuple[GpuIndex, Reach], str] = {}  # why a rung was not used, last time
        self._batch = ffi.new("struct valve_stamp[]", _STAMP_BATCH)
        self._view = ffi.new("struct valve_view *")
        self._look = ffi.new("struct valve_look *")
        self._infos = self._read_gpus()
        self._refusal = readings.text(lib.valve_gate_refusal(self._gate))

    # cards

    def _read_gpus(self) -> list[Any]:
        infos = ffi.new("struct valve_gpu_info[32]")
        count = lib.valve_gate_gpus(self._gate, infos, 32)
        self._keep = infos
        return [infos[i] for i in range(count)]

    def gpus(self) -> Sequence[GpuInfo]:
        known = cards.by_uuid()
        return [readings.gpu_info(GpuIndex(i), info, known) for i, info in enumerate(self._infos)]

    def driver_version(self) -> str:
        return readings.text(lib.valve_gate_version(self._gate))

    # clients

    def create_client(self, client: ClientId, role: Role, service: ServiceId) -> ClientFds:
        made: list[int] = []
        try:
            made.append(region.create_memfd("valve-control", CONTROL_BYTES))
            made.append(region.create_memfd("valve-region", REGION_BYTES))
            for _ in range(2):
                made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            index = self._service_index(service) if role is Role.ONLINE else -1
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        control, data, *bells = made
        fds = ClientFds(control=control, region=data, doorbell=bells[0], order=bells[1])
        if role is Role.HOOK:  # of an online service, which has its place from its claim on; others need none
            index = self._services.get(service, -1)
        native = lib.valve_client_new(self._gate, client, role, index, service, control, data, *bells)
        if native == ffi.NULL:
            for fd in (control, data, *bells):
                os.close(fd)
            raise OSError(errno.EMFILE, f"client {client}: no slot, memory or fd left for it")
        try:
            region.seal_control(control)  # after our mapping: see region.py
            region.seal_region(data)
        except OSError:  # F_SEAL_FUTURE_WRITE is of Linux 5.1
            lib.valve_client_free(self._gate, native)  # and both bells
            os.close(control)
            os.close(data)
            raise
        self._clients[client] = _Client(native=native, role=role, service=service, fds=fds)
        return fds

    def remove_client(self, client: ClientId, *, lives_on: bool = False) -> tuple[ChannelRef, ...]:
        holder, off = self._clients.pop(client), list[ChannelRef]()
        lib.valve_client_leaves(holder.native, lives_on)
        mine = self._channels.pop_client(client)
        for gpu in {channel.ref.gpu for channel in mine}:
            gone = [channel for channel in mine if channel.ref.gpu == gpu and channel.is_ours_to_run]
            kept = _can_wait(gone) if lives_on else []
            is_off = self.is_gated(gpu)
            self._arm(gpu, run_now=[channel for channel in gone if channel not in kept], leaving=holder)
            is_off |= lives_on and self.is_gated(gpu)  # a stop may have come before the new list
            off.extend(channel.ref for channel in (kept if lives_on else gone) if is_off)
        lib.valve_client_free(self._gate, holder.native)
        os.close(holder.fds.control)
        os.close(holder.fds.region)
        return tuple(off)

    # services

    def _service_index(self, service: ServiceId) -> int:
        if service not in self._services:
            index = lib.valve_service_new(self._gate, service)
            if index < 0:
                raise OSError(errno.ENOSPC, f"service {service}: more than 1024 online services on one node")
            self._services[service] = index
        return self._services[service]

    def put_service(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        unknown = sorted(gpu for gpu in gpus if not 0 <= gpu < len(self._infos))
        if unknown:
            raise ValueError(f"service {service}: no such GPU: {unknown}; this node has {len(self._infos)}")
        mask = sum(1 << gpu for gpu in gpus)
        lib.valve_service_gpus(self._gate, self._service_index(service), mask)

    def remove_service(self, service: ServiceId) -> None:
        members = [client for client, holder in self._clients.items() if self._belongs(holder, service)]
        if members:
            raise ValueError(f"service {service} still has clients: {members}")
        index = self._services.pop(service, None)
        if index is not None:
            lib.valve_service_free(self._gate, index)

    def _belongs(self, holder: _Client, service: ServiceId) -> bool:
        return holder.service == service and holder.role is not Role.OFFLINE

    def hold(self, service: ServiceId, reason: int) -> None:
        del reason  # the caller records it; the native side treats every hold alike
        lib.valve_hold(self._gate, self._services[service])

    def wake(self, service: ServiceId) -> WakeOutcome:
        return _WAKE[lib.valve_wake(self._gate, self._services[service])]

    def permit(self, service: ServiceId, rule: WakeRule | None) -> None:
        native = ffi.NULL if rule is None else ffi.new("struct valve_wake_rule *", readings.native_rule(rule))
        lib.valve_service_permit(self._gate, self._services[service], native)

    def look(self, service: ServiceId) -> WakeLook:
        lib.valve_service_look(self._gate, self._services[service], self._look)
        return readings.look(self._look)

    def set_prompt(self, on: bool) -> None:
        lib.valve_gate_prompt(self._gate, on)

    def set_hints(self, client: ClientId) -> None:
        lib.valve_client_hints(self._clients[client].native, True)

    # channels

    def add_channel(self, client: ClientId, channel: ChannelRef) -> ArmResult:
        holder = self._clients[client]
        if self._refusal or not 0 <= channel.gpu < len(self._infos):
            return ArmResult(status=0, reach=Reach.NONE, want_fd=False, gated=False)
        numbers = holder.rm_clients.setdefault(channel.h_client, RmClient())
        entry = Channel(ref=channel, client=client, reach=numbers.reach or Reach.CHANNEL_OWN)
        if holder.is_given_up:
            entry.reach = Reach.NONE
            self._channels.put(entry)
            return ArmResult(status=_NOT_SUPPORTED, reach=Reach.NONE, want_fd=False, gated=False)
        known = self._channels.get(client, channel.h_client, channel.h_channel)
        entry.app_disabled = known is not None and known.app_disabled and known.ref.cid == channel.cid
        status = 0 if known is not None and known.ref == channel else self._verify(channel)
        if status != 0:
            return ArmResult(status=status, reach=Reach.NONE, want_fd=False, gated=False, is_known=False)
        if channel.compute:
            status = self._climb(holder, numbers, entry)
        self._channels.put(entry)
        return ArmResult(
            status=status,
            reach=entry.reach,
            want_fd=numbers.fd < 0 and is_worse(entry.reach, Reach.CHANNEL_FD),
            gated=entry.is_armed and self._is_stopping(channel.gpu),
        )

    def _verify(self, channel: ChannelRef) -> int:
        """Does the driver know this channel under the number that the shim was given? 0, or an RM status."""
        cid = ffi.new("uint32_t *")
        status: int = lib.valve_gpu_cid(self._gate, channel.gpu, channel.h_client, channel.h_channel, cid)
        if status == 0 and channel.cid and cid[0] != channel.cid:
            return _INVALID_CHANNEL
        return status if status in _GONE else 0  # cannot be asked here (older branch, refusal): the test decides

    def _climb(self, holder: _Client, numbers: RmClient, entry: Channel, start: Reach = Reach.CHANNEL_OWN) -> int:
        """Arm on the best rung that works, from the one this RM client is known to need. Sets entry.reach."""
        status = 0
        for reach in LADDER[LADDER.index(numbers.reach or start) :]:
            missing = self._missing(holder, numbers, reach)
            if missing is None:
                entry.reach = reach
                status = self._try_and_arm(entry, is_tested=reach is numbers.reach)
                if status in (0, -errno.ETIMEDOUT):  # a driver that hangs now has refused nothing
                    numbers.reach = reach
                    return status
                missing = readings.status_text(status)
            self._reasons[entry.ref.gpu, reach] = f"{reach.value}: {missing}"
        if status and self._is_failing(entry.ref.gpu):
            return self._arm_untested(holder, numbers, entry, status)
        self._arm(
            entry.ref.gpu, run_now=[] if entry.app_disabled else [entry]
        )  # takes back what the tries left, while it still has a rung
        entry.reach = Reach.NONE
        self._arm(entry.ref.gpu)
        return status

    def _arm_untested(self, holder: _Client, numbers: RmClient, entry: Channel, status: int) -> int:
        """A GPU that nobody can stop now is no judge of a rung: take the best that lacks nothing, which is tried again
        with all others.
        """
        entry.reach = next(reach for reach in LADDER if self._missing(holder, numbers, reach) is None)
        self._channels.put(entry)
        self._arm(entry.ref.gpu)
        return status

    def _missing(self, holder: _Client, numbers: RmClient, reach: Reach) -> str | None:
        """What this rung lacks, before anything is tried."""
        if reach is Reach.CHANNEL_FD and numbers.fd < 0:
            return "the workload's nvidiactl fd has not been passed"
        needed = {Reach.CHANNEL_SELF: Feature.SELF_GATE, Reach.LAUNCH_GATE: Feature.HOLD}.get(reach, 0)
        if needed and lib.valve_gate_orders(self._gate):
            return "this kernel cannot ring an eventfd without waiting (io_setup)"
        lib.valve_client_view(holder.native, self._view, False)
        return "the client does not offer it" if needed & ~self._view.features else None

    def _try_and_arm(self, entry: Channel, *, is_tested: bool) -> int:
        gpu, status = entry.ref.gpu, 0
        if not (is_tested or entry.app_disabled or self.is_gated(gpu)):  # else stopping it is the test
            native = ffi.new("struct valve_entry *", self._entry(entry))
            status = lib.valve_gpu_try(self._gate, gpu, native)
        if status not in (0, -errno.ETIMEDOUT):
            return status
        self._channels.put(entry)  # also where the driver hangs: the mail is read when it comes back
        return self._arm(gpu, stop_now=[entry]) or status

    def _entry(self, channel: Channel, leaving: _Client | None = None) -> dict[str, Any]:
        holder = leaving or self._clients[channel.client]
        numbers = holder.rm_clients[channel.ref.h_client]
        by_fd = channel.reach is Reach.CHANNEL_FD
        return {
            "client": holder.native,
            "reach": LADDER.index(channel.reach),
            "h_client": channel.ref.h_client,
            "h_channel": channel.ref.h_channel,
            "fd": numbers.fd if by_fd else -1,
            "h_target": channel.ref.h_client if by_fd else 0,
            "h_subdevice": numbers.h_subdevice if by_fd else 0,
            "keep_off": int(_is_kept_off(channel)),
        }

    def _arm(
        self,
        gpu: GpuIndex,
        stop_now: Sequence[Channel] = (),
        run_now: Sequence[Channel] = (),
        leaving: _Client | None = None,
    ) -> int:
        """Hand the issuer its new list. 0, or what stopping `stop_now` met (only while the GPU is stopped)."""
        groups = [
            [self._entry(channel) for channel in sorted(self._channels.armed(gpu), key=_step_order)],
            [self._entry(channel) for channel in stop_now],
            [self._entry(channel, leaving) for channel in sorted(run_now, key=_step_order)],
        ]
        arguments: list[Any] = []
        for group in groups:
            arguments += [ffi.new("struct valve_entry[]", group), len(group)]
        return int(lib.valve_arm(self._gate, gpu, *arguments))

    def remove_channel(self, client: ClientId, h_client: int, h_channel: int) -> None:
        """Forget a channel that its process frees. It is not enabled first: an enabled channel would run its group."""
        channel = self._channels.pop(client, h_client, h_channel)
        if channel is not None and channel.is_armed:
            self._arm(channel.ref.gpu)

    def stop_again(self, client: ClientId, h_client: int) -> None:
        """One call for all: the driver is asked nothing else, however often a process says this."""
        mine = [c for c in self._channels.of(client) if c.ref.h_client == h_client and c.is_armed]
        for gpu in {channel.ref.gpu for channel in mine}:
            if self.is_gated(gpu):
                self._arm(gpu, stop_now=[channel for channel in mine if channel.ref.gpu == gpu])

    def give_up(self, client: ClientId, why: str) -> None:
        holder = self._clients[client]
        holder.is_given_up = True
        mine = self._channels.pop_client(client)
        for gpu in {channel.ref.gpu for channel in mine}:
            gone = [channel for channel in mine if channel.ref.gpu == gpu]
            self._reasons[gpu, Reach.CHANNEL_OWN] = f"{Reach.CHANNEL_OWN.value}: {why}"
            self._arm(gpu, run_now=[channel for channel in gone if channel.is_armed])
        for channel in mine:
            channel.reach = Reach.NONE
            self._channels.put(channel)

    def give_rm_client(
        self, client: ClientId, gpu: GpuIndex, h_client: int, h_device: int, h_subdevice: int, fd: int
    ) -> None:
        del gpu, h_device  # each channel names its GPU; a call needs client and subdevice only
        holder = self._clients[client]
        numbers = holder.rm_clients.setdefault(h_client, RmClient())
        numbers.h_subdevice = h_subdevice
        if fd < 0:
            return
        if lib.valve_client_take_fd(holder.native, fd) != 0:
            return  # more RM clients than a process has any use for; the fd is closed
        numbers.fd = fd
        mine = [c for c in self._channels if c.client == client and c.ref.h_client == h_client and c.ref.compute]
        for channel in mine:
            if is_worse(channel.reach, Reach.CHANNEL_FD):
                self._upgrade(holder, numbers, channel)

    def _upgrade(self, holder: _Client, numbers: RmClient, channel: Channel) -> None:
        """The fd has come: climb again from its rung. Orders that the old rung gave stand until the next wake, which
        takes back every order of every client in the plan."""
        numbers.reach = None
        self._climb(holder, numbers, channel, start=Reach.CHANNEL_FD)

    def note_app_disabled(self, client: ClientId, h_client: int, h_channel: int, disabled: bool) -> None:
        channel = self._channels.get(client, h_client, h_channel)
        if channel is None or channel.app_disabled == disabled:
            return
        channel.app_disabled = disabled
        self._arm(channel.ref.gpu, stop_now=[channel] if channel.is_ours_to_run else ())

    # looking

    def view(self, client: ClientId, *, with_gaps: bool = False) -> ClientView:
        lib.valve_client_view(self._clients[client].native, self._view, with_gaps)  # one without sense reads as zeros
        return readings.view(self._view)

    def is_stopped(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_state(self._gate, gpu) == lib.VALVE_GPU_STOPPED)

    def _is_failing(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_state(self._gate, gpu) == lib.VALVE_GPU_FAILED)

    def _is_stopping(self, gpu: GpuIndex) -> bool:
        """Stopped, or tried to be: what is armed here now is switched on with the rest."""
        return lib.valve_gpu_state(self._gate, gpu) in _STOPPING

    def is_gated(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_gated(self._gate, gpu))

    def is_turning(self) -> bool:
        return bool(lib.valve_gate_turning(self._gate))

    def reach(self, gpu: GpuIndex) -> tuple[Reach, str]:
        if self._refusal:
            return Reach.NONE, self._refusal
        used = weakest(channel.reach for channel in self._channels if channel.ref.gpu == gpu and channel.ref.compute)
        status = self._infos[gpu].status
        if used is None:
            note = f"own RM client: {readings.status_text(status)}" if status else "not tested: no offline channel yet"
            return (Reach.CHANNEL_FD if status else Reach.CHANNEL_OWN), note
        better = (self._reasons.get((gpu, rung)) for rung in LADDER if is_worse(used, rung))
        return used, "; ".join(filter(None, better))

    def disabled(self) -> tuple[ChannelRef, ...]:
        gpus = filter(self.is_gated, map(GpuIndex, range(len(self._infos))))  # also those about to be stopped
        return tuple(channel.ref for gpu in gpus for channel in self._channels.armed(gpu) if channel.is_ours_to_run)

    # switches

    def set_watch(self, client: ClientId, on: bool) -> None:
        lib.valve_client_watch(self._clients[client].native, on)

    def set_memory(self, client: ClientId, handle_bytes: int, budget_bytes: int, size_rule_bytes: int) -> None:
        lib.valve_client_memory(self._clients[client].native, handle_bytes, budget_bytes, size_rule_bytes)

    def set_free(self, client: ClientId, free_bytes: Mapping[GpuIndex, int]) -> None:
        for gpu, size in free_bytes.items():
            lib.valve_client_kv_free(self._clients[client].native, gpu, self._infos[gpu].uuid, size)

    def hold_launches(self, client: ClientId, on: bool) -> None:
        lib.valve_client_hold(self._clients[client].native, on)

    def set_online_registered(self, client: ClientId, on: bool) -> None:
        lib.valve_client_online(self._clients[client].native, on)

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        lib.valve_gate_let(self._gate, sum(1 << gpu for gpu in gpus))

    def enable_foreign(self, channels: Sequence[ChannelRef]) -> int:
        return sum(self._enable(channel, unless_held=False) == 0 for channel in channels)

    def enable_unless_held(self, channel: ChannelRef) -> bool | None:
        status = self._enable(channel, unless_held=True)
        return None if status == -errno.EBUSY else status == 0

    def _enable(self, channel: ChannelRef, *, unless_held: bool) -> int:
        if self._refusal or not 0 <= channel.gpu < len(self._infos):
            return -errno.ENODEV
        return int(lib.valve_gpu_enable(self._gate, channel.gpu, channel.h_client, channel.h_channel, unless_held))

    # stamps

    def alive(self) -> None:
        lib.valve_gate_alive(self._gate)

    def stamps_fd(self) -> int:
        return int(lib.valve_stamps_fd(self._gate))

    def drain_stamps(self) -> list[Stamp]:
        stamps: list[Stamp] = []
        while True:
            count = lib.valve_stamps_take(self._gate, self._batch, _STAMP_BATCH)
            stamps.extend(readings.stamps(self._batch, count))
            if count < _STAMP_BATCH:
                return stamps

    def stamps_dropped(self) -> int:
        """Stamps that found the ring full: nobody drained it for thousands of edges."""
        return int(lib.valve_stamps_dropped(self._gate))

    def close(self) -> None:
        """Everything runs from here on."""
        self.let(frozenset(map(GpuIndex, range(len(self._infos)))))
        lib.valve_gate_settle(self._gate, SETTLE_NS)
        for client in list(self._clients):
            self.remove_client(client)
        for service in list(self._services):
            self.remove_service(service)
        lib.valve_gate_close(self._gate)


def _is_kept_off(channel: Channel) -> bool:
    """Left out when channels are run. A process that switches its own knows its own."""
    return channel.app_disabled and channel.reach in (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)


def _can_wait(gone: Sequence[Channel]) -> list[Channel]:
    """Whose client is gone, and we can enable them later all the same: other rungs go through the client itself."""
    return [channel for channel in gone if channel.reach is Reach.CHANNEL_OWN]


def _step_order(channel: Channel) -> tuple[int, bool, int, int]:
    """Neighbours share a step: gate.h, struct valve_entry."""
    return LADDER.index(channel.reach), _is_kept_off(channel), channel.client, channel.ref.h_client
