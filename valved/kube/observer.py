"""Which processes use which GPU, put together from the kubelet, the card, the books and the pods. No effects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from valve_kube import names

from valved.clients.register import Register
from valved.clients.untold import LOOKS_TO_CLOSE, NO_ROOM, NO_SHIM, UNTOLD, Untold
from valved.config import MIB
from valved.gate.wake import GateService
from valved.kube.cgroup import pod_of
from valved.kube.claims import Claims, DraDevice
from valved.kube.levels import EngineMemory
from valved.kube.nri import Injector
from valved.kube.offline import Reading
from valved.kube.podresources import HeldDevices
from valved.kube.pods import Pod, PodBook
from valved.kube.status import LentFacts
from valved.kv.engines import Engine
from valved.machine.cards import CardUse
from valved.machine.ports import GpuInfo, GrantPort, ProcessPort
from valved.model.ids import GpuIndex, ProcessId, Role, ServiceId
from valved.node.kv import Kv
from valved.policy.guard import Card, Holder, Stranger
from valved.state.registry import Books, ClientEntry

MIG = "nvidia.com/mig-"
_STRICTNESS = ("off", "observe", "harvest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gained:
    """What one GPU's account grew by."""

    left_s: float  # that no online service held it
    harvest_s: float
    gated_s: float
    stops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineUse:
    """What an online pod uses of its GPUs itself, whatever offline work does there."""

    namespace: str
    pod: str
    busy_s: float
    bytes_on: Mapping[GpuIndex, int]  # of its own processes, as NVML counts them; empty where that does not say


@dataclass(slots=True, kw_only=True)
class Observer:
    gpus: tuple[GpuInfo, ...]
    books: Books
    gating: GateService
    book: PodBook
    register: Register
    processes: ProcessPort
    claims: Claims
    kv: Kv | None = None
    injector: Injector | None = None  # NRI: a route to the shim that leaves no mark on the pod
    is_standing: Callable[[GpuIndex], bool] = lambda gpu: False  # held by order: its hours are nobody's miss
    namespace_modes: Mapping[str, str] = field(default_factory=dict)  # from HarvestPolicies; * for all others
    blindness: str = ""  # why valved could stop nothing on any card
    untold: Untold = field(init=False)

    def __post_init__(self) -> None:
        self.untold = Untold(self.books, self.processes, self.gpus)

    def holders(self, holdings: tuple[HeldDevices, ...]) -> list[Holder]:
        """The containers that were given a GPU: by the kubelet's word, and by the allocations of claims. Some
        kubelets leave these out, and they exist before a container does."""
        heard = self._heard_pods()
        found = []
        for holding in holdings:
            holder = self.book.named(holding.namespace, holding.pod)
            gpus, is_known = self._gpus_of(holding, holder)
            name = f"{holding.namespace}/{holding.pod}/{holding.container}"
            found.append(self._holder(name, holder, gpus, is_known, heard))
        for pod in self.book.pods.values():
            for claimed in self.claims.held_by(pod) if not pod.finished else ():
                gpus, is_known = self._claimed(claimed.devices)
                found.append(self._holder(f"{pod.key}/{claimed.container}", pod, gpus, is_known, heard))
        return [one for one in found if one.gpus]

    def _holder(self, name: str, pod: Pod | None, gpus: frozenset[GpuIndex], is_known: bool, heard: set[str]) -> Holder:
        return Holder(
            name=name,
            gpus=gpus,
            is_heard=is_known and pod is not None and pod.uid in heard,
            is_injected=pod is None or pod.is_injected or self._has_shim(pod, name.rpartition("/")[2]),
            mode=self._mode_of(name.partition("/")[0], pod.mode if pod is not None else ""),
        )

    def _has_shim(self, pod: Pod, container: str) -> bool:
        return self.injector is not None and self.injector.has_shim(pod, container)

    def _mode_of(self, namespace: str, own: str) -> str:
        """The strictest of what the pod and its namespace say."""
        said = (own, self.namespace_modes.get(namespace) or self.namespace_modes.get("*", ""))
        return min((mode for mode in said if mode in _STRICTNESS), key=_STRICTNESS.index, default="")

    def registered(self) -> set[ProcessId]:
        return {client.process for client in self.books.clients.values()}

    def strangers(self, cards: Mapping[bytes, CardUse]) -> list[Stranger]:
        """Processes that compute on a card and never registered, or told of no channel there; those on their way out do
        not count."""
        registered = self.untold.registered()
        return [
            Stranger(
                name=self._words(pid),
                gpu=gpu.index,
                process=(process := ProcessId(pid=pid, start_time=start_time)),
                offline_uid=self._offline_pod(pid),
                how=UNTOLD if pid in registered else self._how_unheard(process),
            )
            for gpu in self.gpus
            for pid in (cards[gpu.uuid].by_pid if gpu.uuid in cards else ())
            if not self._is_heard(registered.get(pid), pid, gpu.index)
            and (start_time := self.processes.start_time(pid)) is not None
            and not self.processes.is_ending(pid, start_time)
        ]

    def _how_unheard(self, process: ProcessId) -> str:
        return NO_ROOM if self.register.admission.waits_for_room(process) else NO_SHIM

    def _is_heard(self, client: ClientEntry | None, pid: int, gpu: GpuIndex) -> bool:
        if client is None:
            return pid == os.getpid()
        return self.untold.looks(client.process, gpu) < LOOKS_TO_CLOSE

    def cards(self, cards: Mapping[bytes, CardUse]) -> list[Card]:
        return [Card(gpu=gpu.index, obstacle=self.blindness or _obstacle(cards.get(gpu.uuid))) for gpu in self.gpus]

    def slots_in_use(self, holdings: tuple[HeldDevices, ...]) -> frozenset[str]:
        return frozenset(slot for holding in holdings if holding.resource == names.RESOURCE for slot in holding.ids)

    def readings(
        self, now_ns: int, gained: Mapping[GpuIndex, Gained], cards: Mapping[bytes, CardUse]
    ) -> Iterator[Reading]:
        """Accounts of the services that belong to offline pods; `gained` since the last time."""
        for claim in self.books.claims.values():
            group = pod_of(claim.cgroup)
            if claim.role is not Role.OFFLINE or group is None:
                continue
            service = self.books.services[claim.service]
            tokens = self.register.tokens(claim.service)
            has_hook = any(client.role is Role.HOOK for client in self.books.clients_of(claim.service))
            engine = self.kv.books.engines.get(claim.service) if self.kv is not None else None
            yield Reading(
                pod_uid=group.uid,
                service=claim.service,
                harvest_s=self.register.channels.harvest.harvest_ns(claim.service, now_ns) / 1e9,
                gpus=len(service.compute_on),
                tokens=tokens if has_hook or tokens else None,
                has_work=self._has_work(claim.service) and not any(map(self.is_standing, service.compute_on)),
                gated_s=sum(gained[gpu].gated_s for gpu in service.compute_on if gpu in gained),
                stops=sum(gained[gpu].stops for gpu in service.compute_on if gpu in gained),
                lost=engine.view().lost_tokens if engine is not None else None,
                memory=self._standing(engine, cards),
            )

    def _has_work(self, service: ServiceId) -> bool:
        """Requests run or wait, where an engine's hook says so; a job that waits for its input gets nothing to do by
        any GPU. Else its channels are all that is known."""
        hooks = [client for client in self.books.clients_of(service) if client.role is Role.HOOK]
        views = [view for view in (self.register.view(client.id) for client in hooks) if view.hint_ns]
        if views:
            return any(view.open_requests > 0 for view in views)
        return bool(self.books.services[service].compute_on)

    def _standing(self, engine: Engine | None, cards: Mapping[bytes, CardUse]) -> EngineMemory | None:
        """On the scarcest of its GPUs."""
        if engine is None or self.kv is None or not engine.can_lose:
            return None
        lender = self.kv.lender
        withheld = lender.withheld(engine)
        uses = {gpu.index: cards.get(gpu.uuid) for gpu in self.gpus if gpu.index in engine.gpus}
        free = [self.offered_bytes(gpu, use) - withheld[gpu] for gpu, use in uses.items() if use is not None]
        if len(free) < len(engine.gpus):
            return None
        return EngineMemory(
            limit_mib=max(0, min(free)) / MIB,
            short=lender.short_of_ceiling(engine),
            can_grow=lender.can_have_more(engine),
        )

    def lent(self, lent_s: Mapping[ServiceId, float], grants: GrantPort) -> Iterator[LentFacts]:
        """What online pods lent, and what it cost them."""
        for claim in self.books.claims.values():
            group, online = pod_of(claim.cgroup), self.gating.online.get(claim.service)
            if group is None or online is None:
                continue
            pod = self.book.pods.get(group.uid)
            namespace, _, name = self.books.services[claim.service].name.partition("/")
            yield LentFacts(
                pod_uid=group.uid,
                namespace=namespace,
                pod=name,
                service=pod.service if pod is not None else "",
                lent_s=lent_s.get(claim.service, 0.0),
                delay_s=online.book.delay_ns / 1e9,
                preemptions=online.book.preemptions,
                granted_s=grants.grants(claim.service).granted_ns / 1e9,
            )

    def uses(self, now_ns: int, cards: Mapping[bytes, CardUse]) -> Iterator[OnlineUse]:
        for key, online in self.gating.online.items():
            namespace, _, pod = self.books.services[key].name.partition("/")
            pids = {client.process.pid for client in self.books.clients_of(key)}
            of_pod = {
                gpu.index: sum(held for pid, held in cards[gpu.uuid].by_pid.items() if pid in pids)
                for gpu in self.gpus
                if gpu.uuid in cards
            }
            bytes_on = {gpu: held for gpu, held in of_pod.items() if held}
            yield OnlineUse(namespace=namespace, pod=pod, busy_s=online.hold_ns(now_ns) / 1e9, bytes_on=bytes_on)

    def resting(self, now_ns: int) -> list[str]:
        """Online services that Valve has delayed too much: nothing is harvested beside them for now."""
        resting = (key for key, online in self.gating.online.items() if now_ns < online.breaker.open_until_ns)
        return sorted(self.books.services[key].name for key in resting)

    def offered_bytes(self, gpu: GpuIndex, use: CardUse) -> int:
        """What of its free memory offline work may take: not what is kept for online services that will need it."""
        kept = self.kv.supply.kept_bytes(gpu) if self.kv is not None else 0
        return max(0, self.free_bytes(gpu, use) - kept)

    def free_bytes(self, gpu: GpuIndex, use: CardUse) -> int:
        """All but what others use, offline work's own included. Free handles of the pool count as no use."""
        offline = {client.process.pid for client in self.books.with_role(Role.OFFLINE)}
        theirs = use.used_bytes - sum(held for pid, held in use.by_pid.items() if pid in offline)
        theirs -= self.kv.books.pool.free_handles(gpu) * self.kv.books.pool.handle_bytes if self.kv is not None else 0
        return use.total_bytes - max(0, theirs)

    def _heard_pods(self) -> set[str]:
        groups = (
            pod_of(claim.cgroup)
            for claim in self.books.claims.values()
            if claim.role is Role.ONLINE
            and any(client.role is Role.ONLINE for client in self.books.clients_of(claim.service))
        )
        return {group.uid for group in groups if group is not None}

    def _gpus_of(self, holding: HeldDevices, pod: Pod | None) -> tuple[frozenset[GpuIndex], bool]:
        """The GPUs of a container, and whether they are known; none where it holds no GPU. A device that is named as a
        GPU of this node is one, whatever its resource is called; parts of a shared GPU are listed as UUID::n. Names
        that say nothing may be any GPU, and are heard on none, until the pod has channels on as many as it holds."""
        ids = self._held_ids(holding, pod)
        if holding.resource == names.RESOURCE or (holding.ids and not ids):
            return frozenset(), True
        named = [self.claims.named(holding.resource, one) if holding.is_claimed else one for one in ids]
        found = [self._by_uuid().get(device.partition("::")[0]) for device in named]
        known = frozenset(index for index in found if index is not None)
        is_gpu = bool(known) or holding.resource in names.ONLINE_RESOURCES or holding.resource.startswith(MIG)
        if not is_gpu or (None not in found and found):
            return known, True
        shown = known | (self._used_by(pod.uid) if pod is not None else frozenset())
        is_known = bool(shown) and len(shown) >= len(set(ids))
        return (shown, True) if is_known else (frozenset(self._by_uuid().values()), False)

    def _held_ids(self, holding: HeldDevices, pod: Pod | None) -> list[str]:
        """Without what a claim only watches."""
        if pod is None or not holding.is_claimed:
            return list(holding.ids)
        return [one for one in holding.ids if not self.claims.is_watched(pod, holding.resource, one)]

    def _claimed(self, devices: frozenset[DraDevice] | None) -> tuple[frozenset[GpuIndex], bool]:
        """The same for an allocation. One that cannot be told yet may be any GPU."""
        gpus = [self._by_uuid().get(self.claims.uuid(device)) for device in self._of_gpu_drivers(devices)]
        if devices is None or None in gpus:
            return frozenset(self._by_uuid().values()), False
        return frozenset(gpu for gpu in gpus if gpu is not None), True

    @staticmethod
    def _of_gpu_drivers(devices: frozenset[DraDevice] | None) -> list[DraDevice]:
        return [device for device in devices or () if device.driver in names.ONLINE_RESOURCES]

    def _by_uuid(self) -> dict[str, GpuIndex]:
        return {gpu.uuid_text: gpu.index for gpu in self.gpus}

    def _used_by(self, uid: str) -> frozenset[GpuIndex]:
        """Where the online processes of a pod have channels."""
        services = [
            self.books.services[claim.service]
            for claim in self.books.claims.values()
            if claim.role is Role.ONLINE and (group := pod_of(claim.cgroup)) is not None and group.uid == uid
        ]
        return frozenset[GpuIndex]().union(*(service.gpus for service in services))

    def _offline_pod(self, pid: int) -> str:
        group = pod_of(self.processes.cgroup(pid) or "")
        pod = self.book.pods.get(group.uid) if group is not None else None
        return pod.uid if pod is not None and pod.role is Role.OFFLINE else ""

    def _words(self, pid: int) -> str:
        group = pod_of(self.processes.cgroup(pid) or "")
        pod = self.book.pods.get(group.uid) if group is not None else None
        return f"process {pid} ({self.processes.comm(pid)})" + (f" of {pod.key}" if pod is not None else "")


def _obstacle(use: CardUse | None) -> str:
    if use is None:
        return "NVML does not answer for it"
    return "MIG is on, which Valve does not support" if use.is_mig else ""
