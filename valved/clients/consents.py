"""Which online services have stated a target, and which may be paused for offline work.

Asked anew each time: an annotation that is taken back counts from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from valved.gate.wake import GateService
from valved.model.consent import NOTHING, SILENT, Consent, Said, consent_of
from valved.model.events import EventKind
from valved.model.ids import ServiceId
from valved.state.journal import Journal
from valved.state.registry import Books


class PodWords(Protocol):
    """What the annotations of a pod and of its namespace say."""

    def said_of(self, cgroup: str) -> tuple[Said, ...]: ...


class Consents:
    def __init__(
        self, books: Books, gating: GateService, journal: Journal, default: Said, pods: PodWords | None = None
    ) -> None:
        """`pods`: on a Kubernetes node."""
        self._pods = pods
        self._books = books
        self._gating = gating
        self._journal = journal
        self._default = default
        self._fleet = SILENT  # what a HarvestPolicy says, before the node's own configuration

    def say(self, service: ServiceId, said: Said) -> None:
        """The launcher's words. The last ones count."""
        online = self._gating.online.get(service)
        if online is None or online.said == said:
            return
        online.said = said
        self._gating.listener.clients_changed()
        self._journal.emit(EventKind.CONSENT, service=service, reason=self.of(service).words() or "nothing is offered")

    def say_for_fleet(self, said: Said) -> None:
        """The cluster's words for services of this node that have none of their own. They count at once."""
        if said != self._fleet:
            self._fleet = said
            self._gating.listener.clients_changed()

    def of(self, service: ServiceId) -> Consent:
        if service not in self._gating.online:
            return NOTHING
        return consent_of(self._places(service))

    def _places(self, service: ServiceId) -> Iterator[Said]:
        yield self._gating.online[service].said
        entry = self._books.services.get(service)
        root = entry.root if entry is not None else None
        claim = self._books.claims.get(root) if root is not None else None
        if self._pods is not None and claim is not None and claim.cgroup:
            yield from self._pods.said_of(claim.cgroup)
        yield self._fleet
        yield self._default
