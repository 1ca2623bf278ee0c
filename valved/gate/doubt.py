"""A count of open requests that leaked, at a service that has others: what tells it from requests that are served.

policy/wake.py believes a count no more once the GPU was idle for a minute. Where requests come more often, that minute
never comes. Long idle stretches that add up to it, while the count never came to 0, say the same: with permission to
wake, a hold ends with the last open request, so they are counted within one hold. They say nothing where GPU work was
begun between two looks in which no request began or ended and no fewer were open before: some of these are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valved.machine.ports import ClientView
from valved.model.ids import Role
from valved.state.registry import ClientEntry

LEAST_NS = 1_000_000_000  # who is served has its GPU idle for shorter than that, nearly always, ...
COOLDOWNS = 5  # ... and for shorter than so many cooldowns: each is twice the largest gap that was seen


@dataclass(slots=True)
class Doubt:
    held_since_ns: int = 0  # 0: no look yet
    idle_ns: int = 0  # in stretches that have ended
    stretch_ns: int = 0  # the one that goes on, as it was seen last
    least: int = 0  # open requests, at any look; 0: no look yet
    told: int = 0  # beginnings and ends of requests, up to the last look
    submitted: int = 0  # GPU work, up to then

    def look(
        self,
        looks: Sequence[tuple[ClientEntry, ClientView]],
        open_requests: int,
        held_since_ns: int,
        cooldown_ns: int,
        now_ns: int,
    ) -> None:
        if held_since_ns != self.held_since_ns:
            self.end()
            self.held_since_ns = held_since_ns
        launchers = [view for client, view in looks if client.role is not Role.HOOK]
        idle_since_ns = max(held_since_ns, *(view.idle_ns for view in launchers), 0)
        stretch_ns = max(0, now_ns - idle_since_ns) if all(view.is_idle for view in launchers) else 0
        if stretch_ns < self.stretch_ns and self.stretch_ns >= max(LEAST_NS, COOLDOWNS * cooldown_ns):
            self.idle_ns += self.stretch_ns
        self.stretch_ns = stretch_ns
        self._heed_work(looks, open_requests, sum(view.submitted for view in launchers))

    def _heed_work(self, looks: Sequence[tuple[ClientEntry, ClientView]], open_requests: int, submitted: int) -> None:
        told = sum(view.requests_started + view.requests_ended for _, view in looks)
        if open_requests <= self.least and told == self.told and submitted != self.submitted:
            self.idle_ns = 0
        self.least = min(self.least or open_requests, open_requests)
        self.told, self.submitted = told, submitted

    def end(self) -> None:
        self.held_since_ns = self.idle_ns = self.stretch_ns = self.least = 0
