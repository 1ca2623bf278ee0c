"""Carries HarvestPolicies to the nodes, and says of each policy where it holds."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from valve_kube import names
from valve_kube.client import Json
from valve_kube.policies import merge_patch, node_spec

from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.conditions import Told, event
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.shadows import is_news, standing, status_of
from valve_scheduler.placement.rank import PlacementSettings

log = logging.getLogger(__name__)


class PolicyWords:
    def __init__(self, caches: Caches, hands: Hands, now_s: Callable[[], float], again_after_s: float) -> None:
        self._caches, self._hands, self._now_s = caches, hands, now_s
        self._again_after_s = again_after_s
        self._told: dict[str, tuple[Json, float]] = {}  # by node, and when

    async def apply(self, profile: Mapping[str, Sequence[str]]) -> None:
        """Write into each GPUHarvestNode what the policies say of it, and which of its pods to profile: the one object
        its daemon follows."""
        caches, now_s = self._caches, self._now_s()
        policies, theta = caches.state.policies, caches.state.settings.theta
        # Code that judges a node knows the default; what differs from it stands in the node.
        defaults = {} if theta == PlacementSettings().theta else {"alignmentThreshold": theta}
        patches = []
        for name, node in caches.nodes_by_name().items():
            wanted = node_spec(policies, caches.grounds.labels(name), profile.get(name, ()), defaults)
            spec = node.get("spec") or {}
            stands = {"paused": bool(spec.get("paused")), "resolved": spec.get("resolved") or {}}
            told, told_s = self._told.get(name, ({}, 0.0))
            # An older CRD drops what it does not know: the same is not said to it again every second.
            if stands != wanted and (told != wanted or now_s - told_s >= self._again_after_s):
                self._told[name] = wanted, now_s
                patch = {"spec": merge_patch(stands, wanted)}
                patches.append(self._hands.patch(f"{names.API_PATH}/gpuharvestnodes/{name}", patch))
        if patches:
            log.info("policies", extra={"nodes": len(patches)})
        await asyncio.gather(*patches)

    async def judge(self) -> None:
        """Say of each policy where it holds, and what overrules it where it does not."""
        policies, now_s = self._caches.state.policies, self._now_s()
        nodes = {name: self._caches.grounds.labels(name) for name in self._caches.nodes_by_name()}
        modes = {name: (node.get("spec") or {}).get("mode") for name, node in self._caches.nodes_by_name().items()}
        said = {name: mode for name, mode in modes.items() if mode}
        for policy in policies.items:
            status = status_of(policy, standing(policy, policies, nodes, said), now_s)
            if status == policy.get("status"):
                continue
            path = f"{names.API_PATH}/harvestpolicies/{policy['metadata']['name']}/status"
            if await self._hands.patch(path, {"status": status}) and is_news(policy, status):
                note = status["conditions"][0]["message"]
                told = event(policy, Told.POLICY_SHADOWED, note, now_s, kind="HarvestPolicy")
                await self._hands.tell(told)
