"""Processes that may launch nothing, whatever their GPUs do, and why. The last reason gone lets them."""

from __future__ import annotations

from valved.machine.ports import GatePort
from valved.model.ids import ClientId


class LaunchHolds:
    def __init__(self, gate: GatePort) -> None:
        self._gate = gate
        self._reasons: dict[ClientId, set[str]] = {}

    def hold(self, client: ClientId, reason: str) -> None:
        """Precondition: the client is in the books."""
        reasons = self._reasons.setdefault(client, set())
        if not reasons:
            self._gate.hold_launches(client, True)
        reasons.add(reason)

    def release(self, client: ClientId, reason: str) -> None:
        reasons = self._reasons.get(client, set())
        if reason not in reasons:
            return
        reasons.discard(reason)
        if not reasons:
            del self._reasons[client]
            self._gate.hold_launches(client, False)

    def forget(self, client: ClientId) -> None:
        """It has left."""
        self._reasons.pop(client, None)

    def is_held(self, client: ClientId) -> bool:
        return client in self._reasons
