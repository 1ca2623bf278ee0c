"""Finds the parts of a HarvestPolicy that hold nowhere, because another policy or a node overrules them. Pure.

The rules are those of `policies.py`; here their losers are named, so that the author of one need not guess.
"""

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from valve_kube.objects import Object
from valve_kube.policies import Policies, is_ruling, selects

from valve_scheduler.controller.conditions import condition

SHADOWED = "Shadowed"
_EXAMPLES = 3


class Shadow(enum.Enum):
    """Reasons of the condition; docs/cluster.md explains each."""

    NONE = "InForce"
    NO_NODE = "SelectsNoNode"
    OTHER_POLICY = "OtherPolicy"
    NODE_MODE = "NodeMode"
    HAS_SELECTOR = "HasNodeSelector"
    EARLIER_POLICY = "EarlierPolicy"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStanding:
    """`nodes` that its selector matches, those of them where its word holds, and what keeps it from the others."""

    nodes: int
    in_force: int
    shadows: tuple[tuple[Shadow, str], ...] = ()

    @property
    def reason(self) -> Shadow:
        if self.shadows:
            return self.shadows[0][0]
        return Shadow.NONE if self.nodes else Shadow.NO_NODE

    @property
    def message(self) -> str:
        if self.shadows:
            return "; ".join(message for _, message in self.shadows)
        return "nothing overrules it" if self.nodes else "no node that reports has these labels"


def standing(
    policy: Object, policies: Policies, nodes: Mapping[str, Object], modes: Mapping[str, str]
) -> PolicyStanding:
    """`nodes`: labels of the nodes that report; `modes`: what people set on some of them."""
    name, spec = policy["metadata"]["name"], policy["spec"]
    mine = [node for node, labels in nodes.items() if selects(spec, labels)]
    others: defaultdict[str, list[str]] = defaultdict(list)
    for node in mine if is_ruling(spec) else ():
        ruler = policies.ruler(nodes[node])
        if ruler is not None and ruler["metadata"]["name"] != name:
            others[ruler["metadata"]["name"]].append(node)
    lost = {node for taken in others.values() for node in taken}
    shadows = [
        (Shadow.OTHER_POLICY, f"HarvestPolicy {other} rules {_counted(taken, len(mine))}")
        for other, taken in others.items()
    ]
    stubborn = [node for node in mine if node not in lost and modes.get(node, spec.get("mode")) != spec.get("mode")]
    if "mode" in spec and stubborn:
        shadows.append((Shadow.NODE_MODE, f"spec.mode of the GPUHarvestNode holds on {_counted(stubborn, len(mine))}"))
    shadows += _of_the_cluster(policy, policies)

    return PolicyStanding(nodes=len(mine), in_force=len(mine) - len(lost), shadows=tuple(shadows))


def _of_the_cluster(policy: Object, policies: Policies) -> Iterable[tuple[Shadow, str]]:
    """Parts that are read from policies without a nodeSelector, the first by name."""
    spec, name = policy["spec"], policy["metadata"]["name"]
    parts = [part for part in ("namespaces", "eviction") if spec.get(part)]
    if spec.get("nodeSelector"):
        if parts:
            yield Shadow.HAS_SELECTOR, f"{' and '.join(parts)}: read from policies without a nodeSelector only"
        return
    fleet_wide = [item for item in policies.items if not item["spec"].get("nodeSelector")]
    earlier = [item for item in fleet_wide if item["metadata"]["name"] < name]
    for item in earlier:
        said = {entry["name"] for entry in item["spec"].get("namespaces") or []}
        twice = sorted(said & {entry["name"] for entry in spec.get("namespaces") or []})
        if twice:
            yield Shadow.EARLIER_POLICY, f"HarvestPolicy {item['metadata']['name']} has namespace {', '.join(twice)}"
    first = next((item for item in earlier if "eviction" in item["spec"]), None)
    if first is not None and "eviction" in spec:
        yield Shadow.EARLIER_POLICY, f"HarvestPolicy {first['metadata']['name']} has eviction"


def status_of(policy: Object, found: PolicyStanding, now_s: float) -> dict[str, Any]:
    before = (policy.get("status") or {}).get("conditions") or []
    is_shadowed = "True" if found.shadows else "False"
    return {
        "nodes": found.nodes,
        "nodesInForce": found.in_force,
        "conditions": [condition(SHADOWED, is_shadowed, found.reason.value, found.message, before, now_s)],
    }


def is_news(policy: Object, status: Mapping[str, Any]) -> bool:
    """It has just been overruled, or by something else than before."""
    before = (policy.get("status") or {}).get("conditions") or []
    old: Object = next((one for one in before if one["type"] == SHADOWED), {})
    (now,) = status["conditions"]
    return now["status"] == "True" and (old.get("status"), old.get("reason")) != ("True", now["reason"])


def _counted(nodes: list[str], most: int) -> str:
    """For instance: 2 of its 3 nodes (n1, n2)."""
    shown = ", ".join(sorted(nodes)[:_EXAMPLES]) + (", ..." if len(nodes) > _EXAMPLES else "")
    return f"{len(nodes)} of its {most} nodes ({shown})"
