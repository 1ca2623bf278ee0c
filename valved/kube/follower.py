"""The cluster's word on this node, obeyed: mode, pause, cooldown and the rate of reclaims from the spec of its
GPUHarvestNode, and the brake of the whole fleet, a HarvestPolicy that each daemon watches itself.

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

from valved.clients.consents import Consents
from valved.gate.wake import GateService
from valved.model.consent import NO, YES, Said, consent_of
from valved.model.ids import Mode
from valved.node.brake import Brake
from valved.node.kv import Kv

log = logging.getLogger("valved.kube")

BY = "GPUHarvestNode"  # the author of pauses and modes, in the pause file and on record
FLEET = f"HarvestPolicy {BRAKE}"
COOLDOWN = {"startMilliseconds": "start_ns", "minMilliseconds": "floor_ns", "maxMilliseconds": "ceiling_ns"}
MOST_RECLAIMS = 1e6  # an hour, as the daemon's own configuration has it
MODES = frozenset(mode.value for mode in Mode)
MS_NS = 1_000_000


class Follower:
    def __init__(
        self, brake: Brake, gating: GateService, kv: Kv | None = None, consents: Consents | None = None
    ) -> None:
        self.namespace_modes: Mapping[str, str] = {}  # * for all others
        self.drain = ""  # why the cluster wants no offline work here, whatever the mode
        self._brake = brake
        self._gating = gating
        self._kv = kv
        self._consents = consents
        self._paused: dict[str, bool | None] = {BY: None, FLEET: None}  # None: not heard since the start
        self._mode = ""
        self._configured = brake.mode  # what holds while the cluster says nothing
        self._cooldown: Mapping[str, Any] = {}
        self._own_cooldown = gating.settings.cooldown  # what holds while the cluster says nothing
        self._reclaims: float | None = None
        self._refused: dict[str, str] = {}  # key of the spec -> why its value is not used

    def obey(self, spec: Mapping[str, Any]) -> bool:
        """True: something changed on which GPUs may depend."""
        resolved = spec.get("resolved") or {}
        self.drain = str(resolved.get("drain") or "")
        changed = self._follow_mode(mode_in_force(spec))
        self._follow_pause(BY, bool(spec.get("paused")))
        self._follow_cooldown(resolved.get("cooldown") or {})
        self._follow_reclaims(resolved.get("reclaimsPerHour"))
        self._follow_granted(resolved.get("granted") or {})
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

    @property
    def refused(self) -> tuple[str, ...]:
        """What the cluster says and this node cannot obey; its own value holds in place of it."""
        return tuple(f"{key}: {why}" for key, why in self._refused.items())

    def _follow_cooldown(self, cooldown: Mapping[str, Any]) -> None:
        """From what the node had before the cluster spoke: what a policy no longer says is in force no longer."""
        if cooldown == self._cooldown:
            return
        settings = self._gating.settings
        if not self._cooldown:
            self._own_cooldown = settings.cooldown
        self._cooldown = cooldown
        changes = {field: int(cooldown[key]) * MS_NS for key, field in COOLDOWN.items() if key in cooldown}
        settings.cooldown = self._own_cooldown
        self._refused.pop("cooldown", None)
        try:
            settings.cooldown = replace(self._own_cooldown, **changes)  # type: ignore[arg-type]
        except ValueError as error:
            self._refuse("cooldown", str(error))

    def _follow_reclaims(self, per_hour: float | None) -> None:
        if per_hour == self._reclaims:
            return
        self._reclaims = per_hour
        self._refused.pop("reclaimsPerHour", None)
        if per_hour is not None and not 0 < per_hour <= MOST_RECLAIMS:
            self._refuse("reclaimsPerHour", f"{per_hour:g} is not above 0 and at most {MOST_RECLAIMS:g}")
            per_hour = None
        if self._kv is not None:
            self._kv.reserve.accept(per_hour)

    def _follow_granted(self, granted: Mapping[str, Any]) -> None:
        """What it says comes before the node's own configuration. Words without sense offer nothing, and say why."""
        said = Said(
            slo=str(granted.get("slo") or ""),
            grant=_answer(granted.get("grant")),
            share_weights=_answer(granted.get("shareWeights")),
        )
        self._refused.pop("granted", None)
        if problem := consent_of([said]).problem:
            self._refuse("granted", problem)
            said = Said(grant=NO, share_weights=said.share_weights)
        if self._consents is not None:
            self._consents.say_for_fleet(said)

    def _refuse(self, key: str, why: str) -> None:
        self._refused[key] = why
        log.warning("setting from the cluster refused", extra={"facts": {"key": key, "error": why}})


def _answer(word: bool | None) -> str:
    return "" if word is None else YES if word else NO
