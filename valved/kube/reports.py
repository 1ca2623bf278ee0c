"""What this node tells the API server about itself, and how often."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from zlib import crc32

from valved.config import KubeTable
from valved.kube import status
from valved.kube.apiserver import ApiServer, Json, now_text
from valved.kube.counting import BOOK_S, Counting
from valved.kube.deviceplugin import Plugin
from valved.kube.follower import Follower
from valved.kube.host import Host, LastHeard
from valved.kube.nri import Injector
from valved.kube.observer import Observer
from valved.kube.offline import OfflineBook
from valved.kube.pods import PodBook
from valved.policy.report_rate import RateSettings, RateState, decide_report

SECOND_NS = 1_000_000_000


class Reports:
    """`run` writes what changed, at the rate that is due; `adopt` takes up what a predecessor had counted."""

    def __init__(
        self,
        host: Host,
        table: KubeTable,
        known: LastHeard,
        counting: Counting,
        *,
        observer: Observer,
        book: PodBook,
        offline: OfflineBook,
        injector: Injector,
        follower: Follower,
        plugin: Plugin,
        api: ApiServer,
    ) -> None:
        self._host, self._known, self._counting, self._observer = host, known, counting, observer
        self._book, self._offline, self._injector, self._follower = book, offline, injector, follower
        self._plugin, self._api = plugin, api
        self._infos = {gpu.index: gpu for gpu in host.gate.gpus()}
        period_ns = round(table.report_s * SECOND_NS)
        self._settings = RateSettings(period_ns=period_ns, spacing_ns=min(period_ns, RateSettings().spacing_ns))
        self._phase = crc32(table.node.encode()) / 2**32
        self.rate = RateState()
        self._epoch = 0
        self._conditions: dict[str, tuple[bool | None, str]] = {}  # kind -> state, since

    def adopt(self, found: Json) -> None:
        self._epoch = max(self._epoch, int(found.get("epoch", 0)))

    def missing(self) -> str:
        """What keeps this node from serving slots; empty when nothing does."""
        if not self._known.is_clean:
            return "the kubelet has not reported which pod holds which GPU"
        return "" if self._plugin.is_registered else "not registered with the kubelet"

    def facts(self) -> status.NodeFacts:
        brake, now_ns = self._host.brake, self._host.clock.now_ns()
        live = {pod.uid for pod in self._book.offline()}
        return status.NodeFacts(
            mode=brake.mode,
            is_paused=brake.is_paused,
            is_draining=brake.is_draining,
            gpus=tuple(
                status.GpuFacts(
                    uuid=self._infos[verdict.gpu].uuid_text,
                    name=self._infos[verdict.gpu].name,
                    total_bytes=self._infos[verdict.gpu].total_bytes,
                    verdict=verdict,
                )
                for verdict in self._known.verdicts
            ),
            offline=self._offline.facts(live),
            lent=tuple(self._observer.lent(self._counting.lent_s, self._host.gate.granting)),
            bare=tuple(f"{one.name}: {one.reason}" for one in self._injector.bare()),
            resting=tuple(self._observer.resting(now_ns)),
            profiling=tuple(map(self._named, self._offline.levels.under_way())),
            drain=self._follower.drain,
            refused=self._follower.refused,
            clock_off=self._api.clock.text,
            ungated=self._counting.ungated.facts(live),
            is_serving=not self.missing(),
        )

    def _named(self, uid: str) -> str:
        return self._book.pods[uid].key if uid in self._book.pods else uid

    async def run(self) -> None:
        """Apart from the looks: a write may take as long as the API server likes."""
        while True:
            await asyncio.sleep(BOOK_S)
            if self._known.verdicts:
                await self._report(self._host.clock.now_ns())

    async def _report(self, now_ns: int) -> None:
        facts, series = self.facts(), self._counting.series
        standing = status.standing(facts, series, self.rate.written, self._settings)
        asked = self.rate.written[:1] != standing[:1]  # the phase: only people change it
        rate, decision = decide_report(self.rate, standing, self._phase, now_ns, self._settings, asked=asked)
        if not decision.write:
            self.rate = rate
            return
        self._epoch += 1
        now = now_text()
        for condition in status.conditions_of(facts):
            seen = self._conditions.get(condition.kind)
            if seen is None or seen[0] != condition.is_true:
                self._conditions[condition.kind] = (condition.is_true, now)
        since = {kind: text for kind, (_, text) in self._conditions.items()}
        report = status.build(facts, series, self._epoch, now, since)
        self.rate = rate  # a write that failed has cost its token, too: that is what spares a sick API server
        if not await self._api.write(report):
            self.rate = replace(rate, next_ns=0)
