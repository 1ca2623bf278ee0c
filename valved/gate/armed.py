"""The books of armed channels: which exist, which rung of the ladder reaches each, and the plan of each GPU.

Nothing here talks to the driver; reaching.py does, and writes down what it learned. A node has thousands of channels:
a lookup of one, or of those of a client, reads no other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from valved.machine.ports import ClientFds
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.native._gate import ffi

LADDER = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD, Reach.CHANNEL_SELF, Reach.LAUNCH_GATE)


@dataclass(slots=True, kw_only=True)
class RmNumbers:
    """What the shim told about one RM client of a workload, and the rung that was found to work for it."""

    h_subdevice: int = 0
    fd: int = -1  # the passed nvidiactl fd; the native client owns it
    reach: Reach | None = None  # None: not tested yet


@dataclass(slots=True, kw_only=True)
class GateClient:
    """One client of the native gate, of any role."""

    native: Any
    role: Role
    service: ServiceId
    fds: ClientFds
    is_given_up: bool = False
    losses: int = 0  # how often the driver said of channels that they had ended, and nobody had told us
    rm_clients: dict[int, RmNumbers] = field(default_factory=dict)


_WRAP = 1 << 32  # plans are numbered in so many
LOSSES = 3  # before a client gets lists of its own: a stop may come while it says that it frees a channel

Place = tuple[int, bool, bool, ClientId, int, int]  # in a plan: neighbours share a step (gate.h, struct valve_entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedChannel:
    """One channel of an offline client."""

    ref: ChannelRef
    client: ClientId
    reach: Reach
    app_disabled: bool = False
    is_apart: bool = False  # in lists of its client alone, behind those of the others
    since: int = 0  # the number of the last plan before it was reported, or changed

    @property
    def is_armed(self) -> bool:
        """A stop includes it. Copy channels run on. What the application says it switched off is stopped all the same:
        that does no harm if it is true, and it may have been switched on since by a call that the shim did not see.
        """
        return self.ref.compute and self.reach is not Reach.NONE

    @property
    def is_ours_to_run(self) -> bool:
        """A run includes it: what the application switched off itself is not ours to switch on."""
        return self.is_armed and not self.app_disabled

    @property
    def is_kept_off(self) -> bool:
        """Left out when channels are run. A process that switches its own knows its own."""
        return self.app_disabled and self.reach in (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)

    @property
    def place(self) -> Place:
        ref, rung = self.ref, LADDER.index(self.reach)
        return rung, self.is_apart, self.is_kept_off, self.client, ref.h_client, ref.h_channel


def entry_of(channel: ArmedChannel, holder: GateClient) -> dict[str, Any]:
    """A struct valve_entry. `holder`: whose channel it is."""
    numbers, by_fd = holder.rm_clients[channel.ref.h_client], channel.reach is Reach.CHANNEL_FD
    return {
        "client": holder.native,
        "reach": LADDER.index(channel.reach),
        "h_client": channel.ref.h_client,
        "h_channel": channel.ref.h_channel,
        "fd": numbers.fd if by_fd else -1,
        "h_target": channel.ref.h_client if by_fd else 0,
        "h_subdevice": numbers.h_subdevice if by_fd else 0,
        "keep_off": int(channel.is_kept_off),
        "apart": int(channel.is_apart),
    }


class GpuPlan:
    """What valve_arm is told of one GPU, in order. A channel that comes or goes moves bytes."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self.entries = ffi.new("struct valve_entry[]", 64)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, place: Place, entry: dict[str, Any]) -> None:
        at, count = bisect_left(self._places, place), len(self)
        if count == len(self.entries):
            before, self.entries = self.entries, ffi.new("struct valve_entry[]", 2 * count)
            ffi.memmove(self.entries, before, ffi.sizeof(before))
        self._move(at + 1, at, count - at)
        self._places.insert(at, place)
        self.entries[at] = entry

    def drop(self, place: Place) -> None:
        at = bisect_left(self._places, place)
        self._move(at, at + 1, len(self) - at - 1)
        del self._places[at]

    def _move(self, to: int, start: int, count: int) -> None:
        ffi.memmove(self.entries + to, self.entries + start, count * ffi.sizeof("struct valve_entry"))


@dataclass(slots=True)
class ArmedChannels:
    """All channels, by client and handles. One that changes is put again."""

    _of: dict[ClientId, dict[tuple[int, int], ArmedChannel]] = field(default_factory=dict)
    _rungs: defaultdict[GpuIndex, Counter[Reach]] = field(default_factory=lambda: defaultdict(Counter))  # of compute
    _plans: defaultdict[GpuIndex, GpuPlan] = field(default_factory=lambda: defaultdict(GpuPlan))

    def put(self, channel: ArmedChannel, entry: dict[str, Any] | None) -> None:
        """`entry`: for the plan, if it is armed."""
        ref = channel.ref
        self.pop(channel.client, ref.h_client, ref.h_channel)
        self._of.setdefault(channel.client, {})[ref.h_client, ref.h_channel] = channel
        if ref.compute:
            self._rungs[ref.gpu][channel.reach] += 1
        if entry is not None:
            self._plans[ref.gpu].put(channel.place, entry)

    def get(self, client: ClientId, h_client: int, h_channel: int) -> ArmedChannel | None:
        return self._of.get(client, {}).get((h_client, h_channel))

    def pop(self, client: ClientId, h_client: int, h_channel: int) -> ArmedChannel | None:
        mine = self._of.get(client, {})
        channel = mine.pop((h_client, h_channel), None)
        if channel is None:
            return None
        if not mine:
            del self._of[client]
        if channel.ref.compute:
            self._rungs[channel.ref.gpu][channel.reach] -= 1
        if channel.is_armed:
            self._plans[channel.ref.gpu].drop(channel.place)
        return channel

    def pop_client(self, client: ClientId) -> list[ArmedChannel]:
        mine = self.of(client)
        for channel in mine:
            self.pop(client, channel.ref.h_client, channel.ref.h_channel)
        return mine

    def forget(self, gpu: GpuIndex, gone: Iterable[Any]) -> set[ClientId]:
        """Channels of plans that ended by the driver's word (struct valve_gone); not what its client told since, which
        is another channel of the same numbers. Returns whose were here.
        """
        losers = set[ClientId]()
        for one in gone:
            channel = self.get(ClientId(one.client), one.h_client, one.h_channel)
            if channel is None or channel.ref.gpu != gpu or not 0 < (one.plan - channel.since) % _WRAP < _WRAP // 2:
                continue
            self.pop(channel.client, one.h_client, one.h_channel)
            losers.add(channel.client)
        return losers

    def of(self, client: ClientId) -> list[ArmedChannel]:
        return list(self._of.get(client, {}).values())

    def are_switched(self, client: ClientId) -> bool:
        """By valved, all that it has; there is one at least."""
        mine = [channel for channel in self.of(client) if channel.ref.compute]
        return bool(mine) and all(channel.reach in (Reach.CHANNEL_OWN, Reach.CHANNEL_FD) for channel in mine)

    def plan(self, gpu: GpuIndex) -> GpuPlan:
        return self._plans[gpu]

    def weakest(self, gpu: GpuIndex) -> Reach | None:
        """The rung that bounds what may be promised."""
        return max((reach for reach, count in self._rungs[gpu].items() if count), key=_ORDER.index, default=None)

    def __iter__(self) -> Iterator[ArmedChannel]:
        for mine in self._of.values():
            yield from mine.values()


_ORDER = (*LADDER, Reach.NONE)


def is_worse(one: Reach, other: Reach) -> bool:
    return _ORDER.index(one) > _ORDER.index(other)
