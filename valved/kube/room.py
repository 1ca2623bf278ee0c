"""Everything valved does on a Kubernetes node, put together and kept going.

Order of a start, so that a crash or an upgrade under running pods loses nothing: every GPU is guarded; the link opens
and shims come back; pods are listed; the kubelet says who holds what; GPUs whose users are all heard are let go; only
then are slots offered. Any of these may be missing for a while: what was last known stands, and in doubt a GPU stays
guarded. Nothing here is asked when an online pod starts, except NRI, and that may stay away.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from prometheus_client.core import Metric
from valve_kube import names
from valve_kube.client import KubeClient
from valve_kube.injection import InjectionSettings

from valved import paths
from valved.clients.consents import Consents
from valved.clients.register import Register
from valved.config import KubeTable
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.kube import cdi, figures, seriesfile, shimfiles, status
from valved.kube.apiserver import ApiServer, Json, access, now_text
from valved.kube.claims import Claims
from valved.kube.deviceplugin import Plugin, Servicer, Slots
from valved.kube.follower import Follower
from valved.kube.nri import Connection, Injector
from valved.kube.observed import MOST_WAKES, Observed
from valved.kube.observer import Gained, Observer
from valved.kube.offline import OfflineBook
from valved.kube.podresources import Holding, Holdings, KubeletHoldings
from valved.kube.pods import PodBook
from valved.kube.series import NodeSeries, Saved
from valved.kube.starter import Starter
from valved.kube.ungated import Ungated
from valved.machine.cards import CardReader, CardUse
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, GpuInfo, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, ServiceId
from valved.node.brake import Brake
from valved.node.kv import Kv
from valved.node.upkeep import end
from valved.policy.guard import Card, GuardSettings, Holder, Stranger, Verdict, judge
from valved.policy.report_rate import RateSettings, RateState, decide_report
from valved.state.journal import Journal
from valved.state.registry import GUARD_SERVICE, STANDING, Books
from valved.state.saved import boot_id
from valved.state.stats import GpuAccount

log = logging.getLogger("valved.kube")

BEAT_S = 0.1  # who is busy: fine enough for the overlap of GPUs, 0.02 % of a core
BOOK_S = 1.0
RECONCILE_S = 5.0  # and at every change of pods and registrations
SLOT_GRACE_S = 60.0  # an engine's start takes about so long to the first CUDA call
LIST_S = 10.0  # how long the start waits for the first list of pods
CHANGES = ("joined", "left", "claimed", "paused", "resumed", "policy", "drained")  # events that call for a new look
SECOND_NS = 1_000_000_000
SAVE_NS = 60 * SECOND_NS  # what a crash may lose of the series


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The parts of the daemon that this room works with."""

    gate: GatePort
    books: Books
    gating: GateService
    register: Register
    brake: Brake
    journal: Journal
    clock: Clock
    processes: ProcessPort
    run_dir: Path
    version: str
    ladder: Ladder
    kv: Kv | None = None
    consents: Consents | None = None


@dataclass(slots=True, kw_only=True)
class Memory:
    """What was last known; an answer that does not come changes nothing."""

    holdings: tuple[Holding, ...] = ()
    cards: Mapping[bytes, CardUse] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    has_holdings: bool = False  # the kubelet has answered once
    is_clean: bool = False  # the last reconciliation went through
    conditions: dict[str, tuple[bool, str]] = field(default_factory=dict)  # kind -> state, since
    harvestable_s: dict[str, float] = field(default_factory=dict)  # GPU -> when it last was
    lent_s: dict[ServiceId, float] = field(default_factory=dict)
    epoch: int = 0
    rate: RateState = field(default_factory=RateState)


class Room:
    def __init__(
        self, host: Host, table: KubeTable, client: KubeClient | None = None, *, list_s: float = LIST_S
    ) -> None:
        self._host, self._table = host, table
        self._gpus = tuple(host.gate.gpus())
        self._memory = Memory()
        self._wake = asyncio.Event()
        self._list_s = list_s
        self.book = PodBook(all_gpu_pods=table.all_gpu_pods)
        self.book.changed = self._wake.set
        self.series = NodeSeries(len(self._gpus))
        self.observed, self._wakes = Observed(self._gpus), host.journal.watch(("wake",), MOST_WAKES, lambda: None)
        self._series_path, self._boot = host.run_dir / seriesfile.FILE, boot_id()
        self._uuids = [gpu.uuid_text for gpu in self._gpus]
        why = seriesfile.read(self._series_path, self.series, self._boot, self._uuids, self._now_s())
        log.info("series", extra={"facts": {"taken_over": not why, "why_not": why}})
        self.offline = OfflineBook()
        self.ungated = Ungated(host.ladder.freeze_stranger)
        client = client or KubeClient(access(table.kubeconfig, dict(os.environ)))
        self.claims = Claims(client, table.node)
        self.claims.changed = self._wake.set
        self._observer = Observer(
            gpus=self._gpus,
            claims=self.claims,
            books=host.books,
            gating=host.gating,
            book=self.book,
            register=host.register,
            processes=host.processes,
            kv=host.kv,
        )
        self._observer.is_standing = self._is_held_by_order
        if host.kv is not None:
            host.kv.lender.ceiling = lambda service: self._observer.ceiling(service, self.offline.levels)
        self._follower = Follower(host.brake, host.gating, host.kv, host.consents)
        self.api = ApiServer(client, table.node, self.book, self._follower.obey_brake)
        self.api.found = self._own_object
        self._cards = CardReader()
        self._holdings: Holdings = KubeletHoldings(Path(table.pod_resources))
        settings = InjectionSettings(
            shim_folder=table.shim_folder, client_folder=str(host.run_dir / paths.CLIENT_FOLDER)
        )
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
        self.injector = Injector(self.book, settings)
        self.nri = Connection(Path(table.nri_socket), self.injector) if table.nri_socket else None
        if self.nri is not None:
            self._observer.has_shim = self.injector.has_shim
        period_ns = round(table.report_s * SECOND_NS)
        self._rate = RateSettings(period_ns=period_ns, spacing_ns=min(period_ns, RateSettings().spacing_ns))
        self._phase = crc32(table.node.encode()) / 2**32
        self._watcher = host.journal.watch(CHANGES, 64, self._wake.set)
        # From here on, before any shim is heard: nobody has said yet who uses what.
        host.register.pods = self.book
        host.gating.ask_idleness("placement", True)  # a GPU that counted as busy would get no offline work
        host.gating.set_standing(GUARD_SERVICE, frozenset(gpu.index for gpu in self._gpus))
        for reading in self._observer.readings(host.clock.now_ns(), {}, {}):
            self.offline.adopt(reading.service, reading.harvest_s, reading.tokens or 0)

    async def run(self) -> None:
        """Until cancelled. Each part is begun again when it fails; none takes another with it."""
        shimfiles.bring(Path(self._table.shim_folder), self._host.version)
        parts: list[Callable[[], Awaitable[None]]] = [self.api.run, self.claims.run, self._beat, self._account]
        parts += [self._reconcile_always, self._report_always]
        if self.nri is not None:
            parts.append(self.nri.run)
        tasks = [asyncio.ensure_future(_keep_going(part)) for part in parts]
        try:
            await self._first_reconciliation()
            tasks.append(asyncio.ensure_future(_keep_going(self.plugin.run)))
            await asyncio.wait(tasks)  # not gather: each is cancelled once, or the plugin could not end its streams
        finally:
            await end(tasks)
            self._save_series(self.series.saved())
            self._host.journal.unwatch(self._watcher)
            self._host.journal.unwatch(self._wakes)
            self._cards.close()
            self.api.close()

    def _save_series(self, saved: Saved) -> None:
        seriesfile.keep(self._series_path, saved, self._boot, self._uuids)

    async def _first_reconciliation(self) -> None:
        """The pods first: identity comes from them. An API server that is away must not keep the node waiting."""
        synced = asyncio.ensure_future(self.api.pods.wait_synced())
        try:
            await asyncio.wait({synced}, timeout=self._list_s)  # not wait_for: see upkeep.end
        finally:
            synced.cancel()
        while not self._memory.has_holdings:
            try:
                await self.reconcile()
            except Exception:  # begun again, as later ones are: until one goes through every GPU stays guarded
                log.exception("reconciliation failed")
            if not self._memory.has_holdings:
                await asyncio.sleep(BOOK_S)

    # Looking

    async def _beat(self) -> None:
        while True:
            accounts = zip(self._gpus, _accounts(self._host.gating, self._gpus), strict=True)
            busy = [bool(account.holders - STANDING) and not self._is_standing(gpu.index) for gpu, account in accounts]
            self.series.beat(self._now_s(), busy)
            await asyncio.sleep(BEAT_S)

    async def _account(self) -> None:
        """Once a second: time that was open, memory that was free, and who uses a GPU without the shim."""
        accounts = _accounts(self._host.gating, self._gpus)
        seen_ns, before = self._host.clock.now_ns(), [_figures(account) for account in accounts]
        save_ns = seen_ns + SAVE_NS
        while True:
            await asyncio.sleep(BOOK_S)
            now_ns = self._host.clock.now_ns()
            for account in _accounts(self._host.gating, self._gpus):
                account.advance(now_ns)
            after = [_figures(account) for account in accounts]
            gained = [_gained(*pair) for pair in zip(before, after, strict=True)]
            seconds = [0.0 if self._is_standing(gpu.index) else (now_ns - seen_ns) / 1e9 for gpu in self._gpus]
            left = [each.left_s for each in gained]
            self.series.book(now_ns / 1e9, seconds, left)
            live = {pod.key for pod in self.book.pods.values()}
            self.observed.book(seconds, left, self._wakes, self._host.books, live)
            self._give_receipts({gpu.index: each for gpu, each in zip(self._gpus, gained, strict=True)}, now_ns)
            seen_ns, before = now_ns, after
            self._memory.cards = await asyncio.to_thread(self._cards.look)
            for place, gpu in enumerate(self._gpus):
                is_held = bool(self._host.gating.gpus[gpu.index].holders - STANDING)
                if (use := self._memory.cards.get(gpu.uuid)) is not None and not self._is_standing(gpu.index):
                    free = self._observer.free_bytes(gpu.index, use)
                    self.series.memory(now_ns / 1e9, place, free, use.total_bytes, is_held=is_held)
                    self.observed.note_free(place, free, is_held)
            if now_ns >= save_ns:
                save_ns = now_ns + SAVE_NS
                await asyncio.to_thread(self._save_series, self.series.saved())
            strangers = self._observer.strangers(self._memory.cards)
            if self.ungated.look(strangers, now_ns / 1e9, self._observer.registered()):
                self._wake.set()  # its GPU is closed at once

    def _is_standing(self, gpu: GpuIndex) -> bool:
        """Nobody can say how idle online services are here: the brake keeps them from letting go (observing does not),
        one rests or has not come back, or somebody may use the GPU unheard. It counts neither as idle nor as lost."""
        gating, now_ns = self._host.gating, self._host.clock.now_ns()
        is_heard = any(verdict.gpu == gpu and verdict.is_heard for verdict in self._memory.verdicts)
        return (
            gating.is_braked
            or (GUARD_SERVICE in gating.gpus[gpu].holders and not is_heard)
            or any(gpu in one.gpus and (one.away or gating.is_resting(one, now_ns)) for one in gating.online.values())
        )

    def _is_held_by_order(self, gpu: GpuIndex) -> bool:
        """Paused, guarded, resting, or in a mode that harvests nothing: no missed promise, and no sign of one."""
        brake, holders = self._host.brake, self._host.gating.gpus[gpu].holders
        return brake.switches.is_closed or GUARD_SERVICE in holders or self._is_standing(gpu)

    def _give_receipts(self, gained: Mapping[GpuIndex, Gained], now_ns: int) -> None:
        """Book what offline pods got, and what the online services of those GPUs lent."""
        self.offline.read(self._observer.readings(now_ns, gained, self._memory.cards), now_ns / 1e9)
        lent_s = self._memory.lent_s
        self._memory.lent_s = {
            key: lent_s.get(key, 0.0) + sum(gained[gpu].harvest_s for gpu in service.gpus if gpu in gained)
            for key, service in self._host.gating.online.items()
        }

    # Reconciling

    async def _reconcile_always(self) -> None:
        while True:
            timer = asyncio.get_running_loop().call_later(RECONCILE_S, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            list(self._watcher.take())
            await self.reconcile()
            await asyncio.sleep(BEAT_S)  # a pod's start brings a dozen changes at once

    async def reconcile(self) -> None:
        """Level-triggered: from what is, to what must be guarded, offered and cleaned away."""
        memory = self._memory
        try:
            memory.holdings = await self._holdings.list()
            memory.has_holdings = memory.is_clean = True
        except OSError as error:
            memory.is_clean = False
            log.info("kubelet does not answer", extra={"facts": {"error": str(error)}})
            if not memory.has_holdings:
                return
        self.claims.want(pod for pod in self.book.pods.values() if not pod.finished)
        if not memory.cards:
            memory.cards = await asyncio.to_thread(self._cards.look)
        holders = self._observer.holders(memory.holdings)
        self._guard(self._observer.cards(memory.cards), holders, self._observer.strangers(memory.cards))
        in_use = self._observer.slots_in_use(memory.holdings)
        self.slots.update(in_use, self._offered())
        if self._table.backend == "cdi":
            folder = Path(self._table.cdi_folder)
            for slot in cdi.present(folder) - in_use:
                cdi.remove(folder, slot)

    def _offered(self) -> int:
        """GPUs to offer slots for. One that fell under guard stays a while: the kubelet fails a pod for good that was
        placed a moment before its slot went, and an online pod that restarts is heard again soon. Offline work that
        starts meanwhile stands at the gate; what is placed anew follows the report."""
        facts, now_s = self._facts(), self._now_s()
        for gpu in facts.gpus:
            if gpu.verdict.is_harvestable:
                self._memory.harvestable_s[gpu.uuid] = now_s
        if facts.phase != "Harvesting":
            return 0
        return sum(now_s - seen_s < SLOT_GRACE_S for seen_s in self._memory.harvestable_s.values())

    def _guard(self, cards: list[Card], holders: list[Holder], strangers: list[Stranger]) -> None:
        settings = GuardSettings(harvest_unallocated=self._table.harvest_unallocated)
        before = {verdict.gpu: verdict for verdict in self._memory.verdicts}
        self._memory.verdicts = judge(cards, holders, strangers, settings)
        self._host.gating.set_standing(GUARD_SERVICE, frozenset(v.gpu for v in self._memory.verdicts if v.is_guarded))
        self._host.register.channels.lease.refresh()
        for verdict in self._memory.verdicts:
            old = before.get(verdict.gpu)
            if old is None or (old.is_guarded, old.reason) != (verdict.is_guarded, verdict.reason):
                word = "guarded" if verdict.is_guarded else "open"
                reason = f"{word}: {verdict.reason}" if verdict.reason else word
                self._host.journal.emit(EventKind.GUARD, gpus=(verdict.gpu,), reason=reason)

    # Reporting

    def _facts(self) -> status.NodeFacts:
        brake, memory = self._host.brake, self._memory
        infos = {gpu.index: gpu for gpu in self._gpus}
        live = {pod.uid for pod in self.book.offline()}
        return status.NodeFacts(
            mode=brake.mode,
            is_paused=brake.is_paused,
            is_draining=brake.is_draining,
            gpus=tuple(
                status.GpuFacts(
                    uuid=infos[verdict.gpu].uuid_text,
                    name=infos[verdict.gpu].name,
                    total_bytes=infos[verdict.gpu].total_bytes,
                    verdict=verdict,
                )
                for verdict in memory.verdicts
            ),
            offline=self.offline.facts(live),
            lent=tuple(self._observer.lent(memory.lent_s, self._host.gate.granting)),
            bare=tuple(f"{one.name}: {one.reason}" for one in self.injector.bare()),
            resting=tuple(self._observer.resting(self._host.clock.now_ns())),
            profiling=tuple(map(self._named, self.offline.levels.under_way())),
            drain=self._follower.drain,
            refused=self._follower.refused,
            ungated=self.ungated.facts(live),
            is_serving=not self.missing(),
        )

    def _named(self, uid: str) -> str:
        return self.book.pods[uid].key if uid in self.book.pods else uid

    async def _report_always(self) -> None:
        """Apart from the looks: a write may take as long as the API server likes."""
        while True:
            await asyncio.sleep(BOOK_S)
            await self._report(self._host.clock.now_ns())

    async def _report(self, now_ns: int) -> None:
        memory = self._memory
        if not memory.verdicts:
            return
        facts = self._facts()
        standing = status.standing(facts, self.series, memory.rate.written, self._rate)
        asked = memory.rate.written[:1] != standing[:1]  # the phase: only people change it
        rate, decision = decide_report(memory.rate, standing, self._phase, now_ns, self._rate, asked=asked)
        if not decision.write:
            memory.rate = rate
            return
        memory.epoch += 1
        now = now_text()
        for condition in status.conditions_of(facts):
            known = memory.conditions.get(condition.kind)
            if known is None or known[0] != condition.is_true:
                memory.conditions[condition.kind] = (condition.is_true, now)
        since = {kind: text for kind, (_, text) in memory.conditions.items()}
        report = status.build(facts, self.series, memory.epoch, now, since)
        memory.rate = rate  # a write that failed has cost its token, too: that is what spares a sick API server
        if not await self.api.write(report):
            memory.rate = replace(rate, next_ns=0)

    def _own_object(self, harvest_node: Json) -> None:
        """The cluster's word on this node, and what a predecessor had counted."""
        found, spec = harvest_node.get("status") or {}, harvest_node.get("spec") or {}
        self.offline.seed(found)
        self._memory.epoch = max(self._memory.epoch, int(found.get("epoch", 0)))
        self.offline.levels.want((spec.get("resolved") or {}).get("profile") or [])
        if self._follower.obey(spec):
            self._observer.namespace_modes = self._follower.namespace_modes
            self._wake.set()

    def missing(self) -> str:
        """What keeps this node from serving slots; empty when nothing does."""
        if not self._memory.is_clean:
            return "the kubelet has not said who holds which GPU"
        return "" if self.plugin.is_registered else "not registered with the kubelet"

    def metrics(self) -> Iterator[Metric]:
        now_ns, cards = self._host.clock.now_ns(), self._memory.cards
        resting = self._observer.resting(now_ns)
        yield from figures.leaving(self._host.brake.leaving.since_s(), self.ungated.seconds)
        yield from figures.families(self._memory.verdicts, self.slots, self.plugin, self.injector, self.api, resting)
        yield from self.observed.families()
        known = ((gpu.index, cards.get(gpu.uuid)) for gpu in self._gpus)
        used = {gpu: use.total_bytes - self._observer.free_bytes(gpu, use) for gpu, use in known if use is not None}
        yield from figures.without_offline(self._gpus, used, self._observer.uses(now_ns, cards))

    def _now_s(self) -> float:
        return self._host.clock.now_ns() / 1e9


def _accounts(gating: GateService, gpus: Sequence[GpuInfo]) -> list[GpuAccount]:
    """Of these GPUs, up to this moment."""
    gating.drain()
    return [gating.gpus[gpu.index] for gpu in gpus]


def _figures(account: GpuAccount) -> tuple[int, int, int, int]:
    return account.left_ns, account.harvest_ns, account.gated_ns, account.gates


def _gained(before: tuple[int, int, int, int], after: tuple[int, int, int, int]) -> Gained:
    left, harvested, gated, stops = (now - then for then, now in zip(before, after, strict=True))
    return Gained(left_s=left / 1e9, harvest_s=harvested / 1e9, gated_s=gated / 1e9, stops=stops)


async def _keep_going(part: Callable[[], Awaitable[None]]) -> None:
    """A part that breaks is begun again, and says so: one broken answer must not end the node's whole service."""
    while True:
        try:
            await part()
        except Exception:
            log.exception("part of the Kubernetes room failed", extra={"facts": {"part": part.__qualname__}})
        await asyncio.sleep(BOOK_S)
