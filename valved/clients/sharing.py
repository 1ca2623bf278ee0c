"""Tells trainers of this machine which online services let their weights be mapped: a file in the run folder.

A trainer lives in an environment of its own, without gRPC, and reads the file at each tile. Every user may read it, so
it does not name a service that shares nothing. It lists the processes of such a service, because files that they map
are theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from valved.gate.wake import GateService
from valved.machine.ports import PromptPort
from valved.model.consent import Consent
from valved.model.ids import ServiceId
from valved.state.registry import Books

log = logging.getLogger("valved")


class SharedWeights:
    def __init__(
        self,
        books: Books,
        gating: GateService,
        consent: Callable[[ServiceId], Consent],
        path: Path,
        files: PromptPort,
    ) -> None:
        self._files = files
        self._books = books
        self._gating = gating
        self._consent = consent
        self._path = path
        self._is_told = False
        self._written = b""
        self._problem = ""

    def begin(self) -> None:
        """Precondition: all services that the predecessor knew are known. A service that the file leaves out has taken
        its consent back."""
        self._is_told = True
        self.refresh()

    @property
    def is_behind(self) -> bool:
        """The file could not be written."""
        return self._is_told and not self._written

    def refresh(self) -> None:
        content = msgspec.json.encode({"services": [self._entry(service) for service in sorted(self._gating.online)]})
        if not self._is_told or content == self._written:
            return
        try:
            self._files.do(partial(self._put, content))
            self._written, self._problem = content, ""
        except OSError as error:
            self._withdraw(error)

    def _entry(self, service: ServiceId) -> dict[str, object]:
        entry = self._books.services.get(service)
        root = [entry.root] if entry is not None and entry.root is not None else []
        processes = {*root, *(client.process for client in self._books.clients_of(service))}
        shares = self._consent(service).share_weights
        return {
            "id": service,
            "name": entry.name if entry is not None and shares else "",
            "shares": shares,
            "processes": sorted(processes),
        }

    def _put(self, content: bytes) -> None:
        fresh = self._path.with_name(f".{self._path.name}.new")
        fresh.write_bytes(content)
        fresh.chmod(0o644)
        fresh.replace(self._path)

    def _withdraw(self, error: OSError) -> None:
        """Removes the file: an old one may hold a consent that was taken back."""
        self._written = b""
        problem = "weights.json cannot be written"
        try:
            self._files.do(partial(self._path.unlink, missing_ok=True))
        except OSError:
            problem += ": it still says the former consents"
        if problem != self._problem:  # tried again every two seconds
            self._problem = problem
            log.warning(problem, extra={"facts": {"file": str(self._path), "error": str(error)}})
