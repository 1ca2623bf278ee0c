"""Passes changes in one room of valved on to the rooms above it: each method shows the parts it calls, in their order.

The KV room has a listener of its own, kv/service.py, and reports nothing further up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from valved.abi.link import Feature, Packet
from valved.clients.register import ClientsListener, Register
from valved.clients.sharing import SharedWeights
from valved.fds import is_scarce
from valved.gate.freeze import Ladder
from valved.gate.granting import Granting
from valved.gate.listener import GateListener
from valved.machine.ports import PromptPort
from valved.machine.stamps import Stamp
from valved.model.consent import Said
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, Role
from valved.node.api import Node
from valved.node.handover import Handover
from valved.node.kv import Kv
from valved.node.leaving import Leaving
from valved.state import pending
from valved.state.journal import Journal
from valved.state.pending import PendingClaim
from valved.state.registry import Books, ClientEntry

FREEZE_NS = 20_000_000  # a stop that failed waits no longer for a file
WRITTEN_NS = 1_000_000_000


class GateNews(GateListener):
    def __init__(
        self,
        books: Books,
        register: Register,
        ladder: Ladder,
        granting: Granting,
        sharing: SharedWeights,
        handover: Handover,
        kv: Kv | None,
        leaving: Leaving,
    ) -> None:
        self._leaving = leaving
        self._books = books
        self._revision = -1  # of the books, when the parts below last got them
        self._channels = register.channels
        self._ladder = ladder
        self._granting = granting
        self._sharing = sharing
        self._handover = handover
        self._kv = kv

    def drained(self) -> None:
        try:
            self.opened()
        finally:  # a reclaim waits for this stop, also if `opened` fails
            if self._kv is not None:
                self._kv.turn.gate_drained()

    def opened(self) -> None:
        try:
            self._channels.schedules.release()
        finally:  # also if an answer fails: else processes would stay frozen
            self._ladder.thaw()

    def stop_failed(self, stamp: Stamp) -> None:
        self._ladder.gate_failed(stamp)

    def breaker_tripped(self) -> None:
        self._handover.save_soon()

    def standing_changed(self) -> None:
        self._channels.lease.refresh()

    def clients_changed(self) -> None:
        self._revision = -1  # `time_passed` does all of this again: it may fail half way
        try:
            self.places_changed()
        finally:  # also if the above fails: no file may name a consent that was taken back
            self._sharing.refresh()

    def places_changed(self) -> None:
        self._granting.refresh()

    def client_ends(self, client: ClientEntry, number: int) -> None:
        """The signal that valved sent gives no status that anybody waits for: such a process runs no more."""
        self._ladder.end_of_signal(client, number, by_itself=not self._leaving.has_asked(client.process))

    def channel_came(self, client: ClientEntry, channel: ChannelRef) -> None:
        self._granting.channel_came(client, channel)

    def channel_gone(self, client: ClientEntry, channel: ChannelRef) -> None:
        self._granting.slices.gone(client.id, channel)

    def time_passed(self) -> None:
        revision = self._books.revision
        if revision != self._revision or self._granting.is_behind or self._sharing.is_behind:
            self.clients_changed()
            self._revision = revision

    def about_to_freeze(self, then: Callable[[], None]) -> None:
        try:
            self._handover.save()
        except Exception:  # the process must be stopped all the same; the next writing of the file reports the failure
            self._handover.save_soon()
        self._handover.when_saved(lambda _: then(), FREEZE_NS)

    def frozen_changed(self) -> None:
        self._handover.save_soon()


class ClientsNews(ClientsListener):
    def __init__(
        self, handover: Handover, node: Node, journal: Journal, run_dir: Path, files: PromptPort, kv: Kv | None
    ) -> None:
        self._files = files
        self._taken: dict[str, PendingClaim] = {}  # whose files stay until the state file has the claims
        self._handover = handover
        self._kv = kv.service if kv is not None else None
        self._node = node
        self._journal = journal
        self._run_dir = run_dir

    def features(self) -> Feature:
        return self._kv.features if self._kv is not None else super().features()

    def client_joined(self, entry: ClientEntry) -> None:
        if self._kv is not None:
            self._kv.client_joined(entry)

    def client_left(self, entry: ClientEntry, *, is_dead: bool) -> None:
        if self._kv is not None:
            self._kv.client_left(entry, is_dead=is_dead)

    def kv_packet(self, entry: ClientEntry, packet: Packet, fds: list[int]) -> None:
        if self._kv is not None:
            self._kv.handle(entry, packet, fds)
        else:
            super().kv_packet(entry, packet, fds)

    def books_changed(self) -> None:
        self._handover.save_soon()

    def channel_comes(self, entry: ClientEntry, channel: ChannelRef) -> None:
        self._handover.note_channel(entry, channel)

    def someone_knocks(self) -> None:
        """Take up what `valve run --online` left while no valved answered."""
        try:
            found = self._files.do(partial(pending.read, self._run_dir))
        except OSError:  # at the next knock
            return
        self._taken = {name: claim for name, claim in found if self._taken.get(name) == claim}
        for name, claim in found:
            if name not in self._taken and not self._take(claim):
                break  # for want of a descriptor: it stays in the folder
            self._taken[name] = claim
        if self._taken:
            self._handover.when_saved(partial(self._drop, tuple(self._taken)), WRITTEN_NS)

    def _drop(self, names: tuple[str, ...], is_saved: bool) -> None:
        for name in names if is_saved else ():
            with contextlib.suppress(OSError):
                self._files.do(partial(pending.drop, self._run_dir, name))

    def _take(self, claim: PendingClaim) -> bool:
        try:
            said = Said(slo=claim.slo, grant=claim.grant, share_weights=claim.share_weights)
            self._node.launch(claim.pid, claim.start_time, Role.ONLINE, claim.name, said)
        except Exception as error:  # one bad claim must not keep the others from joining
            if isinstance(error, OSError) and is_scarce(error):
                return False
            text = f"claim of process {claim.pid}, left while no valved answered: {error}"
            self._journal.emit(EventKind.NOTED, reason=text)
        return True
