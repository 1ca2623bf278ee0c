"""The cluster's word on this node, obeyed: mode, pause and cooldown from the spec of its GPUHarvestNode, and the brake
of the whole fleet, a HarvestPolicy that each daemon watches itself.

A person's `mode` on the one node comes before `resolved`, which the controller writes from the HarvestPolicies. Only a
change of that word acts: what somebody set on the node itself stands until the cluster says something new.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from valve_kube.objects import mode_in_force
from valve_kube.policies import BRAKE

from valved.gate.wake import GateService
from valved.model.ids import Mode
from valved.node.brake import Brake

log = logging.getLogger("valved.kube")

BY = "GPUHarvestNode"  # who pauses and sets modes, in the pause file and on record
FLEET = f"HarvestPolicy {BRAKE}"
COOLDOWN = {"startMilliseconds": "start_ns", "minMilliseconds": "floor_ns", "maxMilliseconds": "ceiling_ns"}
MODES = frozenset(mode.value for mode in Mode)
MS_NS = 1_000_000


class Follower:
    def __init__(self, brake: Brake, gating: GateService) -> None:
        self.namespace_modes: Mapping[str, str] = {}  # * for all others
        self.drain = ""  # why the cluster wants no offline work here, whatever the mode
        self._brake = brake
        self._gating = gating
        self._paused: dict[str, bool | None] = {BY: None, FLEET: None}  # None: not heard since the start
        self._mode = ""
        self._configured = brake.mode  # what holds while the cluster says nothing
        self._cooldown: Mapping[str, Any] = {}

    def obey(self, spec: Mapping[str, Any]) -> bool:
        """True: something changed on which GPUs may depend."""
        resolved = spec.get("resolved") or {}
        self.drain = str(resolved.get("drain") or "")
        changed = self._follow_mode(mode_in_force(spec))
        self._follow_pause(BY, bool(spec.get("paused")))
        self._follow_cooldown(resolved.get("cooldown") or {})
        modes = {entry["name"]: entry["mode"] for entry in resolved.get("namespaces") or []}
        changed |= modes != self.namespace_modes
        self.namespace_modes = modes
        return changed

    def _follow_mode(self, mode: str) -> bool:
        if mode == self._mode or mode not in {"", *MODES}:
            return False
        if not self._mode:
            self._configured = self._brake.mode
        self._mode = mode
        self._brake.set_mode(Mode(mode) if mode else self._configured, BY)
        return True

    def obey_brake(self, is_paused: bool) -> None:
        self._follow_pause(FLEET, is_paused)

    def _follow_pause(self, who: str, is_paused: bool) -> None:
        """A file, so it holds through a restart without an API server. One made on the node is not lifted from here;
        one of the cluster when nobody there wants it any more, and all have been heard."""
        brake = self._brake
        self._paused[who] = is_paused
        if is_paused and not brake.is_paused:
            brake.pause(who)
        elif brake.paused_by in self._paused and set(self._paused.values()) == {False} and not brake.is_draining:
            brake.resume()

    def _follow_cooldown(self, cooldown: Mapping[str, Any]) -> None:
        if cooldown == self._cooldown:
            return
        self._cooldown = cooldown
        settings = self._gating.settings
        changes = {field: int(cooldown[key]) * MS_NS for key, field in COOLDOWN.items() if key in cooldown}
        try:
            settings.cooldown = replace(settings.cooldown, **changes)  # type: ignore[arg-type]
        except ValueError as error:
            log.warning("cooldown of the cluster not used", extra={"facts": {"error": str(error)}})
