"""GrantPort over the native gate: grants are opened and ended there (valved/native/grant.c), and allowed from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valve_abi import GrantAnswer

from valved.gate.armed import GateClient
from valved.machine.ports import Grants
from valved.model.ids import ChannelRef, ClientId, GpuIndex, ServiceId
from valved.model.statuses import status_text
from valved.native._gate import ffi, lib

_NO_REFUSAL = (GrantAnswer.NONE, GrantAnswer.GIVEN)
_REASONS = tuple(one for one in GrantAnswer if one is not GrantAnswer.ANSWERS and one not in _NO_REFUSAL)


class NativeGrants:
    """`services` and `clients` are the gate's own books."""

    def __init__(self, gate: Any, services: Mapping[ServiceId, int], clients: Mapping[ClientId, GateClient]) -> None:
        self._gate, self._services, self._clients = gate, services, clients
        self._by_slices = False
        self._begin, self._end = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._out = ffi.new("struct valve_grants *")

    def consent(self, service: ServiceId, most_ns: int, rest_ns: int) -> None:
        lib.valve_service_consent(self._gate, self._services[service], most_ns, rest_ns)

    def set_grantable(self, gpus: frozenset[GpuIndex]) -> None:
        lib.valve_gate_grantable(self._gate, sum(1 << gpu for gpu in gpus))

    def set_sliceable(self, on: bool, gpus: frozenset[GpuIndex]) -> None:
        self._by_slices = on
        lib.valve_gate_sliceable(self._gate, int(on), sum(1 << gpu for gpu in gpus))

    def step(self, client: ClientId) -> tuple[int, int]:
        lib.valve_client_step(self._clients[client].native, self._begin, self._end)
        return self._begin[0], self._end[0]

    def has_file(self, client: ClientId, h_client: int) -> bool:
        numbers = self._clients[client].rm_clients.get(h_client)
        return numbers is not None and numbers.fd >= 0

    def shorten(self, client: ClientId, channel: ChannelRef, us: int) -> str:
        whose = self._clients[client]
        fd = whose.rm_clients[channel.h_client].fd
        status: int = lib.valve_gpu_slice(
            self._gate, channel.gpu, whose.native, fd, channel.h_client, channel.h_tsg, us
        )
        return status_text(status) if status else ""

    def offer(self, client: ClientId, tpot_ns: int, gap_ns: int) -> None:
        lib.valve_client_offer(self._clients[client].native, int(tpot_ns > 0), tpot_ns, gap_ns, int(self._by_slices))

    def grants(self, service: ServiceId) -> Grants:
        out = self._out
        lib.valve_service_grants(self._gate, self._services[service], out)
        refused = {one.name.lower().replace("_", " "): out.answers[one] for one in _REASONS if out.answers[one]}
        return Grants(
            grants=out.grants, broken=out.broken, granted_ns=out.granted_ns, until_ns=out.until_ns, refused=refused
        )
