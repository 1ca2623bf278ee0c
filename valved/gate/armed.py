"""The books of armed channels: which exist, which rung of the ladder reaches each, and why not a better one.

Nothing here talks to the driver; gate.py does, and writes down what it learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach

LADDER = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD, Reach.CHANNEL_SELF, Reach.LAUNCH_GATE)


@dataclass(slots=True, kw_only=True)
class RmClient:
    """What the shim told about one RM client of a workload, and the rung that was found to work for it."""

    h_subdevice: int = 0
    fd: int = -1  # the passed nvidiactl fd; the native client owns it
    reach: Reach | None = None  # None: not tested yet


@dataclass(slots=True, kw_only=True)
class Channel:
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
class Channels:
    """All channels, by client and handles."""

    _by_key: dict[tuple[ClientId, int, int], Channel] = field(default_factory=dict)

    def put(self, channel: Channel) -> None:
        self._by_key[channel.client, channel.ref.h_client, channel.ref.h_channel] = channel

    def get(self, client: ClientId, h_client: int, h_channel: int) -> Channel | None:
        return self._by_key.get((client, h_client, h_channel))

    def pop(self, client: ClientId, h_client: int, h_channel: int) -> Channel | None:
        return self._by_key.pop((client, h_client, h_channel), None)

    def pop_client(self, client: ClientId) -> list[Channel]:
        mine = self.of(client)
        for channel in mine:
            self.pop(client, channel.ref.h_client, channel.ref.h_channel)
        return mine

    def of(self, client: ClientId) -> list[Channel]:
        return [channel for channel in self if channel.client == client]

    def armed(self, gpu: GpuIndex) -> list[Channel]:
        return [channel for channel in self if channel.ref.gpu == gpu and channel.is_armed]

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)


_ORDER = (*LADDER, Reach.NONE)


def is_worse(one: Reach, other: Reach) -> bool:
    return _ORDER.index(one) > _ORDER.index(other)


def weakest(reaches: Iterable[Reach]) -> Reach | None:
    """The rung that bounds what may be promised."""
    return max(reaches, key=_ORDER.index, default=None)
