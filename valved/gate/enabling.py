"""Enables channels that are in no plan: a predecessor left them off, or a client whose process lives on."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from valved.gate.kept import KeptFiles
from valved.machine.ports import LeftOff
from valved.model.ids import ChannelRef
from valved.native._gate import ffi, lib

GPU_IS_LOST = 0x0F  # the GPU fell off the bus, and its work is lost
INVALID_CHANNEL = 0x21
NOT_SUPPORTED = 0x56
DENIED = frozenset({0x1B, NOT_SUPPORTED})  # the answer to a client that names channels of others
NOT_NOW = frozenset({0x03, 0x51, 0x65, 0x66})  # busy, no memory, no answer in time: it may do the same in a moment
GONE = frozenset({INVALID_CHANNEL, 0x23, 0x31, 0x33, 0x57})  # RM statuses of a channel that does not exist


class Enabling:
    _gate: Any
    _refusal: str
    _infos: Sequence[Any]
    kept: KeptFiles

    def enable_foreign(self, channels: Sequence[ChannelRef]) -> int:
        enabled = sum(self._enable(channel, unless_held=False) == 0 for channel in channels)
        for channel in channels:
            self.kept.drop(channel)
        return enabled

    def enable_unless_held(self, channel: ChannelRef) -> LeftOff:
        return self._enable_left(channel, unless_held=True)

    def enable_at_once(self, channel: ChannelRef) -> LeftOff:
        return self._enable_left(channel, unless_held=False)

    def _enable_left(self, channel: ChannelRef, *, unless_held: bool) -> LeftOff:
        """The file stays for as long as something is owed: nothing else would reach the channel."""
        is_kept = self.kept.entry(channel) is not None
        status = self._enable(channel, unless_held=unless_held)
        is_reached = status != -errno.ENODEV and (is_kept or not self._infos[channel.gpu].status)
        outcome = _left_off(status, is_reached=is_reached)
        if outcome in (LeftOff.ENABLED, LeftOff.ENDED):
            self.kept.drop(channel)
        return outcome

    def _enable(self, channel: ChannelRef, *, unless_held: bool) -> int:
        if self._refusal or not 0 <= channel.gpu < len(self._infos):
            return -errno.ENODEV
        own = {"reach": lib.VALVE_REACH_OWN, "h_client": channel.h_client, "h_channel": channel.h_channel}
        entry = ffi.new("struct valve_entry *", self.kept.entry(channel) or own)
        return int(lib.valve_gpu_enable(self._gate, channel.gpu, entry, unless_held))


def _left_off(status: int, *, is_reached: bool) -> LeftOff:
    if status == 0:
        return LeftOff.ENABLED
    if status in DENIED or not is_reached:
        return LeftOff.OUT_OF_REACH  # first: a refusal of our own RM client says nothing about the channel
    return LeftOff.ENDED if status in GONE or status == GPU_IS_LOST else LeftOff.HELD
