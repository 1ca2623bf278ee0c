"""Names for things: ids that cannot be mixed up, and the few choices everything else is made of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

ClientId = NewType("ClientId", int)
ServiceId = NewType("ServiceId", int)
GpuIndex = NewType("GpuIndex", int)


class Role(enum.IntEnum):
    """What a client is. Values are those of `enum valve_role` in proto/abi/region.h."""

    NONE = 0
    ONLINE = 1
    OFFLINE = 2
    HOOK = 3


class Mode(enum.Enum):
    """How far Valve may go on this node."""

    OFF = "off"
    OBSERVE = "observe"
    HARVEST = "harvest"


class Remap(enum.Enum):
    """How memory is taken from an offline process."""

    AUTO = "auto"  # sparse in a process that has passed its trial, else cooperative
    SPARSE = "sparse"  # channels off, valved makes the memory sparse itself, channels on
    HELPER = "helper"  # channels off, a thread of the shim maps, channels on
    COOPERATIVE = "cooperative"  # between two steps of the engine, channels on


TRIED_FIRST = frozenset({Remap.AUTO, Remap.SPARSE})
"""Settings under which each offline process is tried before its memory is taken from outside."""


class TrialOutcome(enum.Enum):
    """What a process's trial has shown (valved/kv/trial.py)."""

    UNTRIED = "not tried yet"
    PASSED = "passed"
    REFUSED = "refused"  # by the driver, or by the process when it looked
    WRONG = "wrong bytes"
    HUNG = "hung"


class Reach(enum.Enum):
    """How offline channels of a GPU are stopped, best first."""

    CHANNEL_OWN = "channel-own"  # disable list from valved's own RM client
    CHANNEL_FD = "channel-fd"  # the same on the workload's passed nvidiactl fd
    CHANNEL_SELF = "channel-self"  # the shim switches its own channels
    LAUNCH_GATE = "launch-gate"  # the shim holds launches; no sub-millisecond claim
    NONE = "none"  # nothing works here: observe only


class ProcessId(NamedTuple):
    """A process that cannot be confused with a later one of the same number. In files: the two numbers."""

    pid: int
    start_time: int  # field 22 of /proc/PID/stat, in clock ticks since boot


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRef:
    """One GPU channel of a client, as the shim reported it."""

    gpu: GpuIndex
    h_client: int
    h_channel: int
    cid: int
    h_tsg: int
    engine: int
    compute: bool
