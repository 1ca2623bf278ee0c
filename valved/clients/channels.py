"""What welcomed clients say: their RM clients, channels, schedule calls and notes.

Each message is answered at once except SCHEDULE_WAIT while a GPU of the client is gated (clients/schedules.py).

A channel counts once its sender has shown the file of its RM client (clients/possession.py), and while no other
client has told of it. One that is refused is in no book, and the answer says no more than that it is refused.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from functools import partial

from valved.abi.link import (
    Ack,
    Body,
    Channel,
    EndingMessage,
    LinkType,
    Malformed,
    Note,
    NoteMessage,
    Packet,
    RmClient,
    Schedule,
)
from valved.clients.complaints import Complaints
from valved.clients.lease import LeaseFlags
from valved.clients.leftovers import Leftovers
from valved.clients.possession import Possession
from valved.clients.schedules import Schedules
from valved.config import LinkTable, QuotaTable
from valved.gate.accounts import Harvest
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, GpuInfo, ProverPort
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry

NO_UUID = bytes(16)
Send = Callable[[ClientId, LinkType, Body, int], object]  # to a client, if it is still connected
Comes = Callable[[ClientEntry, ChannelRef], None]  # before it can be switched off


class Cards:
    """The node's cards, and which of them a message means."""

    def __init__(self, infos: Iterable[GpuInfo]) -> None:
        self.infos = {info.index: info for info in infos}
        self._by_uuid = {info.uuid: info.index for info in self.infos.values()}
        self._by_instance = {info.device_instance: info.index for info in self.infos.values()}

    def find(self, body: RmClient | Channel) -> GpuIndex | None:
        uuid = body.gpu_uuid
        return self._by_instance.get(body.device_instance) if uuid == NO_UUID else self._by_uuid.get(uuid)


class Channels:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        gating: GateService,
        journal: Journal,
        clock: Clock,
        quota: QuotaTable,
        link: LinkTable,
        send: Send,
        prover: ProverPort,
        changed: Callable[[], None],
        comes: Comes,
        keeps_files: bool,
    ) -> None:
        self.possession = Possession(prover, clock, quota.channels_per_client, self._owner_found)
        self.harvest, self.leftovers = Harvest(gating.gpus), Leftovers()
        self.lease = LeaseFlags(gate, books, gating)
        self.keeps_files = keeps_files  # a rung of granted time needs the drivers' files of offline processes
        self._port = gate.channels
        self._books = books
        self._gating = gating
        self._journal, self._told = journal, Complaints(books, journal, clock)
        self._clock = clock
        self._quota = quota
        self._send = send
        self._changed = changed
        self._comes = comes
        self.schedules = Schedules(gate, books, gating, clock, link, self.possession, self._ack)
        self._cards = Cards(gate.gpus())

    def handle(self, client: ClientId, packet: Packet, fds: list[int]) -> None:
        """One message. A descriptor that is kept is taken off the list."""
        entry = self._books.clients[client]
        body = packet.body
        match body:
            case RmClient():
                self._rm_client(entry, packet.seq, body, fds)
            case Channel() if packet.type is LinkType.CHANNEL_ADD:
                self._channel_add(entry, packet.seq, body)
            case Channel():
                self.possession.forget_channel(entry.id, body.h_client, body.h_channel)
                self._forget_channel(entry, (body.h_client, body.h_channel))
            case Schedule() if packet.type is LinkType.SCHEDULE_WAIT:
                self.schedules.wait(entry, packet.seq, body)
            case Schedule():
                self._schedule_done(entry, body)
            case EndingMessage():
                self.schedules.ends(entry, packet.seq, body.signal)
            case NoteMessage():
                self._note(entry, body)
            case _:
                raise Malformed(f"{packet.type.name} from a client that did not agree on this feature")

    def _ack(self, client: ClientId, seq: int, status: int = 0, *, want_fd: bool = False) -> None:
        self._send(client, LinkType.ACK, Ack(status=status, want_fd=want_fd), seq)

    def _rm_client(self, entry: ClientEntry, seq: int, body: RmClient, fds: list[int]) -> None:
        gpu = self._cards.find(body)
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return
        give = partial(self._port.give_rm_client, entry.id, gpu, body.h_client, body.h_device, body.h_subdevice)
        if entry.role is Role.OFFLINE:
            give(-1)
        if len(entry.rm_gpus) < self._quota.channels_per_client:
            entry.rm_gpus[body.h_client] = gpu
        if fds:
            keep = entry.role is Role.OFFLINE and (entry.asked_fd or self.keeps_files)
            take = give if keep else None  # once it was found to be what its sender says
            self.possession.offer(entry, self._cards.infos[gpu], body, fds.pop(), take)
            self._ack(entry.id, seq)
        else:  # a shim of 0.1 sends it when it is asked, and only once: then it is kept
            is_missing = not self.possession.is_proven(entry.id, body.h_client, gpu)
            entry.asked_fd |= is_missing
            self._ack(entry.id, seq, want_fd=is_missing)

    def _channel_add(self, entry: ClientEntry, seq: int, body: Channel) -> None:
        gpu = self._cards.find(body)
        key = (body.h_client, body.h_channel)
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return
        told = len(entry.channels) + self.possession.waiting(entry.id)
        if key not in entry.channels and told >= self._quota.channels_per_client:
            self._gating.counters.refuse("channels")
            self._ack(entry.id, seq, errno.ENOSPC)
            return
        channel = _told(gpu, body)
        is_waiting = self.possession.is_waiting(entry.id, *key)  # the last that was said of it counts
        if self.possession.is_proven(entry.id, body.h_client, gpu) and not is_waiting:
            self._admit(entry, seq, channel)
        elif entry.role is Role.OFFLINE:
            late = partial(self._refuse, entry, seq, "unproven")
            self.possession.wait(entry.id, channel, partial(self._admit, entry, seq, channel), late)
        else:  # an online process tells and goes on
            self.possession.wait(entry.id, channel, partial(self._book, entry, channel, 0), None)
            self._ack(entry.id, seq, want_fd=not self.possession.is_offered(entry.id, body.h_client))

    def _refuse(self, entry: ClientEntry, seq: int, why: str) -> None:
        """One answer for every reason: what the driver knows of others is not to be had here."""
        self._gating.counters.refuse(why)
        self._ack(entry.id, seq, errno.EOPNOTSUPP)
        self.schedules.release()

    def _admit(self, entry: ClientEntry, seq: int, channel: ChannelRef) -> None:
        """The channel's RM client is its sender's own."""
        status, want_fd = 0, False
        if entry.role is Role.OFFLINE:
            key = (channel.h_client, channel.h_channel)
            for old in _old_links(entry, channel, self._books, self.leftovers):
                self._forget_channel(old, key)
            if _is_anothers(entry, channel, self._books, self.possession):
                self._refuse(entry, seq, "foreign")
                return
            known = entry.channels.get(key)
            if known is not None and known.gpu != channel.gpu:  # the number came again
                self._forget_channel(entry, key)
            self._comes(entry, channel)
            armed = self._arm(entry, channel)
            if armed is None:
                self._forget_channel(entry, key)
                self._refuse(entry, seq, "unknown")
                return
            status, want_fd = armed
        self._book(entry, channel, status)
        entry.asked_fd |= want_fd
        self._ack(entry.id, seq, status, want_fd=want_fd)
        self.schedules.release()

    def _owner_found(self, client: ClientId, h_client: int) -> None:
        """An online process has shown an RM client: no other client that reported its channels may stop them."""
        if self._books.clients[client].role is Role.OFFLINE:
            return
        for left in self.leftovers.take_where(lambda one: one.channel.h_client == h_client):
            self.leftovers.keep(left.channel, left.owner, self._port.enable_at_once(left.channel))
        for other in self.possession.owners(h_client):
            entry = self._books.clients[other]
            if entry.role is not Role.OFFLINE:
                continue
            self.possession.revoke(other, h_client)
            mine = [channel for key, channel in entry.channels.items() if key[0] == h_client]
            for channel in mine:
                self._forget_channel(entry, (channel.h_client, channel.h_channel))
                self._gating.counters.refuse("foreign")
            self._port.enable_foreign(mine)

    def _book(self, entry: ClientEntry, channel: ChannelRef, status: int) -> None:
        known = entry.channels.get((channel.h_client, channel.h_channel))
        if known not in (None, channel):  # the number came again
            self._gating.listener.channel_gone(entry, known)
        is_seen = channel.gpu in entry.channels_on
        self._counted(entry, channel, self._books.put_channel(entry, channel), is_news=not is_seen)
        self._journal.emit(
            EventKind.CHANNEL_ADDED,
            service=entry.service,
            client=entry.id,
            gpus=(channel.gpu,),
            h_client=channel.h_client,
            h_channel=channel.h_channel,
            compute=int(channel.compute),
            status=status,
        )
        self._changed()

    def _arm(self, entry: ClientEntry, channel: ChannelRef) -> tuple[int, bool] | None:
        """Status and whether the client's file is wanted. None: the driver knows no such channel."""
        armed = self._port.add_channel(entry.id, channel)
        if not armed.is_known:
            return None
        if self.leftovers.take(channel) and not armed.gated:
            self.leftovers.enable_reported(channel, entry.process, self._port, armed.reach)
        if armed.status and armed.reach is Reach.NONE and not armed.want_fd:
            self._gating.counters.refuse("unreachable")
            return errno.EOPNOTSUPP, False
        return 0, armed.want_fd

    def _forget_channel(self, entry: ClientEntry, key: tuple[int, int]) -> None:
        channel = entry.channels.get(key)
        if channel is None:
            return
        if entry.role is Role.OFFLINE:
            self._port.remove_channel(entry.id, *key)
        entry.app_disabled.discard(key)
        is_other = self._books.drop_channel(entry, key)
        self._gating.listener.channel_gone(entry, channel)
        self._counted(entry, channel, is_other, is_news=channel.gpu not in entry.channels_on)
        names = {"h_client": key[0], "h_channel": key[1]}
        self._journal.put(EventKind.CHANNEL_GONE, entry.service, entry.id, (channel.gpu,), "", 0, names)
        self._changed()

    def _counted(self, entry: ClientEntry, channel: ChannelRef, is_other: bool, *, is_news: bool) -> None:
        if is_other:
            self.gpus_changed(entry.service)
        elif entry.role is Role.OFFLINE:
            self._count_offline(entry.service, channel.gpu)
            if is_news:
                self._gating.listener.places_changed()
            elif (channel.h_client, channel.h_channel) in entry.channels:
                self._gating.listener.channel_came(entry, channel)

    def gpus_changed(self, service: ServiceId) -> None:
        """The set of GPUs of a service changed: gate domain, presence of offline work, lease flags."""
        entry = self._books.services[service]
        if service in self._gating.online:
            self._gating.set_gpus(service, entry.gpus)
        elif entry.role is Role.OFFLINE:
            for gpu in self._gating.gpus:
                self._count_offline(service, gpu)
            self._gating.listener.places_changed()
        self.lease.refresh()

    def _count_offline(self, service: ServiceId, gpu: GpuIndex) -> None:
        self._gating.set_offline_channels(gpu, self._books.offline_on[gpu])
        self.harvest.present(service, gpu, self._books.services[service].compute_on[gpu] > 0, self._clock.now_ns())

    def forget(self, client: ClientId) -> None:
        """The client is gone: it waits for no answers any more."""
        self.possession.forget(client)
        self.schedules.forget(client)

    def _schedule_done(self, entry: ClientEntry, body: Schedule) -> None:
        for key in list(entry.app_disabled):
            if key[0] == body.h_client and body.h_object in (key[1], entry.channels[key].h_tsg):
                self._app_switched(entry, key, disabled=False)  # a SCHEDULE enables what a disable had stopped
        self.schedules.done(entry, body)

    def _note(self, entry: ClientEntry, body: NoteMessage) -> None:
        if body.code in (Note.APP_DISABLED, Note.APP_ENABLED) and entry.role is Role.OFFLINE:
            self._app_switched(entry, (body.h_client, body.h_channel), body.code == Note.APP_DISABLED)
            return
        text = _text(body, is_beside_offline=any(self._books.with_role(Role.OFFLINE)))
        if body.code == Note.MPS and entry.role is Role.OFFLINE and not entry.uses_mps:
            self._books.note_mps(entry)
            self._port.give_up(entry.id, "the process is an MPS client: its channels are the server's, and others' too")
            self._gating.listener.places_changed()
        if not text or len(entry.notes) >= self._quota.notes_per_client or text in entry.notes:
            return
        entry.notes.append(text)
        self._told.tell(entry, text)

    def _app_switched(self, entry: ClientEntry, key: tuple[int, int], disabled: bool) -> None:
        """The application switched a channel itself: from now on that is its business."""
        if key not in entry.channels:
            return
        self._port.note_app_disabled(entry.id, *key, disabled)
        (entry.app_disabled.add if disabled else entry.app_disabled.discard)(key)
        self._books.touch()
        self._changed()


def _told(gpu: GpuIndex, body: Channel) -> ChannelRef:
    return ChannelRef(
        gpu=gpu,
        h_client=body.h_client,
        h_channel=body.h_channel,
        cid=body.cid,
        h_tsg=body.h_tsg,
        engine=body.engine,
        compute=body.compute,
    )


def _old_links(entry: ClientEntry, channel: ChannelRef, books: Books, leftovers: Leftovers) -> list[ClientEntry]:
    """Of the same process, with this channel: their ends may be read after what it tells on its new link. The channel
    may be off, so it is a leftover until it is armed anew."""
    key = (channel.h_client, channel.h_channel)
    mine = [books.clients[client] for client in books.holders.get(key, ()) if client != entry.id]
    mine = [old for old in mine if old.process == entry.process and old.role is Role.OFFLINE]
    if channel.compute and mine and not any(key in old.app_disabled for old in mine):
        leftovers.put(mine[0].channels[key], entry.process)
    return mine


def _is_anothers(entry: ClientEntry, channel: ChannelRef, books: Books, possession: Possession) -> bool:
    """Reported by another living client: a number that came again, or an inherited file."""
    holders = books.holders.get((channel.h_client, channel.h_channel), set())
    owners = possession.owners(channel.h_client)
    return not holders <= {entry.id} or any(books.clients[owner].role is not Role.OFFLINE for owner in owners)


def _text(body: NoteMessage, *, is_beside_offline: bool) -> str:
    """Empty: nobody need know. A service that finds no memory where no offline work is has itself to thank."""
    name = Note(body.code).name.lower().replace("_", "-") if body.code in set(Note) else f"note-{body.code}"
    if body.code == Note.NO_MEMORY:
        told = f"{name}: {body.text} while offline work was here: start services first, or a smaller job"
        return told if is_beside_offline else ""
    return f"{name}: {body.text}" if body.text else name
