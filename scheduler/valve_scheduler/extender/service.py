"""The extender as a process.

Watches feed the state, kube-scheduler is answered on loopback, probes on another port.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

import msgspec
from valve_kube.client import Json, KubeClient
from valve_kube.errors import InvalidObject, NotReady, in_words
from valve_kube.reflector import SILENCE_S, Reflector

from valve_scheduler import metrics
from valve_scheduler.extender.decide import Extender
from valve_scheduler.extender.doubts import Doubts
from valve_scheduler.extender.leadership import Leadership, lease_view
from valve_scheduler.extender.pair import PAIR_PATH, Pair
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.served import ServedBases, served_view
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import nodes_view, pods_view, policies_view, profiles_view, workloads_view
from valve_scheduler.probes import Probes
from valve_scheduler.server import Answer, json_answer, serve, text_answer

log = logging.getLogger(__name__)

PREFIX = "/scheduler/"
_HOUSEKEEPING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtenderSettings:
    """Ports: kube-scheduler's on loopback only, probes and metrics on the pod's address."""

    host: str = "127.0.0.1"
    port: int = 8901
    probe_host: str = "0.0.0.0"
    probe_port: int = 8902
    hostname: str = ""  # empty: no leader election, always the leader
    lease_namespace: str = "valve-system"
    lease_name: str = "valve-scheduler"
    kube_scheduler_port: int = 10259
    placement: PlacementSettings = field(default_factory=PlacementSettings)


class ExtenderService:
    def __init__(self, client: KubeClient, settings: ExtenderSettings) -> None:
        self._settings = settings
        raised = asyncio.Event()
        self.state = ClusterState(settings.placement, doubted=raised.set)
        self.pods = pods_view(client, self.state)
        served = ServedBases()
        self.views = [
            self.pods,
            nodes_view(client, self.state, time.time),
            profiles_view(client, self.state),
            workloads_view(client, self.state),
            policies_view(client, self.state),
            served_view(client, served),
        ]
        self._leadership: Leadership | None = None
        if settings.hostname:
            self._leadership = Leadership(settings.hostname, self.pods.relist)
            lease = lease_view(client, self._leadership, settings.lease_namespace, settings.lease_name)
            self.views.append(lease)
        self._doubts = Doubts(client, self.state, time.time, raised)
        self._pair = Pair(self._missing, settings.kube_scheduler_port)
        self.probes = Probes(self._missing, self._refresh_gauges, {PAIR_PATH: self._pair.failure})
        self._extender = Extender(self.state, client, now_s=time.time, can_answer=self.can_answer, served=served)

    def can_answer(self) -> bool:
        """Synced and, where replicas elect one, beside the leader."""
        leads = self._leadership is None or self._leadership.leads
        return leads and all(view.synced for view in self.views)

    def _missing(self) -> list[str]:
        """What keeps /readyz back; a follower with a complete view is ready to take over."""
        return [view.path for view in self.views if not view.synced]

    async def run(self) -> None:
        """Until cancelled."""
        # For kube-scheduler alone, which binds as many pods at once as wait for a slow API server: to end one of these
        # connections would fail a Binding that is under way.
        main = await serve(self.answer, self._settings.host, self._settings.port, connections=math.inf)
        probes = await self.probes.serve(self._settings.probe_host, self._settings.probe_port)
        tasks = [asyncio.create_task(view.run()) for view in self.views]
        tasks += [asyncio.create_task(self._housekeeping()), asyncio.create_task(self._doubts.run())]
        log.info("extender listens", extra={"port": self._settings.port, "theta": self.state.settings.theta})
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            main.close()
            probes.close()

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        verb = path.removeprefix(PREFIX)
        if method != "POST" or not path.startswith(PREFIX) or verb not in ("filter", "prioritize", "bind"):
            return text_answer(f"no such call: {method} {path}", 404)
        started = time.perf_counter()
        answer = await self._call(verb, body)
        metrics.requests.labels(verb, str(answer.status)).observe(time.perf_counter() - started)

        return answer

    async def _call(self, verb: str, body: bytes) -> Answer:
        try:
            arguments: Json = msgspec.json.decode(body)
            if verb == "bind":
                return json_answer(await self._extender.bind(arguments))
            if verb == "filter":
                return json_answer(self._extender.filter(arguments))
            return json_answer(self._extender.prioritize(arguments))
        except NotReady as error:
            return text_answer(str(error), 503)
        except (InvalidObject, KeyError, TypeError, AttributeError, ValueError, msgspec.MsgspecError) as error:
            log.warning("request refused", extra={"verb": verb, "error": in_words(error)})
            return text_answer(f"{verb}: the request cannot be used: {in_words(error)}", 400)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if self.pods.synced and _silent_s(self.pods) < SILENCE_S:
                self.state.held.expire(time.time())

    def _refresh_gauges(self) -> None:
        ages = self.state.report_ages_s(time.time())
        metrics.oldest_report.set(ages.max() if len(ages) else 0.0)
        metrics.clock_skew.set(self.state.worst_skew_s())
        metrics.assumed.set(sum(1 for holding in self.state.held.holdings() if holding.assumed_until_s))
        metrics.ready.set(self.can_answer())


def _silent_s(view: Reflector) -> float:
    return asyncio.get_running_loop().time() - view.live_at_s


async def run_extender(client: KubeClient, settings: ExtenderSettings) -> None:
    await ExtenderService(client, settings).run()
