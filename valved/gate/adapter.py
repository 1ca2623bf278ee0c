"""GatePort over the native gate (valved/native): the cold half in Python, everything between doorbell and ioctl in C.

Order of ownership: a client is created before its channels and removed after them; a service outlives its clients.
Fds: the control and region memfds are closed at `remove_client`; the doorbell, the order eventfd and passed
nvidiactl fds belong to the native client.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valve_abi import CONTROL_BYTES, REGION_BYTES

from valved.abi import region
from valved.fds import Fds
from valved.gate import readings
from valved.gate.armed import GateClient
from valved.gate.grants import NativeGrants
from valved.gate.reaching import NativeChannels
from valved.machine import cards
from valved.machine.ports import ClientFds, ClientView, GpuInfo, WakeLook, WakeOutcome, WakeRule
from valved.machine.stamps import STAMP_BYTES, Stamps
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Role, ServiceId
from valved.native._gate import ffi, lib

SETTLE_NS = 5_000_000_000  # how long close waits for the issuers
_STAMP_BATCH = 256
_WAKE = (WakeOutcome.WOKEN, WakeOutcome.REFUSED, WakeOutcome.NOT_HOLDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """What the native threads are told at the start."""

    lease_ns: int = 2_000_000_000
    hang_ns: int = 100_000_000  # a disable has taken 0.2 to 1 ms; a hundred times that is not coming back soon
    order_ns: int = 20_000_000
    loop_ns: int = 0  # Python silent for longer than this: every GPU is held; 0: the watchdog does not look
    spin_ns: int = 0
    quiet_us: int = 500
    fifo_priority: int = 0  # 0: niceness -20, which is quicker unless every core is busy (worker.c)


class NativeGate:
    """The one gate of this process. `machine` is a `struct valve_os *` for tests; None means the real one."""

    def __init__(self, settings: NativeSettings, machine: Any = None) -> None:
        names = ("lease_ns", "hang_ns", "order_ns", "loop_ns", "spin_ns", "quiet_us", "fifo_priority")
        config = ffi.new("struct valve_config *", {name: getattr(settings, name) for name in names})
        self._gate = lib.valve_gate_open(config, machine if machine is not None else ffi.NULL)
        if self._gate == ffi.NULL:
            raise OSError(errno.EMFILE, "the native gate could not start its threads: check ulimit -n and -u")
        self._clients: dict[ClientId, GateClient] = {}
        self._services: dict[ServiceId, int] = {}
        self.granting = NativeGrants(self._gate, self._services, self._clients)
        self._batch = ffi.new("struct valve_stamp[]", _STAMP_BATCH)
        self._view = ffi.new("struct valve_view *")
        self._look = ffi.new("struct valve_look *")
        self._infos = self._read_gpus()
        self._names = cards.by_uuid()
        refusal = readings.text(lib.valve_gate_refusal(self._gate))
        self.channels = NativeChannels(self._gate, self._clients, self._infos, refusal)

    # cards

    def _read_gpus(self) -> list[Any]:
        infos = ffi.new("struct valve_gpu_info[32]")
        count = lib.valve_gate_gpus(self._gate, infos, 32)
        self._keep = infos
        return [infos[i] for i in range(count)]

    def gpus(self) -> Sequence[GpuInfo]:
        return [readings.gpu_info(GpuIndex(i), info, self._names) for i, info in enumerate(self._infos)]

    def driver_version(self) -> str:
        return readings.text(lib.valve_gate_version(self._gate))

    # clients

    def create_client(self, client: ClientId, role: Role, service: ServiceId, *, at_once: bool = False) -> ClientFds:
        index = self._service_index(service) if role is Role.ONLINE else -1
        if role is Role.HOOK:  # of an online service, which has its place from its claim on; others need none
            index = self._services.get(service, -1)
        with Fds() as pages, Fds() as bells:
            fds = ClientFds(
                control=pages.own(region.create_memfd("valve-control", CONTROL_BYTES)),
                region=pages.own(region.create_memfd("valve-region", REGION_BYTES)),
                doorbell=bells.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)),
                order=bells.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)),
            )
            numbers = (fds.control, fds.region, fds.doorbell, fds.order)
            native = lib.valve_client_new(self._gate, client, role, index, service, *numbers)
            if native == ffi.NULL:
                raise OSError(errno.EMFILE, f"client {client}: the native gate has no slot, memory or descriptor left")
            bells.keep()  # the native client's
            lib.valve_client_at_once(native, at_once)
            pages.callback(lib.valve_client_free, self._gate, native)
            region.seal_control(fds.control)  # after our mapping: see region.py; F_SEAL_FUTURE_WRITE is of Linux 5.1
            region.seal_region(fds.region)
            self._clients[client] = GateClient(native=native, role=role, service=service, fds=fds)
            pages.keep()
        return fds

    def remove_client(self, client: ClientId, *, lives_on: bool = False) -> tuple[ChannelRef, ...]:
        holder = self._clients.pop(client)
        lib.valve_client_leaves(holder.native, lives_on)
        off = self.channels.client_leaves(client, holder, lives_on=lives_on)
        if self.channels.kept.holds(holder):
            lib.valve_client_part(self._gate, holder.native)
        else:
            lib.valve_client_free(self._gate, holder.native)
        os.close(holder.fds.control)
        os.close(holder.fds.region)
        return off

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

    def _belongs(self, holder: GateClient, service: ServiceId) -> bool:
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

    # looking

    def view(self, client: ClientId, *, with_gaps: bool = False) -> ClientView:
        lib.valve_client_view(self._clients[client].native, self._view, with_gaps)  # one without sense reads as zeros
        return readings.view(self._view)

    def is_stopped(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_state(self._gate, gpu) == lib.VALVE_GPU_STOPPED)

    def is_gated(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_gated(self._gate, gpu))

    def is_turning(self) -> bool:
        return bool(lib.valve_gate_turning(self._gate))

    # switches

    def set_watch(self, client: ClientId, on: bool) -> None:
        lib.valve_client_watch(self._clients[client].native, on)

    def set_memory(self, client: ClientId, handle_bytes: int, budget_bytes: int, size_rule_bytes: int) -> None:
        lib.valve_client_memory(self._clients[client].native, handle_bytes, budget_bytes, size_rule_bytes)

    def set_free(self, client: ClientId, figures: Mapping[GpuIndex, tuple[int, int]]) -> None:
        for gpu, (free, keep) in figures.items():
            lib.valve_client_kv_free(self._clients[client].native, gpu, self._infos[gpu].uuid, free, keep)

    def hold_launches(self, client: ClientId, on: bool) -> None:
        lib.valve_client_hold(self._clients[client].native, on)

    def set_online_registered(self, client: ClientId, on: bool) -> None:
        lib.valve_client_online(self._clients[client].native, on)

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        lib.valve_gate_let(self._gate, sum(1 << gpu for gpu in gpus))

    # stamps

    def alive(self) -> None:
        lib.valve_gate_alive(self._gate)

    def stamps_fd(self) -> int:
        return int(lib.valve_stamps_fd(self._gate))

    def drain_stamps(self) -> Stamps:
        raw = b""
        while True:
            count = lib.valve_stamps_take(self._gate, self._batch, _STAMP_BATCH)
            raw += ffi.buffer(self._batch, count * STAMP_BYTES)
            if count < _STAMP_BATCH:
                return Stamps(raw)

    def stamps_lost(self) -> int:
        return int(lib.valve_stamps_lost(self._gate))

    def close(self) -> None:
        """Everything runs from here on."""
        self.let(frozenset(map(GpuIndex, range(len(self._infos)))))
        lib.valve_gate_settle(self._gate, SETTLE_NS)
        for client in list(self._clients):
            self.remove_client(client)
        self.channels.kept.close()
        for service in list(self._services):
            self.remove_service(service)
        lib.valve_gate_close(self._gate)
        self._gate = None  # a call from here on is an error, and never reads what is freed
