"""Everything valved does on a Kubernetes node, put together and kept going.

Order of a start, so that a crash or an upgrade under running pods loses nothing: every GPU is guarded; the link opens
and shims come back; pods are listed; the kubelet says which pod holds what; GPUs whose users are all heard are let go;
only then are slots offered. Any of these may be missing for a while: what was last known stands, and in doubt a GPU
stays guarded. Nothing here is asked when an online pod starts, except NRI, and that may stay away.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from prometheus_client.core import Metric
from valve_kube import names
from valve_kube.client import KubeClient
from valve_kube.injection import InjectionSettings

from valved import paths
from valved.config import KubeTable
from valved.kube import cdi, figures, shimfiles
from valved.kube.apiserver import ApiServer, Json, access
from valved.kube.claims import Claims
from valved.kube.counting import BEAT_S, BOOK_S, Counting
from valved.kube.deletions import Deletions
from valved.kube.deviceplugin import Plugin, Servicer, Slots
from valved.kube.follower import Follower
from valved.kube.host import Host, KubeBooks, LastHeard, Uncounted
from valved.kube.nri import Injector, NriConnection
from valved.kube.observer import Observer
from valved.kube.podresources import Holdings, KubeletHoldings
from valved.kube.pods import Pod, PodsListener
from valved.kube.reports import Reports
from valved.kube.starter import Starter
from valved.model.events import EventKind
from valved.node.upkeep import end
from valved.policy.guard import Card, GuardSettings, Holder, Stranger, judge
from valved.state.registry import GUARD_SERVICE

log = logging.getLogger("valved.kube")

RECONCILE_S = 5.0  # and at every change of pods and registrations
SLOT_GRACE_S = 60.0  # an engine's start takes about so long to the first CUDA call
LIST_S = 10.0  # how long the start waits for the first list of pods
CHANGES = ("joined", "left", "claimed", "paused", "resumed", "policy", "drained")  # events that call for a new look


class Room(PodsListener):
    def __init__(
        self,
        host: Host,
        table: KubeTable,
        books: KubeBooks,
        client: KubeClient | None = None,
        *,
        list_s: float = LIST_S,
    ) -> None:
        self._host, self._table, self._list_s = host, table, list_s
        self._gpus = tuple(host.gate.gpus())
        self._wake = asyncio.Event()
        self._harvestable_s: dict[str, float] = {}  # GPU -> when it last was
        self.known = LastHeard()
        uncounted = Uncounted(host, self.known)
        self.book, self.offline = books.pods, books.offline
        settings = InjectionSettings(
            shim_folder=table.shim_folder, client_folder=str(host.run_dir / paths.CLIENT_FOLDER)
        )
        self.injector = Injector(self.book, settings)
        self.nri = NriConnection(Path(table.nri_socket), self.injector) if table.nri_socket else None
        client = client or KubeClient(access(table.kubeconfig, dict(os.environ)))
        self.claims = Claims(client, table.node, changed=self._wake.set)
        self._observer = Observer(
            gpus=self._gpus,
            claims=self.claims,
            books=host.books,
            gating=host.gating,
            book=self.book,
            register=host.register,
            processes=host.processes,
            kv=host.kv,
            is_standing=uncounted.is_by_order,
            injector=self.injector if self.nri is not None else None,
            blindness=host.brake.driver.blindness,
        )
        self.counting = Counting(
            host, self.known, uncounted, self._observer, self.book, self.offline, changed=self._wake.set
        )
        self._follower = Follower(host.brake, host.gating, host.kv, host.consents)
        self.api = ApiServer(client, table.node, self.book, self._follower.obey_brake, found=self._own_object)
        self._deletions = Deletions(host, self.book, self.api)
        self._holdings: Holdings = KubeletHoldings(Path(table.pod_resources))
        self._add_neighbours(table, settings)
        self.reports = Reports(
            host,
            table,
            self.known,
            self.counting,
            observer=self._observer,
            book=self.book,
            offline=self.offline,
            injector=self.injector,
            follower=self._follower,
            plugin=self.plugin,
            api=self.api,
        )
        self.book.listener = self
        self._watcher = host.journal.watch(CHANGES, 64, self._wake.set)
        # From here on, before any shim is heard: nobody has said yet which process uses what.
        host.gating.permits.ask_idleness("placement", True)  # a GPU that counted as busy would get no offline work
        host.gating.set_standing(GUARD_SERVICE, frozenset(gpu.index for gpu in self._gpus))
        self.counting.adopt()

    def _add_neighbours(self, table: KubeTable, settings: InjectionSettings) -> None:
        """The kubelet, which starts containers here."""
        self.slots = Slots(len(self._gpus))
        starter = Starter(
            holdings=self._holdings,
            book=self.book,
            fetch=self.api.fetch_pod,
            uuids=frozenset(gpu.uuid_text for gpu in self._gpus),
            cdi_folder=Path(table.cdi_folder) if table.backend == "cdi" else None,
            toolkit_folders=tuple(map(Path, table.toolkit_folders)),
        )
        self.plugin = Plugin(Path(table.device_plugins), names.RESOURCE, Servicer(self.slots, starter, settings))

    def pods_changed(self) -> None:
        self._host.gating.listener.clients_changed()  # their annotations consent, or do so no longer
        self._deletions.pods_changed()
        self._wake.set()

    def pod_left(self, pod: Pod, *, is_deleted: bool) -> None:
        self._deletions.pod_left(pod, is_deleted=is_deleted)

    async def run(self) -> None:
        """Until cancelled. Each part is begun again when it fails; none takes another with it."""
        shimfiles.bring(Path(self._table.shim_folder), self._host.version)
        parts: list[Callable[[], Awaitable[None]]] = [self.api.run, self.claims.run]
        parts += [self.counting.beat, self.counting.account, self._reconcile_always, self.reports.run]
        parts.append(self._deletions.run)
        if self.nri is not None:
            parts.append(self.nri.run)
        tasks = [asyncio.ensure_future(_keep_going(part)) for part in parts]
        try:
            await self._first_reconciliation()
            tasks.append(asyncio.ensure_future(_keep_going(self.plugin.run)))
            await asyncio.wait(tasks)  # not gather: each is cancelled once, or the plugin could not end its streams
        finally:
            await end(tasks)
            self._host.journal.unwatch(self._watcher)
            self._deletions.close()
            self.api.close()
            await self.counting.close()

    async def _first_reconciliation(self) -> None:
        """The pods first: identity comes from them. An API server that is away must not keep the node waiting."""
        synced = asyncio.ensure_future(self.api.pods.wait_synced())
        try:
            await asyncio.wait({synced}, timeout=self._list_s)  # not wait_for: see upkeep.end
        finally:
            synced.cancel()
        while not self.known.has_holdings:
            try:
                await self.reconcile()
            except Exception:  # begun again, as later ones are: until one goes through every GPU stays guarded
                log.exception("reconciliation failed")
            if not self.known.has_holdings:
                await asyncio.sleep(BOOK_S)

    async def _reconcile_always(self) -> None:
        while True:
            timer = asyncio.get_running_loop().call_later(RECONCILE_S, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            list(self._watcher.take())
            if self.api.pods.synced:
                self._deletions.ask_for_untold()
            await self.reconcile()
            await asyncio.sleep(BEAT_S)  # a pod's start brings a dozen changes at once

    async def reconcile(self) -> None:
        """Level-triggered: from what is, to what must be guarded, offered and cleaned away."""
        known = self.known
        try:
            known.holdings = await self._holdings.list()
            known.has_holdings = known.is_clean = True
        except OSError as error:
            known.is_clean = False
            log.info("kubelet does not answer", extra={"facts": {"error": str(error)}})
            if not known.has_holdings:
                return
        self.claims.want(pod for pod in self.book.pods.values() if not pod.finished)
        if not known.cards:
            await self.counting.look()
        holders = self._observer.holders(known.holdings)
        self._guard(self._observer.cards(known.cards), holders, self._observer.strangers(known.cards))
        in_use = self._observer.slots_in_use(known.holdings)
        self.slots.update(in_use, self._offered())
        if self._table.backend == "cdi":
            folder = Path(self._table.cdi_folder)
            for slot in cdi.present(folder) - in_use:
                cdi.remove(folder, slot)

    def _offered(self) -> int:
        """GPUs to offer slots for. One that fell under guard stays a while: the kubelet fails a pod for good that was
        placed a moment before its slot went, and an online pod that restarts is heard again soon. Offline work that
        starts meanwhile stands at the gate; what is placed anew follows the report."""
        facts, now_s = self.reports.facts(), self._host.now_s()
        for gpu in facts.gpus:
            if gpu.verdict.is_harvestable:
                self._harvestable_s[gpu.uuid] = now_s
        if facts.phase != "Harvesting":
            return 0
        return sum(now_s - seen_s < SLOT_GRACE_S for seen_s in self._harvestable_s.values())

    def _guard(self, cards: list[Card], holders: list[Holder], strangers: list[Stranger]) -> None:
        settings = GuardSettings(harvest_unallocated=self._table.harvest_unallocated)
        before = {verdict.gpu: verdict for verdict in self.known.verdicts}
        self.known.verdicts = judge(cards, holders, strangers, settings)
        self._host.gating.set_standing(GUARD_SERVICE, frozenset(v.gpu for v in self.known.verdicts if v.is_guarded))
        self._host.register.channels.lease.refresh()
        for verdict in self.known.verdicts:
            old = before.get(verdict.gpu)
            if old is None or (old.is_guarded, old.reason) != (verdict.is_guarded, verdict.reason):
                word = "guarded" if verdict.is_guarded else "open"
                reason = f"{word}: {verdict.reason}" if verdict.reason else word
                self._host.journal.emit(EventKind.GUARD, gpus=(verdict.gpu,), reason=reason)

    def _own_object(self, harvest_node: Json) -> None:
        """The cluster's word on this node, and what a predecessor had counted."""
        found, spec = harvest_node.get("status") or {}, harvest_node.get("spec") or {}
        self.offline.seed(found)
        self.reports.adopt(found)
        self.offline.levels.want((spec.get("resolved") or {}).get("profile") or [])
        if self._follower.obey(spec):
            self._observer.namespace_modes = self._follower.namespace_modes
            self._wake.set()

    def metrics(self) -> Iterator[Metric]:
        now_ns, cards = self._host.clock.now_ns(), self.known.cards
        resting = self._observer.resting(now_ns)
        yield from figures.leaving(self._host.brake.leaving.since_s(), self.counting.ungated.seconds)
        yield from figures.families(self.known.verdicts, self.slots, self.plugin, self.injector, self.api, resting)
        yield from self.counting.observed.families()
        known = ((gpu.index, cards.get(gpu.uuid)) for gpu in self._gpus)
        used = {gpu: use.total_bytes - self._observer.free_bytes(gpu, use) for gpu, use in known if use is not None}
        yield from figures.without_offline(self._gpus, used, self._observer.uses(now_ns, cards))


async def _keep_going(part: Callable[[], Awaitable[None]]) -> None:
    """A part that breaks is begun again, and says so: one broken answer must not end the node's whole service."""
    while True:
        try:
            await part()
        except Exception:
            log.exception("part of the Kubernetes room failed", extra={"facts": {"part": part.__qualname__}})
        await asyncio.sleep(BOOK_S)
