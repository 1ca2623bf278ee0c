"""Channels that a predecessor may have left off. Nobody else remembers them: the driver keeps no record of who disabled
what, so each must be enabled by us or taken over with its client.
"""

from __future__ import annotations

from collections.abc import Callable

from valved.model.ids import ChannelRef, ProcessId


class Leftovers:
    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], tuple[ChannelRef, ProcessId]] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def put(self, channel: ChannelRef, owner: ProcessId) -> None:
        self._channels[(channel.h_client, channel.h_channel)] = (channel, owner)

    def take(self, channel: ChannelRef) -> bool:
        """Its client is back and has reported it. True if it was here; a reused handle (other cid) is not the same."""
        found = self._channels.pop((channel.h_client, channel.h_channel), None)
        return found is not None and found[0].cid == channel.cid

    def take_where(self, condition: Callable[[ChannelRef, ProcessId], bool]) -> list[ChannelRef]:
        taken = [key for key, (channel, owner) in self._channels.items() if condition(channel, owner)]
        return [self._channels.pop(key)[0] for key in taken]

    def take_of(self, process: ProcessId) -> list[ChannelRef]:
        return self.take_where(lambda _, owner: owner == process)

    def owners(self) -> set[ProcessId]:
        return {owner for _, owner in self.all()}

    def all(self) -> list[tuple[ChannelRef, ProcessId]]:
        return list(self._channels.values())
