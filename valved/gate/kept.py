"""The files of offline clients whose link ended while their process lives on.

A channel that is off and is reached by its process's file alone (rung channel-fd) stays off as long as a service may
need that: so the file stays, too, until the channel is enabled, is told of anew, or turns out to be on. The native
client owns the file. It is in no list of the gate any more.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from valved.gate.armed import ArmedChannel, GateClient, RmNumbers, entry_of
from valved.model.ids import ChannelRef
from valved.native._gate import lib

MOST = 64  # clients whose files are kept: each has up to 16

Key = tuple[int, int]


def _key(channel: ChannelRef) -> Key:
    return channel.h_client, channel.h_channel


class KeptFiles:
    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self._channels: dict[Key, tuple[ArmedChannel, GateClient]] = {}
        self._held: Counter[int] = Counter()  # how many of them, by the id() of the holder

    def has_room(self, holder: GateClient) -> bool:
        return self.holds(holder) or len(self._held) < MOST

    def put(self, channel: ArmedChannel, holder: GateClient) -> None:
        """Precondition: its rung is channel-fd."""
        self.drop(channel.ref)
        self._channels[_key(channel.ref)] = channel, holder
        self._held[id(holder)] += 1

    def holds(self, holder: GateClient) -> bool:
        return id(holder) in self._held

    def entry(self, channel: ChannelRef) -> dict[str, Any] | None:
        """How this channel is reached, if it is that very one."""
        armed, holder = self._channels.get(_key(channel), (None, None))
        return entry_of(armed, holder) if armed and holder and armed.ref.cid == channel.cid else None

    def hand_on(self, channel: ChannelRef, to: GateClient, numbers: RmNumbers) -> None:
        """Its process is back with it: the file is the new client's, too. Precondition: the RM client is its own."""
        _, holder = self._channels.get(_key(channel), (None, None))
        if holder is None or numbers.fd >= 0:
            return
        before = holder.rm_clients[channel.h_client]
        try:
            fd = os.dup(before.fd)
        except OSError:  # no descriptor is left: its process is asked for the file, as one that is new
            return
        if lib.valve_client_take_fd(to.native, fd) == 0:
            numbers.fd, numbers.h_subdevice = fd, numbers.h_subdevice or before.h_subdevice

    def drop(self, channel: ChannelRef) -> None:
        _, holder = self._channels.pop(_key(channel), (None, None))
        if holder is None:
            return
        self._held[id(holder)] -= 1
        if not self._held[id(holder)]:
            del self._held[id(holder)]
            lib.valve_client_free(self._gate, holder.native)

    def close(self) -> None:
        for channel, _ in list(self._channels.values()):
            self.drop(channel.ref)
