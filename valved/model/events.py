"""One thing that happened or was decided on this node. The same fields travel over gRPC and in recorded traces."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class EventKind(enum.Enum):
    """Every kind of event, with what its `service`, `client` and `gpus` mean where that is not plain."""

    STARTED = "started"
    TAKEN_OVER = "taken-over"  # state of a predecessor was found and used
    STOPPED = "stopped"
    CLAIMED = "claimed"  # a process was claimed for a role (Launch)
    CONSENT = "consent"  # the owner of an online service stated a target, or said whether it may be paused
    ENDED = "ended"  # a service: no process of it is left
    JOINED = "joined"
    REFUSED = "refused"  # a client was turned away
    LEFT = "left"
    NOTED = "noted"  # a client says something that the operator should know
    MALFORMED = "malformed"
    CHANNEL_ADDED = "channel-added"
    CHANNEL_GONE = "channel-gone"
    GATE = "gate"  # offline channels of one GPU were stopped
    HOLD = "hold"  # a service took its hold; all its GPUs were stopped already
    WAKE = "wake"  # a service dropped its hold
    WAKE_REFUSED = "wake-refused"  # a launch slipped in
    GATE_FAILED = "gate-failed"
    DECIDED = "decided"  # the wake policy gives a new answer
    COOLDOWN = "cooldown"  # a service's cooldown changed by more than a tenth
    FROZEN = "frozen"  # an offline process that could not be gated was stopped by signal
    THAWED = "thawed"
    KILLED = "killed"
    PAUSED = "paused"
    RESUMED = "resumed"
    POLICY = "policy"
    BREAKER = "breaker"
    GUARD = "guard"  # a GPU was closed because somebody may use it unseen, or was let go
    LEAVING = "leaving"  # an offline process that must leave this node was asked to end
    DRAINED = "drained"  # offline work had to leave this node, and none is left
    ATTACHED = "attached"  # an engine reads the table of its KV memory
    RESERVED = "reserved"  # the reservation policy takes or gives memory for an online service
    RECLAIMED = "reclaimed"  # memory was taken from offline work, or could not be
    RETURNED = "returned"  # an online service gave memory back
    LENT = "lent"  # offline work got memory
    REMAP_UNSAFE = "remap-unsafe"  # a mapping order hung: this client is asked between its steps from now on
    ENABLED_LEFTOVER = "enabled-leftover"  # channels that a predecessor left off


# Who was stopped, why, and what was changed by whom: these lines are kept as audit records.
AUDITED = frozenset(
    {
        EventKind.STARTED,
        EventKind.TAKEN_OVER,
        EventKind.STOPPED,
        EventKind.CLAIMED,
        EventKind.CONSENT,
        EventKind.REFUSED,
        EventKind.GATE_FAILED,
        EventKind.FROZEN,
        EventKind.THAWED,
        EventKind.KILLED,
        EventKind.PAUSED,
        EventKind.RESUMED,
        EventKind.POLICY,
        EventKind.BREAKER,
        EventKind.GUARD,
        EventKind.LEAVING,
        EventKind.DRAINED,
        EventKind.RECLAIMED,
        EventKind.REMAP_UNSAFE,
        EventKind.ENABLED_LEFTOVER,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`seq` is the decision id: it names this line in traces, logs and audit records."""

    seq: int
    t_ns: int  # CLOCK_MONOTONIC
    kind: EventKind
    service: int = 0
    client: int = 0
    gpus: tuple[int, ...] = ()
    reason: str = ""
    detail: Mapping[str, str | int] = field(default_factory=dict)

    def as_record(self) -> dict[str, object]:
        """One line of a recorded trace (proto/trace/event.schema.json)."""
        return {
            "seq": self.seq,
            "t_ns": self.t_ns,
            "kind": self.kind.value,
            "service": self.service,
            "client": self.client,
            "gpus": list(self.gpus),
            "reason": self.reason,
            "detail": dict(self.detail),
        }
