"""Ends what is left of a deleted pod shortly before the kubelet kills it: offline processes whose channels are off.

In the teardown of such a process the driver waits for its channels, under locks that online work needs; how valved ends
it instead: gate/ending.py. A process that runs is left to the kubelet, until an online service holds one of its GPUs.

The order of a deletion: deletionTimestamp is set, preStop hooks, SIGTERM, SIGKILL at the end of the grace. The kubelet
counts the grace from when it hears of the deletion, and so do we. Who hears of it late goes by deletionTimestamp, on
the API server's clock: the earlier counts. A pod that was deleted by force has left already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from valved.kube.cgroup import pod_of
from valved.kube.host import Host
from valved.kube.pods import Deletion, Pod, PodBook
from valved.machine.clock import Ticker
from valved.model.ids import ProcessId, Role

SECOND_NS = 1_000_000_000
LOOK_NS = SECOND_NS // 10  # who is stopped meanwhile
LEAD_S = 2.0  # before the kubelet's SIGKILL: a stop signal may take half a second, the state file as long
CUT_S = 1.0  # the API server keeps whole seconds
AGAIN_S = 1.0  # where the API server does not answer


class PodAnswers(Protocol):
    """Of the API server (kube/apiserver.py)."""

    def now_s(self) -> float: ...

    async def is_gone(self, pod: Pod) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Heard:
    pod: str
    deletion: Deletion
    since_ns: int


class Deletions:
    """Gets the news of the book from the room. `run` asks for pods of which nobody said that they were deleted: those
    that are missing, and those of which this valved never heard (`ask_for_untold`)."""

    def __init__(self, host: Host, book: PodBook, api: PodAnswers) -> None:
        self._host, self._book, self._api = host, book, api
        self._heard: dict[str, _Heard] = {}  # by UID: pods that are being deleted
        self._gone: dict[str, str] = {}  # those that have left, while processes of theirs are here: UID -> name
        self._missing: dict[str, Pod] = {}  # those of which it is not sure
        self._wake = asyncio.Event()
        self._ticker = Ticker(host.clock, self._look)

    def pods_changed(self) -> None:
        now_ns, before = self._host.clock.now_ns(), self._heard
        told = [(pod, pod.deletion) for pod in self._book.pods.values() if pod.deletion is not None]
        self._heard = {pod.uid: _Heard(pod.key, deletion, now_ns) for pod, deletion in told}
        for uid in self._heard.keys() & before.keys():
            if before[uid].deletion == self._heard[uid].deletion:  # else its grace was made shorter
                self._heard[uid] = before[uid]
        self._look_on()

    def pod_left(self, pod: Pod, *, is_deleted: bool) -> None:
        if pod.is_static or not any(uid == pod.uid for uid, *_ in self._here()):
            return
        if is_deleted:
            self._gone[pod.uid] = pod.key
        else:
            self._missing[pod.uid] = pod
            self._wake.set()
        self._look_on()

    def ask_for_untold(self) -> None:
        """The API server has listed its pods. One that is here and not among them may have left while no valved ran."""
        for uid in {uid for uid, *_ in self._here()} - self._gone.keys():
            pod = self._book.pods.get(uid) or self._claimed(uid)
            if pod is not None and not (pod.is_told or pod.is_static):
                self._missing[uid] = pod
                self._wake.set()

    def _claimed(self, uid: str) -> Pod | None:
        """As a claim that outlived its valved names it."""
        for claim in self._host.books.claims.values():
            group = pod_of(claim.cgroup)
            if group is not None and (group.uid, group.path) == (uid, claim.cgroup):  # else no pod's word: a launcher's
                namespace, _, name = self._host.books.services[claim.service].name.partition("/")
                return Pod(uid=uid, namespace=namespace, name=name, role=claim.role, gpu_containers=None)
        return None

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for pod in list(self._missing.values()):
                with suppress(OSError):
                    is_gone = await self._api.is_gone(pod)
                    del self._missing[pod.uid]
                    if is_gone:
                        self.pod_left(pod, is_deleted=True)
            if self._missing:
                self._wake.set()
                await asyncio.sleep(AGAIN_S)

    def close(self) -> None:
        self._ticker.stop()

    def _look_on(self) -> None:
        if self._heard or self._gone:
            self._ticker.start(LOOK_NS)
            self._look()
        else:
            self._ticker.stop()

    def _look(self) -> None:
        over = {uid: one.pod for uid, one in self._heard.items() if self._is_over(one)} | self._gone
        here = list(self._here()) if over else []
        self._gone = {uid: name for uid, name in self._gone.items() if any(uid == one for one, *_ in here)}
        for uid, process, is_off in here:
            if is_off and uid in over:
                self._host.endings.begin(process, f"the time of its pod {over[uid]} is over", is_final=True)
        if not self._heard and not self._gone:
            self._ticker.stop()

    def _is_over(self, heard: _Heard) -> bool:
        grace_s = heard.deletion.grace_s
        lead_s = min(LEAD_S, grace_s / 2)
        passed_s = (self._host.clock.now_ns() - heard.since_ns) / SECOND_NS
        return passed_s >= grace_s - lead_s or self._api.now_s() >= heard.deletion.ends_s + CUT_S - lead_s

    def _here(self) -> Iterator[tuple[str, ProcessId, bool]]:
        """Offline processes by the UIDs of their pods, and whether channels of theirs are off or may be in a moment."""
        for entry in self._host.books.with_role(Role.OFFLINE):
            if group := pod_of(entry.cgroup):
                yield group.uid, entry.process, self._host.gating.is_held(entry.gpus())
        for owner in self._host.register.channels.leftovers.owners():  # it has no link
            with suppress(OSError):
                if (group := pod_of(self._host.processes.cgroup(owner.pid) or "")) is not None:
                    yield group.uid, owner, True
