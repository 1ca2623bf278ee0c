"""Runs the SLA controller in rounds: each reads the caches once, decides with pure functions, applies the effects last.

One replica acts (Lease). Nothing is done while a view is incomplete."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from valve_kube import names
from valve_kube.client import ApiError, KubeClient, Unreachable
from valve_kube.failures import round_failed
from valve_kube.lease import DURATION_S, Lease

from valve_scheduler.controller.account_book import AccountBook
from valve_scheduler.controller.belief import Belief
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.clearing import HARMFUL, ghosts, hidden_leavers, leavers, unseen
from valve_scheduler.controller.conditions import Told
from valve_scheduler.controller.denials import Denials
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.measuring import Measuring
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.controller.policy_words import PolicyWords
from valve_scheduler.controller.promises import Promises
from valve_scheduler.controller.stuck import Stuck
from valve_scheduler.controller.tally import SavedCounter
from valve_scheduler.controller.waiting import Waiting
from valve_scheduler.controller.workload_book import WorkloadBook
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.probes import Probes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Rounds: retries are looked for each second, SLAs at the pace of node reports."""

    namespace: str = "valve-system"
    probe_host: str = "0.0.0.0"
    probe_port: int = 8902
    lease_name: str = "valve-controller"
    lease_s: float = DURATION_S
    requeue_every_s: float = 1.0
    policy_every_s: float = 1.0
    clear_every_s: float = 5.0
    afresh_every_s: float = 30.0
    monitor_every_s: float = 30.0
    # How long a pod may be unable to run where it was placed. A daemon that has just begun may not see every card yet,
    # and a pod that ends needs its grace period.
    patience_s: float = 300.0
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)


class Controller:
    """Puts the rounds together; those that need no memory of their own are its methods."""

    def __init__(
        self,
        client: KubeClient,
        settings: ControllerSettings,
        now_s: Callable[[], float] = time.time,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steady_s`: for what only this process remembers; that clock is never set."""
        self._client, self._now_s, self._steady_s = client, now_s, steady_s
        self._hands, self._belief = Hands(client, now_s), Belief(client)
        self.caches = caches = Caches(client, settings.placement, now_s)
        self.waiting = Waiting(caches, self._hands, now_s, settings.afresh_every_s)
        self.policies = PolicyWords(caches, self._hands, now_s, settings.afresh_every_s)
        self.measuring = Measuring(client, self._hands, caches, self._belief, now_s)
        workloads = WorkloadBook(client, self._hands, caches.workloads)
        self.promises = Promises(
            caches,
            self._hands,
            workloads,
            self.waiting,
            self._belief,
            now_s,
            steady_s,
            settings.monitor,
            Denials(settings.patience_s),
        )
        self._tally, self._stuck = SavedCounter(), Stuck(settings.patience_s)
        self.book = AccountBook(
            client, self._hands, caches.state, self._tally, caches.pods, caches.nodes, caches.accounts
        )

    def stand_down(self) -> None:
        """What only the leader knows is not told by another: an old figure of a former leader would stand for ever."""
        self._tally.forget()

    async def apply_policies(self) -> None:
        await self.policies.apply(await self.measuring.chosen())

    async def account(self) -> None:
        if self.caches.has_accounts:
            await self.book.round(self._now_s())

    async def clear(self) -> None:
        """Evict what must leave, as often as disruption budgets want to be asked."""
        nodes, pods = self.caches.nodes_by_name(), self.caches.pods.items.values()
        found = list(leavers(pods, nodes))
        for name, uids in list(unseen(pods, nodes)):
            found += hidden_leavers(await self._hands.pods_of(name), name, uids)
        for leaver in sorted(found, key=lambda leaver: leaver.reason not in HARMFUL):
            await self._hands.evict(leaver.pod, leaver.reason, leaver.note)

    async def free_stuck(self) -> None:
        """Evict what can never run where it was placed."""
        gpus = self.caches.state.fresh_gpus(self._now_s())
        for one in self._stuck.find(self.caches.pods.items.values(), gpus, self._steady_s()):
            await self._hands.evict(one.pod, Told.PLACE_LOST, one.note)

    async def forget(self) -> None:
        """Delete the reports of nodes that have left the cluster: their daemons cannot."""
        for name, versions in list(ghosts(self.caches.nodes_by_name(), self.caches.grounds, self._now_s())):
            try:
                path = f"{names.API_PATH}/gpuharvestnodes/{name}"
                await self._client.request("DELETE", path, body={"preconditions": versions})
                log.info("deleted the report of a node that is gone", extra={"node": name})
            except (ApiError, Unreachable) as error:  # it has just reported again, or the next round will tell
                log.info("report not deleted", extra={"node": name, "error": str(error)})


async def run_controller(client: KubeClient, settings: ControllerSettings, identity: str) -> None:
    """Until cancelled; followers keep their views warm and do nothing."""
    controller = Controller(client, settings)
    lease = Lease(client, settings.namespace, settings.lease_name, identity, settings.lease_s)

    async def every(seconds: float, name: str, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            if not controller.caches.missing() and lease.held:
                try:
                    await lease.while_held(act())
                except Exception:
                    round_failed(name)
            elif not lease.held:
                controller.stand_down()
            await asyncio.sleep(seconds)

    tasks = [view.run() for view in controller.caches.views]
    rounds = [
        every(settings.requeue_every_s, "requeue", controller.waiting.requeue),
        every(settings.policy_every_s, "apply policies", controller.apply_policies),
        every(settings.clear_every_s, "clear", controller.clear),
        every(settings.monitor_every_s, "monitor SLAs", controller.promises.round),
        every(settings.monitor_every_s, "judge policies", controller.policies.judge),
        every(settings.monitor_every_s, "forget nodes", controller.forget),
        every(settings.monitor_every_s, "free stuck pods", controller.free_stuck),
        every(settings.monitor_every_s, "account", controller.account),
        every(settings.monitor_every_s, "store profiles", controller.measuring.store),
    ]
    await Probes(controller.caches.missing).serve(settings.probe_host, settings.probe_port)
    await asyncio.gather(lease.run(), *tasks, *rounds)
