"""A GatePort without C: the contract of machine/ports.py on virtual time, for tests of the services.

Tests play the clients: `launch` counts and rings as a shim would, `finish` is the watcher's proof.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

from lent_fds import lend
from valve_tools.bench.waking import ClientPages, PolicyWaker

from valved.machine.ports import ArmResult, ClientFds, ClientView, Gap, GpuInfo, Grants, LeftOff, WakeOutcome
from valved.machine.stamps import Stamp, StampKind, Stamps
from valved.model.ids import GpuIndex, Reach, Role

OPEN_NS = 200_000  # a wake returns before the driver has enabled the channels
STOP_NS = 400_000  # launch to channels off on one GPU, as the paper measures it
EMPTY = ClientView.untouched(is_filled=True)


@dataclasses.dataclass
class Service:
    waker: PolicyWaker
    gpus: frozenset = frozenset()
    epoch: int = 0  # even: holds

    @property
    def holds(self):
        return self.epoch % 2 == 0


@dataclasses.dataclass
class Client:
    role: Role
    service: int
    fds: ClientFds
    view: ClientView = EMPTY
    channels: dict = dataclasses.field(default_factory=dict)
    app_disabled: set = dataclasses.field(default_factory=set)
    watch: bool = False
    pending_proof: bool = False
    online_registered: bool | None = None
    hints: bool = False
    at_once: bool = False

    @property
    def is_hinting(self):
        return bool(self.view.hint_ns) if self.role is Role.ONLINE else self.hints


class FakeGrants:
    """What it was told, and what a test says that came of it."""

    def __init__(self):
        self.grantable, self.consents, self.offers, self.given = frozenset(), {}, {}, {}
        self.sliceable = (False, frozenset())
        self.steps = {}
        self.fileless, self.shortened, self.slice_refusal = set(), [], ""

    def consent(self, service, most_ns, rest_ns):
        self.consents[service] = (most_ns, rest_ns)

    def set_grantable(self, gpus):
        self.grantable = gpus

    def set_sliceable(self, on, gpus):
        self.sliceable = (on, gpus)

    def step(self, client):
        return self.steps.get(client, (0, 0))

    def has_file(self, client, h_client):
        return client not in self.fileless

    def shorten(self, client, channel, us):
        self.shortened.append((client, channel.h_client, channel.h_tsg, us))
        return self.slice_refusal

    def offer(self, client, tpot_ns, gap_ns):
        self.offers[client] = (tpot_ns, gap_ns)

    def grants(self, service):
        return self.given.get(service, Grants())


class FakeGate:
    def __init__(self, clock, gpus=2):
        self.granting, self.channels = FakeGrants(), self
        self.clock = clock
        self.services = {}
        self.clients = {}
        self._applied = None  # GPUs whose channels are off
        self.off = {}  # (h_client, h_channel) -> ChannelRef
        self.stops = {}  # GPU -> when its channels are off after a hold
        self.deaf = set()  # GPUs that never stop
        self.failing = set()  # GPUs whose last disable failed
        self.launches_held = set()
        self.let_gpus = frozenset()  # held, and on all the same
        self.kept = {}  # client -> what it must leave free of each GPU
        self.free = {}  # client -> free bytes of each GPU, as it was told
        self.memory = {}  # client -> what set_memory was last told
        self.opening = {}  # GPU -> until when its channels are still off after a wake
        self.foreign_enabled = []
        self.switches_all = False  # of a client that had stopped itself
        self.out_of_reach = False  # it can enable no leftover
        self.refuses = False  # the driver, to enable one at once
        self.hangs = False  # the driver
        self.left_behind = set()  # clients that left meanwhile
        self.foreign_known = None  # what enable_foreign says; None: all of them
        self.stamps, self.lost = [], 0
        self.closed = False
        self.on_stamps = lambda: None
        self.between = lambda: None  # a wake was opened, counters not re-read yet
        self.next_arm = None  # an ArmResult to hand out instead
        self.create_error = None
        self.calls = []
        self._infos = [
            GpuInfo(
                index=GpuIndex(i),
                minor=i,
                gpu_id=0x100 + i,
                device_instance=i,
                uuid=bytes([i + 1]) * 16,
                name="Fake",
                total_bytes=1 << 30,
            )
            for i in range(gpus)
        ]

    # What clients do

    def launch(self, client, count=1):
        """A launch: counted, then the gate word is read; an odd one rings."""
        entry = self.clients[client]
        now = self.clock.now_ns()
        self._note_gap(entry, now)
        entry.view = dataclasses.replace(entry.view, submitted=entry.view.submitted + count, busy=True)
        entry.pending_proof = False
        service = self.services[entry.service]
        if service.holds:
            return False
        entry.view = dataclasses.replace(entry.view, launch_ns=now, rings=entry.view.rings + 1)
        self._take_hold(entry.service, client, now)
        return True

    def _note_gap(self, entry, now):
        if entry.watch and entry.view.is_idle and entry.view.idle_ns:
            gap = Gap(end_ns=now, gap_ns=now - entry.view.idle_ns)
            entry.view = dataclasses.replace(entry.view, gaps=(*entry.view.gaps, gap)[-64:])

    def finish(self, client):
        """The watcher proves everything done, if it was asked to watch; else as soon as it is."""
        now, entry = self.clock.now_ns(), self.clients[client]
        if not entry.watch:
            entry.pending_proof = True
            return
        entry.view = dataclasses.replace(
            entry.view, idle_submitted=entry.view.submitted, idle_ns=now, watcher_ns=now, busy=False
        )

    def beat(self, client):
        self.clients[client].view = dataclasses.replace(self.clients[client].view, watcher_ns=self.clock.now_ns())

    def hint(self, client, started, ended, tokens=0):
        self.clients[client].view = dataclasses.replace(
            self.clients[client].view,
            open_requests=started - ended,
            hint_ns=self.clock.now_ns(),
            requests_started=started,
            requests_ended=ended,
            useful_tokens=tokens,
        )

    # GatePort

    def gpus(self):
        return self._infos

    def driver_version(self):
        return "580.159.04"

    def create_client(self, client, role, service, *, at_once=False):
        if self.create_error:
            raise self.create_error
        fds = ClientFds(*(), **{name: lend() for name in ("control", "region", "doorbell", "order")})
        if role is not Role.OFFLINE:
            self._service(service)
        self.clients[client] = Client(role=role, service=service, fds=fds, at_once=at_once)
        return fds

    def remove_client(self, client, *, lives_on=False):
        entry = self.clients.pop(client)
        for fd in dataclasses.astuple(entry.fds):
            os.close(fd)
        was_off = tuple(ref for key, ref in entry.channels.items() if key in self.off)
        for ref in () if lives_on else was_off:
            del self.off[ref.h_client, ref.h_channel]
        self.calls.append(("remove_client", client))
        self.left_behind |= {client} if self.hangs else set()
        return was_off

    def put_service(self, service, gpus):
        before = {gpu for gpu in gpus if self._is_held(gpu)}
        entry = self._service(service)
        if gpus != entry.gpus:
            entry.waker.permit(None)
            if not entry.holds:
                self._take_hold(service, 0, 0)
            entry.gpus = gpus
        self._stopping(set(gpus) - before)
        self._apply()

    def _stopping(self, gpus):
        """Channels on these go off STOP_NS from now."""
        for gpu in gpus:
            self.calls.append(("stop", gpu))
            self.failing.discard(gpu)
            self.stops[gpu] = self.clock.now_ns() + (STOP_NS if self._channels_on(gpu) else 0)
            self.clock.call_at_ns(self.stops[gpu], self.on_stamps)

    def _service(self, service):
        if service not in self.services:
            waker = PolicyWaker(
                self.clock,
                partial(self._members, service),
                lambda: self._try_wake(service),
                lambda: self._stamp(StampKind.LEARN, service, 0),
            )
            self.services[service] = Service(waker)
        return self.services[service]

    def _members(self, service):
        return [
            ClientPages(entry.view, is_launcher=entry.role is Role.ONLINE, is_hinting=entry.is_hinting)
            for entry in self.clients.values()
            if entry.service == service and entry.role is not Role.OFFLINE
        ]

    def permit(self, service, rule):
        self.services[service].waker.permit(rule)

    def look(self, service):
        return self.services[service].waker.look()

    def set_prompt(self, on):
        self.is_prompt = on

    def set_hints(self, client):
        self.clients[client].hints = True

    def remove_service(self, service):
        members = [
            c for c, entry in self.clients.items() if entry.service == service and entry.role is not Role.OFFLINE
        ]
        assert not members, f"service {service} still has clients"
        if (gone := self.services.pop(service, None)) is not None:
            gone.waker.permit(None)
        self._apply()

    def hold(self, service, reason):
        self.services[service].waker.permit(None)
        if not self.services[service].holds:
            self._take_hold(service, 0, 0)

    def wake(self, service):
        self.services[service].waker.permit(None)
        return self._try_wake(service)

    def _try_wake(self, service):
        entry = self.services[service]
        if not entry.holds:
            return WakeOutcome.NOT_HOLDING
        entry.epoch += 1
        self.between()
        members = [c for c in self.clients.values() if c.service == service and c.role is Role.ONLINE]
        if not entry.holds and all(member.view.is_idle for member in members):
            self.opening.update({gpu: self.clock.now_ns() + OPEN_NS for gpu in entry.gpus if not self._is_held(gpu)})
            self._apply()
            entry.waker.opened()
            look = entry.waker.look()
            self._stamp(StampKind.WAKE, service, 0, epoch=entry.epoch, channels=look.leaked, status=look.reason)
            return WakeOutcome.WOKEN
        if not entry.holds:
            entry.epoch += 1
        self._apply()
        self._stamp(StampKind.WAKE_REFUSED, service, 0, epoch=entry.epoch)
        return WakeOutcome.REFUSED

    def add_channel(self, client, channel):
        self.calls.append(("add_channel", channel.h_channel))
        if self.next_arm is not None:
            result, self.next_arm = self.next_arm, None
            return result
        entry, key = self.clients[client], (channel.h_client, channel.h_channel)
        entry.channels[key] = channel
        self._switch(entry, key, channel, {channel.gpu} if self._is_held(channel.gpu) else set())
        return ArmResult(status=0, reach=Reach.CHANNEL_OWN, want_fd=False, gated=self.is_gated(channel.gpu))

    def remove_channel(self, client, h_client, h_channel):
        self.clients[client].channels.pop((h_client, h_channel), None)
        self.off.pop((h_client, h_channel), None)

    def stop_again(self, client, h_client):
        self.calls.append(("stop_again", h_client))
        entry = self.clients[client]
        for key, ref in entry.channels.items():
            if key[0] == h_client and self._is_held(ref.gpu):
                self._switch(entry, key, ref, {ref.gpu})

    def switches(self, client):
        return self.switches_all

    def run_again(self, client):
        self.calls.append(("run_again", client))

    def give_up(self, client, why):
        self.calls.append(("give_up", client))
        for key in self.clients[client].channels:
            self.off.pop(key, None)
        self.clients[client].app_disabled.update(self.clients[client].channels)

    def give_rm_client(self, client, gpu, h_client, h_device, h_subdevice, fd):
        if fd >= 0:
            self.calls.append(("give_rm_client", h_client, fd))
            os.close(fd)

    def note_app_disabled(self, client, h_client, h_channel, disabled):
        switched = self.clients[client].app_disabled
        key = (h_client, h_channel)
        (switched.add if disabled else switched.discard)(key)
        channel = self.clients[client].channels[key]
        self._switch(self.clients[client], key, channel, {channel.gpu} if self._is_held(channel.gpu) else set())

    def view(self, client, *, with_gaps=False):
        entry = self.clients[client]
        rest = dataclasses.replace(entry.view, gaps=())
        if not with_gaps:
            return rest
        view, entry.view = entry.view, rest
        return view

    def is_gated(self, gpu):
        return self._is_held(gpu) or self.opening.get(gpu, 0) > self.clock.now_ns()

    def is_stopped(self, gpu):
        return (
            self._is_held(gpu) and gpu not in self.deaf | self.failing and self.clock.now_ns() >= self.stops.get(gpu, 0)
        )

    def is_turning(self):
        return any(self._is_held(gpu) and self.clock.now_ns() < at for gpu, at in self.stops.items())

    def set_memory(self, client, handle_bytes, budget_bytes, size_rule_bytes):
        self.memory[client] = (handle_bytes, budget_bytes, size_rule_bytes)

    def set_free(self, client, figures):
        self.free[client] = {gpu: free for gpu, (free, _) in figures.items()}
        self.kept[client] = {gpu: keep for gpu, (_, keep) in figures.items()}

    def hold_launches(self, client, on):
        (self.launches_held.add if on else self.launches_held.discard)(client)

    def _is_held(self, gpu):
        if gpu in self.let_gpus:
            return False
        return any(s.holds and gpu in s.gpus for s in self.services.values())

    def reach(self, gpu):
        return Reach.CHANNEL_OWN, ""

    def set_watch(self, client, on):
        entry = self.clients[client]
        entry.watch = on
        if on and entry.pending_proof:
            entry.pending_proof = False
            self.finish(client)

    def set_online_registered(self, client, on):
        self.clients[client].online_registered = on

    def let(self, gpus):
        ended, self.let_gpus = self.let_gpus - gpus, gpus
        self._apply()
        self._stopping({gpu for gpu in ended if self._is_held(gpu)})

    def enable_unless_held(self, channel):
        if self.out_of_reach or self._is_held(channel.gpu):
            return LeftOff.OUT_OF_REACH if self.out_of_reach else LeftOff.HELD
        return LeftOff.ENABLED if self.enable_foreign([channel]) else LeftOff.ENDED

    def enable_at_once(self, channel):
        if self.out_of_reach or self.refuses:
            return LeftOff.OUT_OF_REACH if self.out_of_reach else LeftOff.HELD
        return LeftOff.ENABLED if self.enable_foreign([channel]) else LeftOff.ENDED

    def enable_foreign(self, channels):
        self.foreign_enabled.extend(channels)
        for channel in channels:
            self.off.pop((channel.h_client, channel.h_channel), None)
        return len(channels) if self.foreign_known is None else self.foreign_known

    def turned_out_on(self):
        return set()

    def behind(self):
        return self.left_behind if self.hangs else set()

    def alive(self):
        self.calls.append(("alive",))

    def stamps_fd(self):
        return -1

    def drain_stamps(self):
        stamps, self.stamps = self.stamps, []
        return Stamps.packed(stamps)

    def stamps_lost(self):
        return self.lost

    def close(self):
        self.closed = True

    # Inside

    def _take_hold(self, service, client, launch_ns):
        entry = self.services[service]
        newly = [gpu for gpu in sorted(entry.gpus) if not self._is_held(gpu)]
        entry.epoch += 1
        entry.waker.held(launch_ns or self.clock.now_ns())
        counts = {gpu: self._channels_on(gpu) for gpu in newly}
        self._stopping(newly)
        self._apply()
        for gpu in newly:
            self._stamp(StampKind.GATE, service, client, launch_ns, gpu, entry.epoch, counts[gpu])
        if not newly:
            self._stamp(StampKind.HOLD, service, client, launch_ns, epoch=entry.epoch)

    def _channels_on(self, gpu):
        return sum(ref.gpu == gpu and ref.compute for c in self.clients.values() for ref in c.channels.values())

    def _apply(self):
        """Channels are off exactly where their GPU is gated and the application leaves them alone."""
        held = {info.index for info in self._infos if self._is_held(info.index)}
        if held == self._applied:
            return
        self._applied = held
        for client in self.clients.values():
            for key, ref in client.channels.items():
                self._switch(client, key, ref, held)

    def _switch(self, client, key, ref, held):
        if ref.gpu in held and ref.compute and key not in client.app_disabled:
            self.off[key] = ref
        else:
            self.off.pop(key, None)

    def _stamp(self, kind, service, client, launch_ns=0, gpu=0, epoch=0, channels=0, status=0):
        now = self.clock.now_ns()
        took = STOP_NS if kind is StampKind.GATE else 0
        tellers = [c for c, entry in self.clients.items() if entry.service == service and entry.is_hinting]
        told = self.clients[tellers[0]].view if len(tellers) == 1 else EMPTY
        self.stamps.append(
            Stamp(
                teller=tellers[0] if len(tellers) == 1 else 0,
                claims_started=told.requests_started,
                claims_ended=told.requests_ended,
                code=kind,
                service=service,
                client=client,
                gpu=GpuIndex(gpu),
                epoch=epoch,
                channels=channels,
                status=status,
                launch_ns=launch_ns,
                seen_ns=now,
                ioctl_ns=now,
                done_ns=now + took,
            )
        )
        self.clock.call_at_ns(now + took, self.on_stamps)

    def fail(self, gpu, service=0, status=0x65):
        """The driver refused a disable."""
        self.failing.add(gpu)
        self._stamp(StampKind.GATE_FAILED, service, 0, gpu=gpu, status=status)

    def come_back(self, gpu, service=0):
        """A disable that had been given up is carried out after all."""
        self.failing.discard(gpu)
        self._stamp(StampKind.GATE, service, 0, gpu=gpu)
