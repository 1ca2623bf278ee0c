"""Channels that are off and in no plan of the gate: a predecessor left them off, or their client left and its process
lives on. Nobody else remembers them: the driver does not record which process disabled what. So each must be enabled
by us or taken over with its client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from valved.machine.ports import ChannelPort, GatePort, LeftOff, ProcessPort
from valved.model.ids import ChannelRef, GpuIndex, ProcessId, Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    channel: ChannelRef
    owner: ProcessId
    has_left: bool  # its owner lives, and left this valved; else it was a predecessor's
    is_out_of_reach: bool  # we cannot enable it: its process, its end or a successor of ours may


class Leftovers:
    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], Leftover] = {}
        self._owners: Counter[ProcessId] = Counter()

    def __len__(self) -> int:
        return len(self._channels)

    def bar_grants(self) -> frozenset[GpuIndex]:
        """Where there is one that we may enable at any time: no plan has it, so it would run on at the end of a grant.
        Not for a copy channel: no plan ever has one.
        """
        barring = (left for left in self._channels.values() if left.channel.compute and not left.is_out_of_reach)
        return frozenset(left.channel.gpu for left in barring)

    def put(
        self, channel: ChannelRef, owner: ProcessId, *, has_left: bool = False, is_out_of_reach: bool = False
    ) -> None:
        key = (channel.h_client, channel.h_channel)
        self._pop(key)
        self._channels[key] = Leftover(channel=channel, owner=owner, has_left=has_left, is_out_of_reach=is_out_of_reach)
        self._owners[owner] += 1

    def keep(self, channel: ChannelRef, owner: ProcessId, outcome: LeftOff) -> bool:
        """One that was tried, and that no plan has: what is still owed goes on being so."""
        is_owed = outcome in (LeftOff.HELD, LeftOff.OUT_OF_REACH)
        if is_owed:
            self.put(channel, owner, is_out_of_reach=outcome is LeftOff.OUT_OF_REACH)
        return is_owed

    def enable_reported(self, channel: ChannelRef, owner: ProcessId, port: ChannelPort, reach: Reach) -> None:
        """Its client is back, and no service holds the GPU. No issuer walks a plan that is read there late (the driver
        hung): the enable must not be lost.
        """
        if channel.compute and reach is not Reach.NONE:
            port.enable_foreign([channel])
        else:
            self.keep(channel, owner, port.enable_unless_held(channel))

    def _pop(self, key: tuple[int, int]) -> Leftover | None:
        left = self._channels.pop(key, None)
        if left is not None:
            self._owners[left.owner] -= 1
            if not self._owners[left.owner]:
                del self._owners[left.owner]
        return left

    def take(self, channel: ChannelRef) -> bool:
        """Its client is back and has reported it. True if it was here; a reused handle (other cid) is not the same."""
        found = self._pop((channel.h_client, channel.h_channel))
        return found is not None and found.channel.cid == channel.cid

    def take_where(self, condition: Callable[[Leftover], bool]) -> list[Leftover]:
        taken = [key for key, left in self._channels.items() if condition(left)]
        return [left for left in map(self._pop, taken) if left is not None]

    def take_of(self, process: ProcessId) -> list[ChannelRef]:
        return [left.channel for left in self.take_where(lambda left: left.owner == process)]

    def owners(self) -> set[ProcessId]:
        return set(self._owners)

    def expected(self) -> set[ProcessId]:
        """Owners that a predecessor left: their shims come back. A client that left us is watched like any other."""
        return {left.owner for left in self.all() if not left.has_left}

    def all(self) -> list[Leftover]:
        return list(self._channels.values())


def enable_due(
    leftovers: Leftovers, gate: GatePort, processes: ProcessPort, patience_over: bool
) -> tuple[list[ChannelRef], int]:
    """Those whose process has ended; and once nobody is waited for, a predecessor's on GPUs that nobody holds. Returns
    them, and how many the driver still knew.
    """
    gone = {owner for owner in leftovers.owners() if processes.is_ending(owner.pid, owner.start_time)}
    ended = leftovers.take_where(lambda left: left.owner in gone)
    due = [left.channel for left in ended]
    known = gate.channels.enable_foreign(due) if due else 0
    for left in leftovers.take_where(lambda left: patience_over and not left.has_left):
        outcome = gate.channels.enable_unless_held(left.channel)
        if not leftovers.keep(left.channel, left.owner, outcome):
            due.append(left.channel)
            known += outcome is LeftOff.ENABLED
    return due, known
