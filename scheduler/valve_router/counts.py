"""What the proxy and the endpoint picker both say of answers, and how they count them."""

from __future__ import annotations

from dataclasses import dataclass, field

EVENTS = "text/event-stream"
REPLICA_HEADER = "x-valve-replica"
GIVEN_UP = 499  # the client went away


@dataclass(slots=True)
class Counts:
    requests: dict[int, int] = field(default_factory=dict)  # by status
    retries: int = 0
    broken: int = 0  # answers that a replica broke off

    def add(self, status: int) -> None:
        self.requests[status] = self.requests.get(status, 0) + 1
