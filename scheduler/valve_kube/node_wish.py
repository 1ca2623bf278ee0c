"""Which nodes a pod may use, whatever their GPUs: cordons, taints and labels, as kube-scheduler judges them. Pure.

kube-scheduler has judged this before it asks the extender. Code that looks at the fleet without being asked by it (the
controller, `valve explain`) must judge it too, or counts places that the pod never gets."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

Object = Mapping[str, Any]

_CORDON = ("node.kubernetes.io/unschedulable", "", "NoSchedule")
_CLOSING = ("NoSchedule", "NoExecute")  # effects of a taint that keep a pod away
CLAIMED_VOLUMES = ("persistentVolumeClaim", "ephemeral")
_ALWAYS = "requiredDuringSchedulingIgnoredDuringExecution"
_NAME = "@metadata.name"  # the one field of a node that an affinity may name, as a key that no label can have
_DECIMAL = re.compile("[+-]?[0-9]+")
KEPT = "nodeWish"  # key of the spec of a pod of which only the wish was kept
MOST = 200  # requirements, their values and tolerations: each is held against each node while the lease waits
MOST_TEXT = 16 << 10  # characters of all of them: the API server takes values of a megabyte, and wishes are kept

Taint = tuple[str, str, str]  # key, value, effect
Requirement = tuple[str, str, tuple[str, ...]]  # label, operator, values
Term = tuple[Requirement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        key, value, effect = taint
        if self.effect not in ("", effect) or self.key not in ("", key):
            return False
        if self.operator == "Exists":
            return True
        return self.operator in ("", "Equal") and self.key == key and self.value == value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a Node says of the pods that may use it."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWish:
    """What a pod says of the nodes it may use; equal for the pods of one Job. `terms` None: nothing by affinity.

    `is_bound`: to what only kube-scheduler can tell of: pods that are somewhere, a volume, or a wish too long to be
    judged here."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()
    is_bound: bool = False

    def allows(self, ground: Ground) -> bool:
        labels = ground.labels
        return (
            all(any(one.tolerates(taint) for one in self.tolerations) for taint in ground.taints)
            and all(labels.get(key) == value for key, value in self.selector)
            and (self.terms is None or any(_meets(term, ground) for term in self.terms))
        )


ANY_NODE = NodeWish()
TOO_LONG = NodeWish(tolerations=(Toleration(operator="Exists"),), is_bound=True)  # no node is called closed to it


def node_wish(spec: Object) -> NodeWish:
    """Of the spec of a pod, as the API server has it or as `shapes` keeps it."""
    if kept := spec.get(KEPT):
        return cast(NodeWish, kept)
    affinity = spec.get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get(_ALWAYS)
    if _size(spec, required or {}) > MOST:
        return TOO_LONG
    tolerations = {
        Toleration(**{key: str(one.get(key) or "") for key in ("key", "operator", "value", "effect")})
        for one in spec.get("tolerations") or []
    }
    found = NodeWish(
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        terms=None if required is None else tuple(map(_term, required.get("nodeSelectorTerms") or [])),
        tolerations=tuple(sorted(tolerations, key=repr)),
        is_bound=_is_bound(spec, affinity),
    )
    return found if _text(found) <= MOST_TEXT else TOO_LONG


def ground_of(node: Object) -> Ground:
    metadata, spec = node["metadata"], node.get("spec") or {}
    taints = [(one["key"], one.get("value") or "", one["effect"]) for one in spec.get("taints") or []]
    cordon = [_CORDON] if spec.get("unschedulable") else []

    return Ground(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        taints=tuple(sorted({taint for taint in taints + cordon if taint[2] in _CLOSING})),
    )


def _size(spec: Object, required: Object) -> int:
    terms = required.get("nodeSelectorTerms") or []
    asked = [one for term in terms for kind in ("matchExpressions", "matchFields") for one in term.get(kind) or []]
    values = sum(len(one.get("values") or []) for one in asked)
    return len(spec.get("nodeSelector") or {}) + len(spec.get("tolerations") or []) + len(terms) + len(asked) + values


def _text(wish: NodeWish) -> int:
    asked = [(key, *values) for term in wish.terms or () for key, _, values in term]
    tolerated = [(one.key, one.value) for one in wish.tolerations]
    return sum(len(text) for texts in (*wish.selector, *asked, *tolerated) for text in texts)


def _is_bound(spec: Object, affinity: Object) -> bool:
    spreads = spec.get("topologySpreadConstraints") or []
    return bool(
        any((affinity.get(kind) or {}).get(_ALWAYS) for kind in ("podAffinity", "podAntiAffinity"))
        or any(one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule" for one in spreads)
        or any(kind in volume for volume in spec.get("volumes") or [] for kind in CLAIMED_VOLUMES)
    )


def _term(term: Object) -> Term:
    labels, fields = (term.get(kind) or [] for kind in ("matchExpressions", "matchFields"))
    asked = [(str(one.get("key")), one) for one in labels] + [(f"@{one.get('key')}", one) for one in fields]
    return tuple((key, str(one.get("operator")), tuple(one.get("values") or [])) for key, one in asked)


def _meets(term: Term, ground: Ground) -> bool:
    """A term without a requirement means no node."""
    return bool(term) and all(_holds(requirement, ground) for requirement in term)


def _holds(requirement: Requirement, ground: Ground) -> bool:
    key, operator, values = requirement
    found = ground.name if key == _NAME else ground.labels.get(key)
    judge = _OPERATORS.get(operator)
    return judge is not None and judge(found, values)


def _compared(found: str | None, values: tuple[str, ...], judge: Callable[[int, int], bool]) -> bool:
    try:
        return found is not None and len(values) == 1 and judge(_number(found), _number(values[0]))
    except ValueError:
        return False


def _number(text: str) -> int:
    """As Go reads an int64: no blanks, no underscores, no digits of other scripts."""
    if _DECIMAL.fullmatch(text) is None or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(text)
    return int(text)


_OPERATORS: Mapping[str, Callable[[str | None, tuple[str, ...]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, values: found is not None,
    "DoesNotExist": lambda found, values: found is None,
    "Gt": lambda found, values: _compared(found, values, lambda one, other: one > other),
    "Lt": lambda found, values: _compared(found, values, lambda one, other: one < other),
}
