"""What a real API server sends on a watch besides objects is read by every view of the extender and the controller."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_kube.reflector import Reflector
from valve_scheduler.controller.caches import Caches
from valve_scheduler.extender.service import ExtenderService, ExtenderSettings
from valve_scheduler.placement.rank import PlacementSettings
from valve_tools.cluster.controlplane import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class BriefWatches(KubeClient):
    """The server sends a bookmark two seconds before a watch ends: here that is soon."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bookmarks: Counter[str] = Counter()

    async def watch(self, path: str, query: Any, **options: Any) -> AsyncIterator[Any]:
        async for event in super().watch(path, {**query, "timeoutSeconds": "4"}, **options):
            self.bookmarks[path] += event["type"] == "BOOKMARK"
            yield event


async def ended_by_bookmarks(plane: ControlPlane) -> list[str]:
    """The views that do not outlive one."""
    client = BriefWatches(from_kubeconfig(str(plane.kubeconfig)))
    extender = ExtenderService(client, ExtenderSettings(hostname="a", lease_namespace="default"))
    views: list[Reflector] = [*extender.views, *Caches(client, PlacementSettings(), time.time).views]
    running = {asyncio.create_task(view.run()): view.path for view in views}
    while not any(task.done() for task in running) and not all(client.bookmarks[path] for path in running.values()):
        await asyncio.sleep(0.05)
    ended = [path for task, path in running.items() if task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    client.close()
    return ended


def test_no_view_ever_ends_by_a_bookmark(control_plane: ControlPlane, nodes: int) -> None:
    assert asyncio.run(ended_by_bookmarks(control_plane)) == []
