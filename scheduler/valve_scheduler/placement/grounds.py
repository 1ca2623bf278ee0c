"""Which nodes are closed to a pod by cordons, taints and labels: one judgement for controller and `valve explain`.

The extender keeps no nodes: kube-scheduler asks it about those alone that it has found open by the same rules."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from valve_kube.client import Json
from valve_kube.node_wish import Ground, NodeWish, ground_of

CLOSED_TEXT = "valve: the node is cordoned, tainted, or none that the pod asks for"
_WISHES = 256  # different ones whose answers are kept; one of 1,000 nodes is 33 KB


class Grounds:
    """Nodes as the watch shows them. Answers are kept until a node changes in what is asked of it."""

    def __init__(self) -> None:
        self._nodes: dict[str, Ground] | None = None  # None: not followed, the caller has judged them before
        self._closed: OrderedDict[NodeWish, frozenset[str]] = OrderedDict()
        self._version = -1

    def __contains__(self, name: object) -> bool:
        return name in (self._nodes or {})

    def labels(self, name: str) -> Mapping[str, str]:
        """None of a node that is not there."""
        ground = (self._nodes or {}).get(name)
        return ground.labels if ground is not None else {}

    def put(self, node: Json) -> None:
        ground, nodes = ground_of(node), self._nodes or {}
        if nodes.get(ground.name) != ground:
            self._nodes = {**nodes, ground.name: ground}
            self._closed.clear()

    def drop(self, node: Json) -> None:
        (self._nodes or {}).pop(node["metadata"]["name"], None)
        self._closed.clear()

    def replace(self, nodes: Iterable[Json]) -> None:
        self._nodes = {ground.name: ground for ground in map(ground_of, nodes)}
        self._closed.clear()

    def closed_to(self, wish: NodeWish, names: Iterable[str], version: int) -> frozenset[str]:
        """Those of `names` that the pod may not use; `version` changes with them. Of a node that was not reported
        nothing is known, so it has no labels and no taints."""
        if self._nodes is None:
            return frozenset()
        if version != self._version:
            self._closed.clear()
            self._version = version
        closed = self._closed.pop(wish, None)
        if closed is None:
            grounds = (self._nodes.get(name) or Ground(name=name, labels={}) for name in names)
            closed = frozenset(one.name for one in grounds if not wish.allows(one))
        self._closed[wish] = closed
        if len(self._closed) > _WISHES:
            self._closed.popitem(last=False)

        return closed
