"""Useful tokens of a service's engines, each counted once.

An engine's hook says on its page what its process has done in all, and says it again on a new page when it has
reconnected. So what was read is kept by process, and the page of one that has just come back takes nothing away.
"""

from __future__ import annotations

from collections import defaultdict

from valved.model.figures import plausible
from valved.model.ids import ProcessId, ServiceId


class UsefulTokens:
    def __init__(self) -> None:
        self._of: defaultdict[ServiceId, dict[ProcessId, int]] = defaultdict(dict)

    def read(self, service: ServiceId, process: ProcessId, tokens: int) -> None:
        """A page says so, or a predecessor's books."""
        of = self._of[service]
        of[process] = max(of.get(process, 0), plausible(tokens))

    def by_process(self, service: ServiceId) -> dict[ProcessId, int]:
        return self._of.get(service, {})

    def forget(self, service: ServiceId) -> None:
        self._of.pop(service, None)
