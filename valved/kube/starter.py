"""Decides whether an offline container may start: its pod, the GPUs of that pod, whether it may have them now.

PreStart names slots but not their pod. By then the kubelet's pod resources list the pod that holds them, and the
pod's placement was written together with its binding: identity without a lock and without a second write. Whatever is
not as it should be keeps the container from starting; the kubelet tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from valve_kube import names

from valved.kube import cdi
from valved.kube.podresources import HeldDevices, Holdings
from valved.kube.pods import Pod, PodBook
from valved.model.ids import Role

FetchPod = Callable[[str, str], Awaitable[None]]  # namespace, name: have the API server tell the book


class MayNotStart(Exception):
    """The container cannot start now; the text is what the pod's event shows."""


@dataclass(slots=True, kw_only=True)
class Starter:
    holdings: Holdings
    book: PodBook
    fetch: FetchPod
    uuids: Collection[str]  # of this node's GPUs
    cdi_folder: Path | None = None  # None: GPUs reach the container by its environment
    toolkit_folders: Collection[Path] = ()
    given: dict[str, str] = field(default_factory=dict)  # GPU -> UID of the pod that was let in last

    async def start(self, slots: Collection[str]) -> Pod:
        """Let the container that holds these slots start, or raise MayNotStart."""
        holding = await self._who_holds(slots)
        pod = await self._pod(holding)
        self._check(pod)
        if self.cdi_folder is not None:
            self._describe(self.cdi_folder, holding.ids, pod.gpus)
        for uuid in pod.gpus:
            self.given[uuid] = pod.uid
        return pod

    async def _who_holds(self, slots: Collection[str]) -> HeldDevices:
        try:
            held = await self.holdings.list()
        except OSError as error:
            raise MayNotStart(str(error)) from error
        mine = [one for one in held if one.resource == names.RESOURCE and not set(slots).isdisjoint(one.ids)]
        if len(mine) != 1:
            who = ", ".join(f"{one.namespace}/{one.pod}" for one in mine) or "no pod"
            raise MayNotStart(f"slots {', '.join(sorted(slots))} are held by {who}, but must be held by one container")
        return mine[0]

    async def _pod(self, holding: HeldDevices) -> Pod:
        """From the watch, or asked for if that is behind: a placement is in the very first version a kubelet sees."""
        pod = self.book.named(holding.namespace, holding.pod)
        if pod is None or not pod.gpus:
            try:
                await self.fetch(holding.namespace, holding.pod)
            except OSError as error:
                raise MayNotStart(
                    f"placement of {holding.namespace}/{holding.pod} is not known yet: {error}"
                ) from error
            pod = self.book.named(holding.namespace, holding.pod)
        if pod is None:
            raise MayNotStart(f"the API server knows no pod {holding.namespace}/{holding.pod}")
        return pod

    def _check(self, pod: Pod) -> None:
        if pod.role is not Role.OFFLINE:
            raise MayNotStart(f"{pod.key} is not offline work ({names.ROLE}: {names.OFFLINE})")
        if not pod.gpus:
            raise MayNotStart(f"{pod.key} has no placement ({names.GPUS}); was it bound by {names.SCHEDULER}?")
        gone = [uuid for uuid in pod.gpus if uuid not in self.uuids]
        if gone:
            raise MayNotStart(f"{pod.key} was placed on {gone[0]}, which this node does not have (any more)")
        for uuid in pod.gpus:
            for other in self.book.offline():
                came_first = other.is_running or self.given.get(uuid) == other.uid
                if other.uid != pod.uid and uuid in other.gpus and came_first:
                    raise MayNotStart(f"{uuid} still belongs to {other.key}")

    def _describe(self, folder: Path, slots: tuple[str, ...], uuids: tuple[str, ...]) -> None:
        try:
            toolkit = cdi.read_toolkit(self.toolkit_folders)
            if toolkit is None:
                raise MayNotStart("NVIDIA's toolkit keeps no CDI description on this node; use the backend envvar")
            for slot, spec in cdi.slot_specs(slots, uuids, toolkit).items():
                cdi.write(folder, slot, spec)
        except (cdi.NoDescription, OSError) as error:
            raise MayNotStart(str(error)) from error
