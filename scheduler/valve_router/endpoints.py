"""The replicas behind a Kubernetes Service: the ready addresses of its EndpointSlices, as a watch tells them.

While the API server does not answer, those known last are used on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from valve_kube.client import Json, KubeClient
from valve_kube.reflector import Reflector, Sink

from valve_router.settings import Service

log = logging.getLogger(__name__)

_FAMILIES = ("IPv4", "IPv6")  # in this order: a pod that has both is one replica


class Endpoints:
    """Calls `told` with all URLs and their pods at each change."""

    def __init__(self, client: KubeClient, service: Service, told: Callable[[dict[str, str]], None]) -> None:
        self._service = service
        self._told = told
        self._slices: dict[str, Json] = {}
        path = f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
        query = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
        sink = Sink(replace=self._replace, put=self._put, drop=self._drop)
        self._view = Reflector(client, path, sink, query=query)

    async def run(self) -> None:
        await self._view.run()

    def _replace(self, items: list[Json]) -> None:
        self._slices = {item["metadata"]["name"]: item for item in items}
        self._tell()

    def _put(self, item: Json) -> None:
        self._slices[item["metadata"]["name"]] = item
        self._tell()

    def _drop(self, item: Json) -> None:
        self._slices.pop(item["metadata"]["name"], None)
        self._tell()

    def _tell(self) -> None:
        urls = urls_of(self._slices.values(), self._service.port)
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
