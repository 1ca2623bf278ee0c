"""Decides whether offline work on a node runs, is held, leaves, or has gone. Pure.

| switch | offline work ends in | who ends the job |
|---|---|---|
| none, mode harvest | running: gated and woken as online services need | nobody |
| pause | held; it resumes when the pause ends | nobody |
| mode off or observe, drain | empty | one machine: valved; a cluster: the controller evicts |

The gate of every GPU stays closed in every row but the first, also when no offline process is left: one that comes
later finds it closed. So no order of switches, arrivals and restarts lets offline work run while it is on its way out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from valved.model.ids import Mode


class Work(enum.Enum):
    """The state of a node's offline work."""

    RUNNING = "running"  # where no online service and no guard holds the GPU
    HELD = "held"  # stopped on every GPU, to go on later
    LEAVING = "leaving"  # stopped on every GPU until its processes have ended
    EMPTY = "empty"  # it had to leave, and none is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What people and the cluster have said."""

    mode: Mode
    is_paused: bool
    is_draining: bool

    @property
    def must_leave(self) -> bool:
        """Offline processes must end. None is admitted meanwhile."""
        return self.is_draining or self.mode is not Mode.HARVEST

    @property
    def is_closed(self) -> bool:
        """No offline work runs on any GPU."""
        return self.must_leave or self.is_paused


def decide_work(switches: Switches, *, is_present: bool) -> Work:
    """`is_present`: some offline process lives on this node."""
    if switches.must_leave:
        return Work.LEAVING if is_present else Work.EMPTY
    return Work.HELD if switches.is_paused else Work.RUNNING
