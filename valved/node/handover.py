"""From one valved to the next: write down what a successor must know, and pick it up.

After a restart the online services of the predecessor hold their GPUs again before any client is back, so offline work
cannot run beside an online process that nobody watches. Clients find the new socket within moments. What has not come
back after `come_back_s`: channels of dead processes are enabled at once (a process cannot even exit cleanly while its
channels are off), those of live ones when their GPU opens; a live online process that does not return keeps its
service's hold until it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from valved.clients.leftovers import enable_due
from valved.clients.register import Register
from valved.clients.schedules import SECOND_NS
from valved.fds import is_scarce
from valved.gate.freeze import Ladder
from valved.gate.online import OnlineService
from valved.gate.permits import GateSettings
from valved.gate.requests import RequestTally
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, ProcessPort, PromptPort, WorkPort
from valved.model.consent import Said
from valved.model.events import EventKind
from valved.model.figures import plausible
from valved.model.ids import ChannelRef, GpuIndex, ProcessId, Role, ServiceId
from valved.model.states import UnwrittenState
from valved.node.comeback import TELL_NS
from valved.node.kv import Kv
from valved.node.snapshot import COUNTERS, Snapshots, saved_client
from valved.policy.breaker import resumed
from valved.policy.cooldown import CooldownSettings, CooldownState
from valved.state import saved as files
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry, ProcessClaim, ServiceEntry, is_number
from valved.state.saved import (
    SavedChannel,
    SavedClient,
    SavedPolicy,
    SavedService,
    SavedState,
)
from valved.state.statefile import StateFile
from valved.state.unsaved import FILE as UNSAVED
from valved.state.unsaved import Unsaved

EXPECTED_NS = 60 * SECOND_NS  # offline processes of a predecessor have turns of their own for so long
LONGEST_NS = 1 << 60  # what no sum of times exceeds, whatever a state file says


@dataclass(eq=False, repr=False)
class Handover:
    """`is_ours`: whether the folder that the state is written to is still this daemon's."""

    _path: Path
    _gate: GatePort
    _books: Books
    _gating: GateService
    _register: Register
    _journal: Journal
    _clock: Clock
    _processes: ProcessPort
    _boot: str
    _ladder: Ladder
    _disk: WorkPort
    _prompt: PromptPort
    _kv: Kv | None = None
    _: KW_ONLY
    is_ours: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.policy = SavedPolicy()
        world = (self._gate, self._books, self._gating, self._register, self._clock, self._processes)
        of = f"{files.VERSION} {self._boot} {self._gate.driver_version()}"
        self._unsaved = Unsaved(self._path.with_name(UNSAVED), of, self._prompt, self.is_ours)
        self._snapshots = Snapshots(*world, self._boot, self._ladder, self._kv)
        rooms = (self._journal, self._clock, self._disk)
        self._file = StateFile(self._path, self.snapshot, self._unsaved, *rooms, is_ours=self.is_ours)
        self._senseless: list[str] = []  # records of the predecessor's file

    # Writing

    def save_soon(self) -> None:
        self._file.save_soon()

    def save(self) -> None:
        """Without waiting for it: `when_saved` says when it is written."""
        self._file.save()

    def when_saved(self, then: Callable[[bool], None], within_ns: int, *, is_last: bool = False) -> None:
        self._file.when_saved(then, within_ns, is_last=is_last)

    def is_writing(self) -> bool:
        return self._file.is_writing()

    def unwritten(self) -> list[UnwrittenState]:
        return self._file.unwritten()

    def note_channel(self, entry: ClientEntry, channel: ChannelRef) -> None:
        """Before it can be switched off: the state file names it a moment later."""
        self._unsaved.put(saved_client(entry, [channel]))

    def snapshot(self) -> SavedState:
        return self._snapshots.take(self.policy)

    # Reading

    def keep(self, **changes: Any) -> None:
        """A word of an operator that the next valved must know."""
        self.policy = msgspec.structs.replace(self.policy, **changes)

    def restore(self, saved: SavedState, come_back_s: float) -> None:
        """Take over from a predecessor. Called once, before the link opens."""
        self._senseless = []
        self._try("counters", lambda: self._restore_counters(saved))
        self._try("policy", lambda: self._restore_policy(saved.policy))
        self._restore_books(saved, come_back_s)
        if (kv := self._kv) is not None:  # by now it is known which services live
            memory = saved.memory
            if saved.boot_id != self._boot:  # its clock was another: what was then may never be long ago
                memory = msgspec.structs.replace(memory, reservations={}, reclaims={}, peaks=[])
            self._try("memory", lambda: kv.report.restore(memory))
        if self._senseless:
            files.keep_bad(self._path)
            count, first = len(self._senseless), self._senseless[0]
            self._journal.emit(
                EventKind.NOTED, reason=f"state file: {count} records are unreadable, the first: {first}"
            )

    def is_own(self, saved: SavedState) -> bool:
        """Of this boot and driver, and of this version."""
        return saved.version == files.VERSION and self._is_of_now(saved)

    def _is_of_now(self, saved: SavedState) -> bool:
        return saved.boot_id == self._boot and saved.driver == self._gate.driver_version()

    def _try(self, what: str, part: Callable[[], object]) -> None:
        """One record of the file. What makes no sense costs that record, never the start."""
        try:
            part()
        except Exception as error:  # a file can say anything: another version's values, or a hand's
            self._senseless.append(f"{what}: {type(error).__name__}: {error}")

    def _restore_policy(self, saved: SavedPolicy) -> None:
        self.keep(mode=saved.mode)  # also where the cooldown makes no sense
        if saved.cooldown is not None:
            start, floor, ceiling, factor, window = saved.cooldown
            self._gating.settings.cooldown = CooldownSettings(
                start_ns=start, floor_ns=floor, ceiling_ns=ceiling, factor=factor, window_ns=window
            )
        self.policy = saved

    def _restore_books(self, saved: SavedState, come_back_s: float) -> None:
        books = self._books
        next_services = (saved.next_service, *(service.id + 1 for service in saved.services))
        books.next_service = max((books.next_service, *filter(is_number, next_services)))
        books.next_client = max((books.next_client, *filter(is_number, (saved.next_client,))))
        if not self._is_of_now(saved):
            reason = "only counters and settings were taken over: the boot or the driver is another"
            self._journal.emit(EventKind.TAKEN_OVER, reason=reason)
            self._restore_channels(self._read_unsaved(with_older=False))
            return
        for service in saved.services:
            members = [client for client in saved.clients if client.service == service.id]
            self._try(f"service {service.id}", partial(self._restore_service, service, members))
        online = {service.id for service in saved.services if service.role == Role.ONLINE}
        for client in saved.clients:
            if client.service not in online:
                self._register.awaited.expect(client.pid)
                self._register.admission.welcomes.expect(client.pid)
        until_ns = self._clock.now_ns() + EXPECTED_NS  # those that ended meanwhile never say that they are back
        self._clock.call_at_ns(until_ns, self._register.awaited.expected.clear)
        unsaved = self._read_unsaved(with_older=saved.version == files.VERSION)
        self._restore_channels([*saved.clients, *unsaved])
        for thawed in saved.frozen:
            self._try(f"frozen process {thawed.pid}", partial(self._ladder.release, thawed))
        for doomed in saved.ending:
            self._clock.call_at_ns(self._clock.now_ns(), partial(self._ladder.take_up, doomed))  # which writes the file
        self._journal.emit(
            EventKind.TAKEN_OVER,
            reason="state of a predecessor",
            services=len(self._books.services),
            channels=len(self._register.channels.leftovers),
        )
        self.settle(patience_over=False)
        self._register.departures.watch()
        after_ns = self._clock.now_ns() + round(come_back_s * SECOND_NS)
        self._clock.call_at_ns(after_ns, lambda: self.settle(patience_over=True))

    def _restore_channels(self, clients: list[SavedClient]) -> None:
        for client in clients:
            self._try(f"client {client.pid}", partial(self._restore_leftovers, client))

    def _read_unsaved(self, *, with_older: bool) -> list[SavedClient]:
        """`with_older`: the state file is of this boot, driver and version, so lines that do not say are, too."""
        try:
            return list(self._unsaved.read(with_older=with_older))
        except OSError as error:
            if is_scarce(error):
                raise  # as of the state file: the next start may read it
            self._senseless.append(f"unsaved channels: {error}")
            return []

    def _restore_leftovers(self, client: SavedClient) -> None:
        Role(client.role)
        for channel in client.channels:
            if channel.gpu in self._gating.gpus:
                self._register.channels.leftovers.put(_channel(channel), client.process)

    def _restore_counters(self, saved: SavedState) -> None:
        counters = self._gating.counters
        for name in COUNTERS:
            setattr(counters, name, saved.counters.get(name, 0))
        counters.refusals = dict(saved.refusals)
        counters.restarts += 1
        index_of = {info.uuid.hex(): info.index for info in self._gate.gpus()}
        for gpu in saved.gpus:
            index = index_of.get(gpu.uuid)
            account = self._gating.gpus.get(index) if index is not None else None
            if account is None:
                continue
            account.harvest_ns, account.gated_ns, account.gates = gpu.harvest_ns, gpu.gated_ns, gpu.gates
            if len(gpu.latency) == len(account.latency.counts):
                account.latency.counts = list(gpu.latency)
                account.latency.sum_ns = gpu.latency_sum_ns

    def _restore_service(self, saved: SavedService, clients: list[SavedClient]) -> None:
        """Only a service of which something still lives; unclaimed offline ones are made anew by their clients."""
        if not is_number(saved.id):
            raise ValueError("valved gives no such number to a service")
        role = Role(saved.role)
        living = [client for client in clients if not self._processes.is_gone(client.process)]
        root = self._root(saved, living)
        if root is None:
            return
        entry = ServiceEntry(id=ServiceId(saved.id), name=saved.name, role=role, root=root)
        self._books.services[entry.id] = entry
        self._books.touch()
        self._books.claims[root] = ProcessClaim(root=root, role=role, service=entry.id, cgroup=saved.cgroup)
        self._register.channels.harvest.restore(entry.id, saved.harvest_ns)
        for pid, start_time, tokens in saved.tokens:
            self._register.useful.read(entry.id, ProcessId(pid=pid, start_time=start_time), tokens)
        if role is Role.ONLINE:
            shims = {one.process for one in living if one.role == Role.ONLINE}
            self._restore_hold(entry, saved, shims)
        self._register.claimed.watch_root(root)  # the last step: it may have ended, and then the service ends with it

    def _restore_hold(self, entry: ServiceEntry, saved: SavedService, shims: set[ProcessId]) -> None:
        gpus = frozenset(GpuIndex(gpu) for gpu in saved.gpus if GpuIndex(gpu) in self._gating.gpus)
        entry.kept_gpus = gpus if shims else frozenset()
        entry.refresh_gpus()
        try:
            online = self._gating.add_service(entry.id, entry.gpus)
        except Exception:
            self._books.drop_service(entry.id)  # its clients make it anew
            raise
        online.away = shims
        _restore_online(online, saved, self._clock.now_ns(), self._gating.settings)

    def _root(self, saved: SavedService, living: list[SavedClient]) -> ProcessId | None:
        """The process whose end ends the service: the claimed one, or the first client that outlived it."""
        if saved.root is None or not self._processes.is_gone(saved.root):
            return saved.root
        return living[0].process if living else None

    def settle(self, *, patience_over: bool) -> None:
        """Enable channels whose client did not come back. Called again from time to time while any is left."""
        due, known = enable_due(self._register.channels.leftovers, self._gate, self._processes, patience_over)
        if due:
            self._journal.emit(
                EventKind.ENABLED_LEFTOVER,
                gpus=tuple(sorted({channel.gpu for channel in due})),
                reason="a predecessor may have left them off",  # of clients that are back, too: the GPU was held then
                channels=len(due),
                known_to_driver=known,
            )
            self.save_soon()
        for online in list(self._gating.online.values()):
            self._settle_service(online, patience_over)
        here = self._books.per_process  # one that ends leaves: not looked for here
        self._register.lived.keep(lambda process: process in here or not self._processes.is_gone(process))

    def _settle_service(self, online: OnlineService, patience_over: bool) -> None:
        if (entry := self._books.services.get(online.id)) is None:
            self._gating.remove_service(online.id)  # nobody else would: it ended while it was made
            return
        if entry.clients and not (entry.kept_gpus or online.away):
            return  # nobody is waited for
        if gone := {process for process in online.away if self._processes.is_gone(process)}:
            online.away -= gone
            self._gating.permits.look_soon(online)  # nobody else may for long: it was braked for those
        members = [client.id for client in self._books.clients_of(online.id)]
        has_told = self._register.channels.possession.are_quiet(members, TELL_NS)
        has_told &= self._clock.now_ns() - online.back_ns >= TELL_NS
        if entry.kept_gpus and patience_over and has_told and not online.away:
            entry.kept_gpus = frozenset()
            if entry.refresh_gpus():
                self._gating.set_gpus(online.id, entry.gpus)
                self._register.channels.lease.refresh()
        if patience_over and not online.away:
            self._register.claimed.drop_if_empty(online.id)


def _restore_online(online: OnlineService, saved: SavedService, now_ns: int, settings: GateSettings) -> None:
    for name in ("preemptions", "delay_ns", "held_ns", "unseen_ns", "freed_ns"):
        setattr(online.book, name, plausible(getattr(saved, name), LONGEST_NS))
    online.unjudged(now_ns, 0)  # a predecessor judged it
    online.said = Said(slo=saved.slo, grant=saved.grant, share_weights=saved.share_weights)
    past = online.past_requests
    past.ended, past.most = saved.requests, saved.most_preempted
    if len(saved.preempted) == len(past.histogram):
        past.histogram = list(saved.preempted)
    for one in saved.told:
        process = ProcessId(pid=one.pid, start_time=one.start_time)
        online.left[process, Role(one.role)] = RequestTally.resumed(one.started, one.ended, one.open_hits)
    if saved.cooldown is not None:
        mark_ns, age_ns, gaps = (plausible(number, LONGEST_NS) for number in saved.cooldown)
        online.cooldown_state = CooldownState(mark_ns=mark_ns, age_ns=age_ns, seen_ns=now_ns, gaps=gaps)
    online.read_cooldown(settings.cooldown)
    if saved.breaker is not None:
        online.breaker = resumed(*saved.breaker, now_ns, settings.breaker)


def _channel(saved: SavedChannel) -> ChannelRef:
    fields = {name: getattr(saved, name) for name in SavedChannel.__struct_fields__}
    return ChannelRef(**{**fields, "gpu": GpuIndex(saved.gpu)})
