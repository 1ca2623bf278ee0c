"""Holdings that the watch does not vouch for: each is asked for by GET, and kept or released by the answer.

A pod that loses its label leaves the watch and runs on; a pod that left it before its Binding is never told to be gone.
Neither may free GPUs that are in use, or hold GPUs for ever."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from valve_kube.client import ApiError, KubeClient, Unreachable
from valve_kube.objects import PodPlace, pod_place

from valve_scheduler.placement.holdings import Holding
from valve_scheduler.placement.state import ClusterState

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_AT_ONCE = 8


class Doubts:
    """Settles what the state doubts, as soon as the state sets `raised`."""

    def __init__(
        self, client: KubeClient, state: ClusterState, now_s: Callable[[], float], raised: asyncio.Event
    ) -> None:
        self._client = client
        self._state = state
        self._now_s = now_s
        self._raised = raised

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._raised.wait(), _LOOK_EVERY_S)
            self._raised.clear()
            await self.settle()

    async def settle(self) -> None:
        """Ask for each holding that is due; one that gets no answer stays as it is and is asked for again."""
        due = self._state.held.doubtful(self._now_s())
        for begin in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*map(self._settle, due[begin : begin + _AT_ONCE]))

    async def _settle(self, holding: Holding) -> None:
        pod = f"{holding.namespace}/{holding.name}"
        place: PodPlace | None = None
        try:
            path = f"/api/v1/namespaces/{holding.namespace}/pods/{holding.name}"
            place = pod_place(await self._client.request("GET", path))
        except (ApiError, Unreachable) as error:
            if isinstance(error, Unreachable) or error.status != 404:
                log.warning("holding not verified", extra={"pod": pod, "error": str(error)})
                return
        if self._state.held.settle(holding, place, self._now_s()):
            log.info("holding released: its pod is gone", extra={"pod": pod, "node": holding.node})
