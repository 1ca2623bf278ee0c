"""What this node's GPUs did, second by second: the series, the receipts of pods, processes without the shim."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial

from valved.kube import seriesfile
from valved.kube.host import Host, LastHeard, Uncounted
from valved.kube.observed import MOST_WAKES, Observed
from valved.kube.observer import Gained, Observer
from valved.kube.offline import OfflineBook
from valved.kube.pods import PodBook
from valved.kube.series import NodeSeries
from valved.kube.ungated import Ungated
from valved.machine.cards import CardReader
from valved.machine.helpers import Helpers, Worker
from valved.model.ids import GpuIndex, ServiceId
from valved.state.registry import STANDING
from valved.state.saved import boot_id
from valved.state.stats import GpuAccount

log = logging.getLogger("valved.kube")

BEAT_S = 0.1  # between looks at which services are busy: fine enough for the overlap of GPUs, 0.02 % of a core
BOOK_S = 1.0
SECOND_NS = 1_000_000_000
SAVE_NS = 60 * SECOND_NS  # what a crash may lose of the series
PARTING_S = 2.0  # for its last write


class Counting:
    """Its loops are `beat` and `account`; the caller begins them again should one fail."""

    def __init__(
        self,
        host: Host,
        known: LastHeard,
        uncounted: Uncounted,
        observer: Observer,
        book: PodBook,
        offline: OfflineBook,
        changed: Callable[[], None],
    ) -> None:
        self._host, self._known, self._uncounted = host, known, uncounted
        self._observer, self._book, self._offline, self._changed = observer, book, offline, changed
        self._gpus = tuple(host.gate.gpus())
        self.series = NodeSeries(len(self._gpus))
        self.observed, self._wakes = Observed(self._gpus), host.journal.watch(("wake",), MOST_WAKES, lambda: None)
        self.ungated = Ungated(host.ladder.freeze_stranger)
        self.lent_s: dict[ServiceId, float] = {}
        self._cards = CardReader()
        self._file = host.run_dir / seriesfile.FILE, boot_id(), [gpu.uuid_text for gpu in self._gpus]
        self._disk, self._is_kept = Worker(asyncio.get_running_loop(), Helpers("valved-series", 1)), asyncio.Event()
        self._is_kept.set()
        path, boot, uuids = self._file
        why = seriesfile.read(path, self.series, boot, uuids, host.now_s())
        log.info("series", extra={"facts": {"taken_over": not why, "why_not": why}})

    def adopt(self) -> None:
        """Offline work that was here before this daemon: only what it gets from now on is booked."""
        for reading in self._observer.readings(self._host.clock.now_ns(), {}, {}):
            self._offline.adopt(reading.service, reading.harvest_s, reading.tokens or 0)

    async def look(self) -> None:
        self._known.cards = await self._cards.read()
        self._observer.untold.look({uuid: card.by_pid for uuid, card in self._known.cards.items()})

    async def beat(self) -> None:
        while True:
            accounts = zip(self._gpus, self._host.accounts(self._gpus), strict=True)
            busy = [bool(one.holders - STANDING) and not self._uncounted.is_unheard(gpu.index) for gpu, one in accounts]
            self.series.beat(self._host.now_s(), busy)
            await asyncio.sleep(BEAT_S)

    async def account(self) -> None:
        """Once a second: time that was open, memory that was free, and processes that use a GPU without the shim."""
        accounts = self._host.accounts(self._gpus)
        seen_ns, before = self._host.clock.now_ns(), [_figures(account) for account in accounts]
        save_ns = seen_ns + SAVE_NS
        while True:
            await asyncio.sleep(BOOK_S)
            now_ns = self._host.clock.now_ns()
            for account in self._host.accounts(self._gpus):
                account.advance(now_ns)
            after = [_figures(account) for account in accounts]
            self._book_time([_gained(*pair) for pair in zip(before, after, strict=True)], now_ns - seen_ns, now_ns)
            seen_ns, before = now_ns, after
            await self.look()
            self._book_memory(now_ns)
            if now_ns >= save_ns:
                save_ns = now_ns + SAVE_NS
                self._keep()
            strangers = self._observer.strangers(self._known.cards)
            if self.ungated.look(strangers, now_ns / 1e9, self._observer.registered()):
                self._changed()  # its GPU is closed at once

    def _book_time(self, gained: list[Gained], passed_ns: int, now_ns: int) -> None:
        """The node's series, what offline pods got, and what the online services of those GPUs lent."""
        seconds = [0.0 if self._uncounted.is_unheard(gpu.index) else passed_ns / 1e9 for gpu in self._gpus]
        left = [each.left_s for each in gained]
        self.series.book(now_ns / 1e9, seconds, left)
        live = {pod.key for pod in self._book.pods.values()}
        self.observed.book(seconds, left, self._wakes, self._host.books, live)
        by_gpu: Mapping[GpuIndex, Gained] = {gpu.index: each for gpu, each in zip(self._gpus, gained, strict=True)}
        self._offline.read(self._observer.readings(now_ns, by_gpu, self._known.cards), now_ns / 1e9)
        self.lent_s = {
            key: self.lent_s.get(key, 0.0) + sum(by_gpu[gpu].harvest_s for gpu in service.gpus if gpu in by_gpu)
            for key, service in self._host.gating.online.items()
        }

    def _book_memory(self, now_ns: int) -> None:
        for place, gpu in enumerate(self._gpus):
            is_held = bool(self._host.gating.gpus[gpu.index].holders - STANDING)
            if (use := self._known.cards.get(gpu.uuid)) is not None and not self._uncounted.is_unheard(gpu.index):
                free = self._observer.offered_bytes(gpu.index, use)
                self.series.memory(now_ns / 1e9, place, free, use.total_bytes, is_held=is_held)
                self.observed.note_free(place, free, is_held)

    def _keep(self) -> None:
        """In a thread, which a disk that hangs has for as long as it likes."""
        if self._is_kept.is_set():
            self._is_kept.clear()
            path, boot, uuids = self._file
            job = partial(seriesfile.keep, path, self.series.saved(), boot, uuids)
            self._disk.do(job, lambda *_: self._is_kept.set())

    async def close(self) -> None:
        self._host.journal.unwatch(self._wakes)
        self._cards.leave()
        self._keep()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_kept.wait(), PARTING_S)


def _figures(account: GpuAccount) -> tuple[int, int, int, int]:
    return account.left_ns, account.harvest_ns, account.gated_ns, account.gates


def _gained(before: tuple[int, int, int, int], after: tuple[int, int, int, int]) -> Gained:
    left, harvested, gated, stops = (now - then for then, now in zip(before, after, strict=True))
    return Gained(left_s=left / 1e9, harvest_s=harvested / 1e9, gated_s=gated / 1e9, stops=stops)
