"""What welcomed clients say: their RM clients, channels, schedule calls and notes.

Each message is answered at once except SCHEDULE_WAIT while a GPU of the client is gated: that ioctl would enable the
channels again, so its ACK is held until the GPU opens. A hold longer than `schedule_hold_s` is answered with EAGAIN and
the shim asks again. SCHEDULE_DONE closes the race of a gate that falls between the ACK and the ioctl: the channels are
stopped once more.

A channel counts once its sender has shown the file of its RM client (clients/possession.py), and while no other
client has told of it. One that is refused is in no book, and the answer says no more than that it is refused.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from valved.abi.link import Ack, Body, Channel, LinkType, Malformed, Note, NoteMessage, Packet, RmClient, Schedule
from valved.clients.leftovers import Leftovers
from valved.clients.possession import Possession
from valved.config import LinkTable, QuotaTable
from valved.gate.accounts import Harvest
from valved.gate.wake import GateService
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import GatePort, ProverPort
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.state.journal import Journal
from valved.state.registry import GUARD_SERVICE, Books, ClientEntry

SECOND_NS = 1_000_000_000
NO_UUID = bytes(16)
HELD_PER_CLIENT = 64  # twice the threads of one shim that can wait at once
Send = Callable[[ClientId, LinkType, Body, int], object]  # to a client, if it is still connected


@dataclass(slots=True, kw_only=True)
class HeldSchedule:
    client: ClientId
    seq: int
    gpus: frozenset[GpuIndex]
    timer: TimerHandle


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
    ) -> None:
        self._is_closed = False  # the brake holds every GPU
        self.possession = Possession(prover, clock, quota.channels_per_client)
        self.possession.on_proof = self._owner_found
        self.harvest = Harvest(gating.gpus)
        self.leftovers = Leftovers()
        self.changed: Callable[[], None] = lambda: None  # the books changed: save them soon
        self._gate = gate
        self._books = books
        self._gating = gating
        self._journal = journal
        self._clock = clock
        self._quota = quota
        self._link = link
        self._send = send
        self._held: dict[ClientId, dict[int, HeldSchedule]] = {}  # by number of the request, oldest first
        self._infos = {info.index: info for info in gate.gpus()}
        self._by_uuid = {info.uuid: info.index for info in gate.gpus()}
        self._by_instance = {info.device_instance: info.index for info in gate.gpus()}
        gating.after_wake.append(self.release_schedules)

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
                self._channel_del(entry, (body.h_client, body.h_channel))
            case Schedule() if packet.type is LinkType.SCHEDULE_WAIT:
                self._schedule_wait(entry, packet.seq, body)
            case Schedule():
                self._schedule_done(entry, body)
            case NoteMessage():
                self._note(entry, body)
            case _:
                raise Malformed(f"{packet.type.name} from a client that was promised no such thing")

    def _ack(self, client: ClientId, seq: int, status: int = 0, *, want_fd: bool = False) -> None:
        self._send(client, LinkType.ACK, Ack(status=status, want_fd=want_fd), seq)

    def _find_gpu(self, uuid: bytes, device_instance: int) -> GpuIndex | None:
        return self._by_instance.get(device_instance) if uuid == NO_UUID else self._by_uuid.get(uuid)

    def _rm_client(self, entry: ClientEntry, seq: int, body: RmClient, fds: list[int]) -> None:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return
        if entry.role is Role.OFFLINE:
            self._gate.give_rm_client(entry.id, gpu, body.h_client, body.h_device, body.h_subdevice, -1)
        if len(entry.rm_gpus) < self._quota.channels_per_client:
            entry.rm_gpus[body.h_client] = gpu
        if fds:
            keep = entry.role is Role.OFFLINE and entry.asked_fd
            take = partial(self._take_fd, entry, gpu, body) if keep else None
            self.possession.offer(entry.id, self._infos[gpu], body.h_client, body.h_subdevice, fds.pop(), take)
            self._ack(entry.id, seq)
        else:  # a shim of 0.1 sends it when it is asked, and only once: then it is kept
            is_missing = not self.possession.is_proven(entry.id, body.h_client, gpu)
            entry.asked_fd |= is_missing
            self._ack(entry.id, seq, want_fd=is_missing)

    def _take_fd(self, entry: ClientEntry, gpu: GpuIndex, body: RmClient, fd: int) -> None:
        """For the rung channel-fd: its file was found to be what its sender says."""
        self._gate.give_rm_client(entry.id, gpu, body.h_client, body.h_device, body.h_subdevice, fd)

    def _channel_add(self, entry: ClientEntry, seq: int, body: Channel) -> None:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        key = (body.h_client, body.h_channel)
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return
        told = len(entry.channels) + self.possession.waiting(entry.id)
        if key not in entry.channels and told >= self._quota.channels_per_client:
            self._gating.counters.refuse("channels")
            self._ack(entry.id, seq, errno.ENOSPC)
            return
        channel = ChannelRef(
            gpu=gpu,
            h_client=body.h_client,
            h_channel=body.h_channel,
            cid=body.cid,
            h_tsg=body.h_tsg,
            engine=body.engine,
            compute=body.compute,
        )
        if self.possession.is_proven(entry.id, body.h_client, gpu):
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

    def _admit(self, entry: ClientEntry, seq: int, channel: ChannelRef) -> None:
        """The channel's RM client is its sender's own."""
        status, want_fd = 0, False
        if entry.role is Role.OFFLINE:
            if self._is_anothers(entry, channel):
                self._refuse(entry, seq, "foreign")
                return
            armed = self._arm(entry, channel)
            if armed is None:
                self._forget_channel(entry, (channel.h_client, channel.h_channel))
                self._refuse(entry, seq, "unknown")
                return
            status, want_fd = armed
        self._book(entry, channel, status)
        entry.asked_fd |= want_fd
        self._ack(entry.id, seq, status, want_fd=want_fd)

    def _is_anothers(self, entry: ClientEntry, channel: ChannelRef) -> bool:
        """Told of by somebody else who lives: a number that came again, or an inherited file."""
        holders = self._books.holders.get((channel.h_client, channel.h_channel), set())
        owners = self.possession.owners(channel.h_client)
        return not holders <= {entry.id} or any(self._books.clients[owner].role is not Role.OFFLINE for owner in owners)

    def _owner_found(self, client: ClientId, h_client: int) -> None:
        """An online process has shown an RM client: whoever else told of its channels is to stop none of them."""
        if self._books.clients[client].role is Role.OFFLINE:
            return
        for other in self.possession.owners(h_client):
            entry = self._books.clients[other]
            if entry.role is not Role.OFFLINE:
                continue
            self.possession.revoke(other, h_client)
            mine = [channel for key, channel in entry.channels.items() if key[0] == h_client]
            for channel in mine:
                self._forget_channel(entry, (channel.h_client, channel.h_channel))
                self._gating.counters.refuse("foreign")
            self._gate.enable_foreign(mine)

    def _book(self, entry: ClientEntry, channel: ChannelRef, status: int) -> None:
        if self._books.put_channel(entry, channel):
            self.gpus_changed(entry.service)
        elif entry.role is Role.OFFLINE:
            self._count_offline(entry.service, channel.gpu)
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
        self.changed()

    def _arm(self, entry: ClientEntry, channel: ChannelRef) -> tuple[int, bool] | None:
        """Status and whether the client's file is wanted. None: the driver knows no such channel."""
        armed = self._gate.add_channel(entry.id, channel)
        if not armed.is_known:
            return None
        if self.leftovers.take(channel) and not armed.gated:
            self._gate.enable_foreign([channel])
        if armed.status and armed.reach is Reach.NONE and not armed.want_fd:
            self._gating.counters.refuse("unreachable")
            return errno.EOPNOTSUPP, False
        return 0, armed.want_fd

    def _channel_del(self, entry: ClientEntry, key: tuple[int, int]) -> None:
        self.possession.forget_channel(entry.id, *key)
        self._forget_channel(entry, key)

    def _forget_channel(self, entry: ClientEntry, key: tuple[int, int]) -> None:
        channel = entry.channels.get(key)
        if channel is None:
            return
        if entry.role is Role.OFFLINE:
            self._gate.remove_channel(entry.id, *key)
        entry.app_disabled.discard(key)
        if self._books.drop_channel(entry, key):
            self.gpus_changed(entry.service)
        elif entry.role is Role.OFFLINE:
            self._count_offline(entry.service, channel.gpu)
        self._journal.emit(
            EventKind.CHANNEL_GONE,
            service=entry.service,
            client=entry.id,
            gpus=(channel.gpu,),
            h_client=key[0],
            h_channel=key[1],
        )
        self.changed()

    def gpus_changed(self, service: ServiceId) -> None:
        """The set of GPUs of a service changed: gate domain, presence of offline work, lease flags."""
        entry = self._books.services[service]
        if service in self._gating.online:
            self._gating.set_gpus(service, entry.gpus)
        elif entry.role is Role.OFFLINE:
            for gpu in self._gating.gpus:
                self._count_offline(service, gpu)
        self.refresh_lease_flags()

    def _count_offline(self, service: ServiceId, gpu: GpuIndex) -> None:
        self._gating.set_offline_channels(gpu, self._books.offline_channels(gpu))
        self.harvest.present(service, gpu, self._books.services[service].compute_on[gpu] > 0, self._clock.now_ns())

    def set_closed(self, is_closed: bool) -> None:
        """Whether the brake holds every GPU."""
        self._is_closed = is_closed
        self.refresh_lease_flags()

    def refresh_lease_flags(self) -> None:
        """Tell each offline client whether it must stop itself if valved dies: if online work shares a GPU with it, or
        may do so unseen (the guard), or the brake stops it."""
        services = self._books.services
        shared = frozenset().union(*(services[online].gpus for online in self._gating.online if online in services))
        shared |= {gpu for gpu, account in self._gating.gpus.items() if GUARD_SERVICE in account.holders}
        for entry in self._books.with_role(Role.OFFLINE):
            flag = self._is_closed or not shared.isdisjoint(services[entry.service].gpus)
            if entry.lease_flag is not flag:
                entry.lease_flag = flag
                self._gate.set_online_registered(entry.id, flag)

    # SCHEDULE calls of the application

    def _schedule_wait(self, entry: ClientEntry, seq: int, body: Schedule) -> None:
        gpus = self._gated_gpus(entry, body.h_client)
        if not gpus or entry.role is not Role.OFFLINE:
            self._ack(entry.id, seq)
            return
        mine = self._held.setdefault(entry.id, {})
        if seq in mine:
            self._let_go(mine[seq], None)
        elif len(mine) >= HELD_PER_CLIENT:
            self._let_go(next(iter(mine.values())), errno.EAGAIN)
        until_ns = self._clock.now_ns() + round(self._link.schedule_hold_s * SECOND_NS)
        timer = self._clock.call_at_ns(until_ns, lambda: self._let_go(held, errno.EAGAIN))
        held = HeldSchedule(client=entry.id, seq=seq, gpus=gpus, timer=timer)
        self._held.setdefault(entry.id, {})[seq] = held
        self._gating.want_prompt("schedules", True)

    def _gated_gpus(self, entry: ClientEntry, h_client: int) -> frozenset[GpuIndex]:
        """Gated GPUs that this call may concern: the one of its RM client if known, else all of the process."""
        known = entry.rm_gpus.get(h_client)
        of_channels = {channel.gpu for key, channel in entry.channels.items() if key[0] == h_client}
        gpus = of_channels or ({known} if known is not None else entry.gpus())
        return frozenset(gpu for gpu in gpus if self._gating.is_stopped(gpu))

    def release_schedules(self) -> None:
        for held in [held for mine in self._held.values() for held in mine.values()]:
            if not any(self._gating.is_stopped(gpu) for gpu in held.gpus):
                self._let_go(held, 0)

    def _let_go(self, held: HeldSchedule, status: int | None) -> None:
        held.timer.cancel()
        del self._held[held.client][held.seq]
        if not self._held[held.client]:
            del self._held[held.client]
        self._gating.want_prompt("schedules", bool(self._held))
        if status is not None:
            self._ack(held.client, held.seq, status)

    def forget(self, client: ClientId) -> None:
        """The client is gone: nobody waits for the answers."""
        self.possession.forget(client)
        for held in list(self._held.get(client, {}).values()):
            self._let_go(held, None)

    def _schedule_done(self, entry: ClientEntry, body: Schedule) -> None:
        for key in list(entry.app_disabled):
            if key[0] == body.h_client and body.h_object in (key[1], entry.channels[key].h_tsg):
                self._app_switched(entry, key, disabled=False)  # a SCHEDULE enables what a disable had stopped
        if entry.role is Role.OFFLINE and self._gated_gpus(entry, body.h_client):
            self._gate.stop_again(entry.id, body.h_client)

    # Notes

    def _note(self, entry: ClientEntry, body: NoteMessage) -> None:
        if body.code in (Note.APP_DISABLED, Note.APP_ENABLED) and entry.role is Role.OFFLINE:
            self._app_switched(entry, (body.h_client, body.h_channel), body.code == Note.APP_DISABLED)
            return
        name = Note(body.code).name.lower().replace("_", "-") if body.code in set(Note) else f"note-{body.code}"
        text = f"{name}: {body.text}" if body.text else name
        if body.code == Note.MPS and entry.role is Role.OFFLINE and not entry.uses_mps:
            entry.uses_mps = True
            self._gate.give_up(entry.id, "the process is an MPS client: its channels are the server's, and others' too")
        if len(entry.notes) >= self._quota.notes_per_client or text in entry.notes:
            return
        entry.notes.append(text)
        self._journal.emit(EventKind.NOTED, service=entry.service, client=entry.id, reason=text, pid=entry.process.pid)

    def _app_switched(self, entry: ClientEntry, key: tuple[int, int], disabled: bool) -> None:
        """The application switched a channel itself: from now on that is its business."""
        if key not in entry.channels:
            return
        self._gate.note_app_disabled(entry.id, *key, disabled)
        if disabled:
            entry.app_disabled.add(key)
        else:
            entry.app_disabled.discard(key)
        self.changed()
