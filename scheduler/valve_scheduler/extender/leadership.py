"""Whether the kube-scheduler beside us leads, and whether our view was read after it began to.

Only the leader calls its extender. What a former leader assumed died with it, so its last Bindings must be in
our view before we give a GPU away: each time the lease passes to us, one consistent list of offline pods is
read first."""

import logging
from collections.abc import Callable

from valve_kube.client import Json, KubeClient
from valve_kube.reflector import Reflector, Sink

log = logging.getLogger(__name__)


class Leadership:
    """kube-scheduler's lease identity is HOSTNAME_UUID, and both containers of the pod share the hostname."""

    def __init__(self, hostname: str, on_gain: Callable[[], None]) -> None:
        self._hostname = hostname
        self._on_gain = on_gain
        self._holder = ""

    @property
    def leads(self) -> bool:
        return self._holder.rpartition("_")[0] == self._hostname

    def put(self, lease: Json) -> None:
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if holder == self._holder:
            return
        # A restarted scheduler of our own pod is a new leader too: its assumed pods are not ours.
        self._holder = holder
        log.info("scheduler lease", extra={"holder": holder, "leads": self.leads})
        if self.leads:
            self._on_gain()

    def lost(self) -> None:
        self._holder = ""


def lease_view(client: KubeClient, leadership: Leadership, namespace: str, name: str) -> Reflector:
    def replace(items: list[Json]) -> None:
        leadership.lost() if not items else leadership.put(items[0])

    sink = Sink(replace=replace, put=leadership.put, drop=lambda _: leadership.lost())
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    return Reflector(client, path, sink, query={"fieldSelector": f"metadata.name={name}"})
