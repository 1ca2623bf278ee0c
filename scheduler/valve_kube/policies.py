"""HarvestPolicies: which settings hold on which node and for which namespace. Pure.

One policy rules a node: of those that say something of nodes and whose nodeSelector matches its labels the one with the
most keys, then the first by name. Namespaces and the eviction budget belong to the whole cluster, so they are read from
policies without a selector, the first by name. `shadows.py` says which policies are overruled.
A policy that is not valid is refused by the API server's schema; what gets past it is left out by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]

ANY_NAMESPACE = "*"
DRAIN_POLICY = "valve-drain"  # made by `valve-scheduler drain`, gone with the release
# The value is paused-for-... while no pod may use the driver. GPU Operators before 26.7 have only the second label.
_DRIVER_LABELS = ("nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.device-plugin")
BRAKE = "valve-pause"  # every daemon and every extender watches it
# What a node's daemon obeys, as it stands in the policy.
_FOR_NODES = ("mode", "alignmentThreshold", "allowCrowded", "slotsPerGPU", "reclaimsPerHour", "cooldown", "granted")
# A policy that says none of these (but a pause, a drain, caps of namespaces) rules no node and overrules no other.
_RULING = frozenset({*_FOR_NODES, "sla"})

# What a GPUHarvestNode takes of namespaces, as its CRD says. With more, those that harvest anyway are left out first.
MOST_NAMESPACES = 1000
_STRICTEST = ("off", "observe", "harvest")

_NOTHING: Object = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRule:
    """mode empty: as the node has it. max_gpus None: as many as there are."""

    mode: str = ""
    max_gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """All HarvestPolicies of the cluster, sorted by name."""

    items: tuple[Object, ...] = ()
    namespaces: Mapping[str, NamespaceRule] = field(default_factory=dict)

    def ruler(self, labels: Mapping[str, str]) -> Object | None:
        """The policy that rules a node."""
        fitting = [item for item in self.items if is_ruling(item["spec"]) and selects(item["spec"], labels)]
        return max(fitting, key=lambda item: _keys(item["spec"]), default=None)  # max keeps the first among equals

    def of_node(self, labels: Mapping[str, str]) -> Object:
        """The spec of the policy that rules a node; empty when none does."""
        ruler = self.ruler(labels)
        return _NOTHING if ruler is None else ruler["spec"]

    def of_cluster(self) -> Object:
        """What a policy says of the whole cluster's evictions."""
        saying = (item["spec"] for item in self.items if "eviction" in item["spec"] and not _keys(item["spec"]))
        return {"eviction": next(saying, _NOTHING).get("eviction") or {}}

    def rule(self, namespace: str) -> NamespaceRule:
        return self.namespaces.get(namespace) or self.namespaces.get(ANY_NAMESPACE) or NamespaceRule()

    @property
    def brake(self) -> bool:
        """The whole fleet is paused; each daemon and each extender watches for that itself."""
        return any(map(is_brake, self.items))

    def paused(self, labels: Mapping[str, str]) -> bool:
        """Any policy can pause; none can lift the pause of another. The brake is not for the controller to spread."""
        pausing = (item for item in self.items if item["spec"].get("paused") and not is_brake(item))
        return any(selects(item["spec"], labels) for item in pausing)

    def drained_by(self, labels: Mapping[str, str]) -> str:
        """Why the node must be free of offline work, whatever its mode; empty when it need not."""
        for label in _DRIVER_LABELS:
            if labels.get(label, "").startswith("paused-"):
                return f"{label}={labels[label]}"
        draining = (item for item in self.items if item["spec"].get("drain"))
        return next((f"HarvestPolicy {i['metadata']['name']}" for i in draining if selects(i["spec"], labels)), "")


def is_brake(policy: Object) -> bool:
    """`valve cluster pause` in force: one object that every node hears of at once, whatever its labels."""
    spec = policy.get("spec") or {}
    return policy["metadata"]["name"] == BRAKE and bool(spec.get("paused")) and not _keys(spec)


def read_policies(items: Iterable[Object]) -> Policies:
    ordered = tuple(sorted((i for i in items if i.get("spec")), key=lambda item: str(item["metadata"]["name"])))
    rules: dict[str, NamespaceRule] = {}
    for item in ordered:
        for entry in item["spec"].get("namespaces") or [] if not _keys(item["spec"]) else []:
            most = entry.get("maxGPUs")
            rule = NamespaceRule(mode=entry.get("mode", ""), max_gpus=None if most is None else int(most))
            rules.setdefault(entry["name"], rule)

    return Policies(items=ordered, namespaces=rules)


def node_spec(
    policies: Policies, labels: Mapping[str, str], profile: Sequence[str] = (), defaults: Object = _NOTHING
) -> dict[str, Any]:
    """The part of a GPUHarvestNode's spec that the controller writes; the daemon and the extender read it. `profile`:
    offline pods to be measured; `defaults`: what holds where no policy says otherwise."""
    policy = policies.of_node(labels)
    resolved = {**defaults, **{key: policy[key] for key in _FOR_NODES if key in policy}}
    ruled = [(name, rule.mode) for name, rule in policies.namespaces.items() if rule.mode]
    ruled.sort(key=lambda pair: (_STRICTEST.index(pair[1]), pair[0]))
    if ruled:
        resolved["namespaces"] = [{"name": name, "mode": mode} for name, mode in sorted(ruled[:MOST_NAMESPACES])]
    if profile:
        resolved["profile"] = list(profile)
    if why := policies.drained_by(labels):
        resolved["drain"] = why

    return {"paused": policies.paused(labels), "resolved": resolved}


def merge_patch(before: Object, after: Object) -> dict[str, Any]:
    """What leads from one to the other: a merge patch keeps what it does not name, so what is gone is named."""
    patch: dict[str, Any] = dict.fromkeys(before)
    for key, value in after.items():
        old = before.get(key)
        patch[key] = merge_patch(old, value) if isinstance(value, dict) and isinstance(old, dict) else value

    return patch


def selects(spec: Object, labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())


def is_ruling(spec: Object) -> bool:
    return not _RULING.isdisjoint(spec)


def _keys(spec: Object) -> int:
    return len(spec.get("nodeSelector") or {})
