"""What the journal tells of messages that valved refuses: so often as an account may be told of.

Anybody may say such messages without end, and each event goes to the disk and to every stream. Services of an account
are told of apart from its other processes, which never keep a service's own trouble from being told.
"""

from __future__ import annotations

from valved.clients.accounts import account_of
from valved.clients.turns import Buckets
from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import Role
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry

TELL_NS = 500_000_000  # one in this time, ...
AT_ONCE = 20  # ... and so many at once: all of what a broken engine says as it starts


class Complaints:
    def __init__(self, registry: Books, journal: Journal, clock: Clock) -> None:
        self._registry = registry
        self._journal = journal
        self._clock = clock
        self._told = Buckets(share=1.0, burst_ns=AT_ONCE * TELL_NS)

    def tell(self, entry: ClientEntry, reason: str, gpus: tuple[int, ...] = (), **detail: str | int) -> None:
        """Of a client. Nothing, if its account was told of often enough."""
        is_online = self._registry.services[entry.service].role is Role.ONLINE
        who, now_ns = (account_of(entry.uid, entry.cgroup), is_online), self._clock.now_ns()
        if self._told.wait_ns(who, now_ns):
            return
        self._told.took(who, TELL_NS, now_ns)
        about = {"pid": entry.process.pid, **detail}
        self._journal.put(EventKind.NOTED, entry.service, entry.id, gpus, reason, now_ns, about)
