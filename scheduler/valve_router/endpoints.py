"""The replicas behind a Kubernetes Service: the ready addresses of its EndpointSlices, as a watch tells them.

While the API server does not answer, those known last are used on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from valve_kube.client import KubeClient
from valve_kube.reflector import Reflector, Store, at_each_change

from valve_router.settings import Service

log = logging.getLogger(__name__)

_FAMILIES = ("IPv4", "IPv6")  # in this order: a pod that has both is one replica


class Endpoints:
    """Calls `told` with all URLs and their pods at each change."""

    def __init__(self, client: KubeClient, service: Service, told: Callable[[dict[str, str]], None]) -> None:
        self._service = service
        self._told = told
        self._slices = Store()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
        query = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
        self._view = Reflector(client, path, self._slices.tee(at_each_change(self._tell)), query=query)

    async def run(self) -> None:
        await self._view.run()

    def _tell(self, _: object) -> None:
        urls = urls_of(self._slices.items.values(), self._service.port)
        if not urls:
            log.warning(
                "service %s/%s: there is none, no pod of it is ready, or PORT is no port of its pods",
                self._service.namespace,
                self._service.name,
            )
        self._told(urls)


def urls_of(slices: Iterable[Mapping[str, Any]], port: str) -> dict[str, str]:
    """One URL for each pod that is ready, and the pod. `port`: its name, or its number in the pods; empty where the
    Service has only one."""
    found: dict[str, tuple[int, str]] = {}
    for item in slices:
        number = _port(item.get("ports") or [], port)
        if number is None or item.get("addressType") not in _FAMILIES:
            continue
        family = _FAMILIES.index(item["addressType"])
        for endpoint in item.get("endpoints") or []:
            if (endpoint.get("conditions") or {}).get("ready") is False:  # one that says nothing counts as ready
                continue
            address = endpoint["addresses"][0]  # all of one endpoint mean the same
            url = f"http://[{address}]:{number}" if family else f"http://{address}:{number}"
            pod = (endpoint.get("targetRef") or {}).get("uid") or url
            found[pod] = min(found.get(pod, (family, url)), (family, url))

    return dict(sorted((url, pod) for pod, (_, url) in found.items()))


def _port(ports: Iterable[Mapping[str, Any]], wanted: str) -> int | None:
    """Of each slice anew: pods of different versions may give a port of one name different numbers."""
    known = [one for one in ports if one.get("protocol", "TCP") == "TCP" and one.get("port")]
    if wanted:
        known = [one for one in known if wanted in (one.get("name"), str(one["port"]))]
    return int(known[0]["port"]) if len(known) == 1 else None
