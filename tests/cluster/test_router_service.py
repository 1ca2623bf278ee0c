"""The router's view of a Service on a real API server."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_router.endpoints import Endpoints
from valve_router.settings import service_of
from valve_tools.cluster.controlplane import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


def slice_of(name: str, address: str, service: str = "chat") -> dict[str, object]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    }


def test_ready_pods_of_a_service_are_the_replicas_as_the_api_server_tells_them(control_plane: ControlPlane) -> None:
    api = control_plane.api
    told: list[tuple[str, ...]] = []

    async def follow() -> None:
        async def until(urls: set[str]) -> None:
            for _ in range(3000):
                if told and set(told[-1]) == urls:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(f"never {urls}: {told}")

        with contextlib.closing(KubeClient(from_kubeconfig(str(control_plane.kubeconfig)))) as client:
            task = asyncio.create_task(Endpoints(client, service_of("default/chat:http"), told.append).run())
            try:
                await until({"http://10.0.0.1:8000"})
                await asyncio.to_thread(api.post, SLICES, slice_of("chat-2", "10.0.0.2"))
                await until({"http://10.0.0.1:8000", "http://10.0.0.2:8000"})
                ends = [{"addresses": ["10.0.0.1"], "conditions": {"ready": False, "terminating": True}}]
                await asyncio.to_thread(api.patch, f"{SLICES}/chat-1", {"endpoints": ends})
                await until({"http://10.0.0.2:8000"})
                await asyncio.to_thread(api.delete, f"{SLICES}/chat-2")
                await until(set())
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    try:
        api.post(SLICES, slice_of("chat-1", "10.0.0.1"))
        api.post(SLICES, slice_of("other-1", "10.0.0.9", service="other"))
        asyncio.run(follow())
    finally:
        for name in ("chat-1", "other-1"):
            api.delete(f"{SLICES}/{name}")
