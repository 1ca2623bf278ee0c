"""Holds every GPU while somebody knocks whom valved cannot take for want of descriptors or memory.

It may be online work, whose launches nobody hears then. The guard (node/bystanders.py) may be as blind at that time:
NVML needs both, too.
"""

from __future__ import annotations

from valved.gate.wake import GateService
from valved.machine.clock import Clock, TimerHandle
from valved.model.events import EventKind
from valved.state.journal import Journal
from valved.state.registry import DEAF_SERVICE

DEAF_NS = 35_000_000_000  # a shim that was refused asks again every 30 s (REFUSED_MAX_NS of session.c)
LACK = "valved lacks descriptors or memory for a process that connects: every GPU is held"
STANDS_NS = 300_000_000_000  # the guard may stop one before it asks again, and lets it go each minute


class Unheard(EOFError):
    """What a peer said, or what it should hear, is lost, as valved was out of descriptors or memory for it."""

    def __str__(self) -> str:
        return "valved is out of descriptors"


class DeafHold:
    def __init__(self, gating: GateService, journal: Journal, clock: Clock) -> None:
        self._gating, self._journal, self._clock = gating, journal, clock
        self._until_ns = 0
        self._timer: TimerHandle | None = None

    def not_taken(self) -> None:
        """Called for each that is turned away unheard."""
        self._until_ns = self._clock.now_ns() + DEAF_NS
        if self._timer is not None:
            return
        self._timer = self._clock.call_at_ns(self._until_ns, self._look)
        self._gating.set_standing(DEAF_SERVICE, frozenset(self._gating.gpus))
        self._journal.emit(EventKind.NOTED, reason=f"{LACK}. See its limits")

    @property
    def lack(self) -> str:
        """For people. Empty: it lacks nothing."""
        return LACK if self._timer is not None else ""

    def may_wait(self) -> bool:
        """Whether somebody who was turned away unheard may not have asked again yet."""
        return bool(self._until_ns) and self._clock.now_ns() < self._until_ns + STANDS_NS

    def _look(self) -> None:
        if self._clock.now_ns() < self._until_ns:
            self._timer = self._clock.call_at_ns(self._until_ns, self._look)
            return
        self._timer = None
        self._gating.set_standing(DEAF_SERVICE, frozenset())
