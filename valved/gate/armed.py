"""The books of armed channels: which exist, which rung of the ladder reaches each, and why not a better one.

Nothing here talks to the driver; reaching.py does, and writes down what it learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from valved.machine.ports import ClientFds
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId

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
    rm_clients: dict[int, RmNumbers] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ArmedChannel:
    """One channel of an offline client."""

    ref: ChannelRef
    client: ClientId
    reach: Reach
    app_disabled: bool = False

    @property
    def is_armed(self) -> bool:
        """A stop includes it. Copy channels run on. What the application says it switched off is stopped all the same:
        that does no harm if it is true, and it may have been switched on since by a call that nobody saw.
        """
        return self.ref.compute and self.reach is not Reach.NONE

    @property
    def is_ours_to_run(self) -> bool:
        """A run includes it: what the application switched off itself is not ours to switch on."""
        return self.is_armed and not self.app_disabled


@dataclass(slots=True)
class ArmedChannels:
    """All channels, by client and handles."""

    _by_key: dict[tuple[ClientId, int, int], ArmedChannel] = field(default_factory=dict)

    def put(self, channel: ArmedChannel) -> None:
        self._by_key[channel.client, channel.ref.h_client, channel.ref.h_channel] = channel

    def get(self, client: ClientId, h_client: int, h_channel: int) -> ArmedChannel | None:
        return self._by_key.get((client, h_client, h_channel))

    def pop(self, client: ClientId, h_client: int, h_channel: int) -> ArmedChannel | None:
        return self._by_key.pop((client, h_client, h_channel), None)

    def pop_client(self, client: ClientId) -> list[ArmedChannel]:
        mine = self.of(client)
        for channel in mine:
            self.pop(client, channel.ref.h_client, channel.ref.h_channel)
        return mine

    def of(self, client: ClientId) -> list[ArmedChannel]:
        return [channel for channel in self if channel.client == client]

    def armed(self, gpu: GpuIndex) -> list[ArmedChannel]:
        return [channel for channel in self if channel.ref.gpu == gpu and channel.is_armed]

    def __iter__(self) -> Iterator[ArmedChannel]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)


_ORDER = (*LADDER, Reach.NONE)


def is_worse(one: Reach, other: Reach) -> bool:
    return _ORDER.index(one) > _ORDER.index(other)


def weakest(reaches: Iterable[Reach]) -> Reach | None:
    """The rung that bounds what may be promised."""
    return max(reaches, key=_ORDER.index, default=None)
