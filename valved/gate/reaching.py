"""ChannelPort over the native gate: finds the way to stop each channel, and gives each issuer its list of channels.

A channel is reached by the best rung of the ladder that works for its RM client. A rung is tried before it is used. The
reason why a rung was not used is kept for `valve status`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from valve_abi import Feature

from valved.gate.armed import LADDER, LOSSES, ArmedChannel, ArmedChannels, GateClient, RmNumbers, entry_of, is_worse
from valved.gate.enabling import GONE, INVALID_CHANNEL, NOT_NOW, NOT_SUPPORTED, Enabling
from valved.gate.kept import KeptFiles
from valved.machine.ports import ArmResult
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach
from valved.model.statuses import status_text
from valved.native._gate import ffi, lib

_STOPPING = (lib.VALVE_GPU_STOPPED, lib.VALVE_GPU_STOPPING, lib.VALVE_GPU_FAILED)


class NativeChannels(Enabling):
    """`clients` and `infos` are the gate's own: its clients, and its cards."""

    def __init__(self, gate: Any, clients: Mapping[ClientId, GateClient], infos: Sequence[Any], refusal: str) -> None:
        self._gate = gate
        self._clients = clients
        self._infos = infos
        self._refusal = refusal
        self._channels = ArmedChannels()
        self.kept = KeptFiles(gate)
        self._reasons: dict[tuple[GpuIndex, Reach], str] = {}  # why a rung was last not used
        self._unsure: list[tuple[Any, set[ChannelRef], ClientId]] = []  # the first is the native side's to write
        self._view = ffi.new("struct valve_view *")
        self._gone = ffi.new("struct valve_gone[]", 128)

    def add_channel(self, client: ClientId, channel: ChannelRef) -> ArmResult:
        holder = self._clients[client]
        for _, refs, _ in self._unsure:
            refs.discard(channel)  # it is back
        if self._refusal or not 0 <= channel.gpu < len(self._infos):
            return ArmResult(status=0, reach=Reach.NONE, want_fd=False, gated=False)
        numbers = holder.rm_clients.setdefault(channel.h_client, RmNumbers())
        if holder.is_given_up:
            self._put(ArmedChannel(ref=channel, client=client, reach=Reach.NONE))
            return ArmResult(status=NOT_SUPPORTED, reach=Reach.NONE, want_fd=False, gated=False)
        self.kept.hand_on(channel, holder, numbers)
        self._forget_gone(channel.gpu)  # what it tells anew is not what ended
        known = self._channels.get(client, channel.h_client, channel.h_channel)
        is_off = known is not None and known.app_disabled and known.ref.cid == channel.cid
        entry = ArmedChannel(ref=channel, client=client, reach=numbers.reach or LADDER[0], app_disabled=is_off)
        status = 0 if known is not None and known.ref == channel else self._verify(channel)
        if status != 0:
            return ArmResult(status=status, reach=Reach.NONE, want_fd=False, gated=False, is_known=False)
        if known is not None and (known.ref.gpu, known.ref.compute) != (channel.gpu, channel.compute):
            self.remove_channel(client, channel.h_client, channel.h_channel)  # else an issuer keeps it
        if channel.compute:
            status, entry = self._climb(holder, numbers, entry)
        else:
            self._put(entry)
        if entry.is_armed:
            self.kept.drop(channel)
        return ArmResult(
            status=status,
            reach=entry.reach,
            want_fd=numbers.fd < 0 and is_worse(entry.reach, Reach.CHANNEL_FD),
            gated=entry.is_armed and self._is_stopping(channel.gpu),
        )

    def _put(self, channel: ArmedChannel) -> None:
        is_apart = self._clients[channel.client].losses >= LOSSES
        channel = replace(channel, is_apart=is_apart, since=lib.valve_gate_plans(self._gate))
        self._channels.put(channel, entry_of(channel, self._clients[channel.client]) if channel.is_armed else None)

    def _forget_gone(self, gpu: GpuIndex) -> None:
        """What the driver said has ended is in no plan from here on, until its process tells of it anew."""
        count = lib.valve_gpu_gone(self._gate, gpu, self._gone, len(self._gone))
        for client in self._channels.forget(gpu, self._gone[0:count]):
            self._clients[client].losses += 1
            if self._clients[client].losses == LOSSES:
                for channel in self._channels.of(client):
                    self._put(channel)

    def _verify(self, channel: ChannelRef) -> int:
        """Does the driver know this channel under the number that the shim was given? 0, or an RM status."""
        cid = ffi.new("uint32_t *")
        status: int = lib.valve_gpu_cid(self._gate, channel.gpu, channel.h_client, channel.h_channel, cid)
        if status == 0 and channel.cid and cid[0] != channel.cid:
            return INVALID_CHANNEL
        return status if status in GONE else 0  # this driver cannot say (older branch, refusal): the test decides

    def _climb(
        self, holder: GateClient, numbers: RmNumbers, entry: ArmedChannel, start: Reach = Reach.CHANNEL_OWN
    ) -> tuple[int, ArmedChannel]:
        """Arms the channel on the best rung that works, from what this RM client needed before, and books it."""
        status = 0
        for reach in LADDER[LADDER.index(numbers.reach or start) :]:
            missing = self._missing(holder, numbers, reach)
            if missing is None:
                entry = replace(entry, reach=reach)
                status = self._try_and_arm(entry, is_tested=reach is numbers.reach)
                if status in (0, -errno.ETIMEDOUT):  # a driver that hangs has not refused
                    numbers.reach = reach
                    return status, entry
                has_rung = reach is not Reach.CHANNEL_OWN or not self._infos[entry.ref.gpu].status
                if status in NOT_NOW and has_rung and is_worse(Reach.CHANNEL_SELF, reach):  # nor has this one
                    return status, self._arm_untested(entry)
                missing = status_text(status)
            self._reasons[entry.ref.gpu, reach] = f"{reach.value}: {missing}"
        if status and lib.valve_gpu_state(self._gate, entry.ref.gpu) == lib.VALVE_GPU_FAILED:
            best = next(reach for reach in LADDER if self._missing(holder, numbers, reach) is None)
            return status, self._arm_untested(replace(entry, reach=best))
        self._put(given_up := replace(entry, reach=Reach.NONE))
        self._arm(entry.ref.gpu, run_now=[] if entry.app_disabled else [entry])  # undoes the tries
        return status, given_up

    def _arm_untested(self, entry: ArmedChannel) -> ArmedChannel:
        """Arms without a test, because this GPU cannot be stopped now. Later tries test it with the others."""
        self._put(entry)
        self._arm(entry.ref.gpu)
        lib.valve_gpu_stop_again(self._gate, entry.ref.gpu)
        return entry

    def _missing(self, holder: GateClient, numbers: RmNumbers, reach: Reach) -> str | None:
        """What this rung lacks, before anything is tried."""
        if reach is Reach.CHANNEL_FD and numbers.fd < 0:
            return "the process has not passed its nvidiactl descriptor"
        needed = {Reach.CHANNEL_SELF: Feature.SELF_GATE, Reach.LAUNCH_GATE: Feature.HOLD}.get(reach, 0)
        if needed and lib.valve_gate_orders(self._gate):
            return "this kernel cannot ring an eventfd without waiting (io_setup)"
        lib.valve_client_view(holder.native, self._view, False)
        return "the client does not support it" if needed & ~self._view.features else None

    def _try_and_arm(self, entry: ArmedChannel, *, is_tested: bool) -> int:
        gpu, status = entry.ref.gpu, 0
        if not (is_tested or entry.app_disabled or self._is_gated(gpu)):  # else the stop itself is the test
            native = ffi.new("struct valve_entry *", entry_of(entry, self._clients[entry.client]))
            status = lib.valve_gpu_try(self._gate, gpu, native)
        if status not in (0, -errno.ETIMEDOUT):
            return status
        self._put(entry)  # also if the driver hangs: the issuer reads the mail when the driver answers
        return self._arm(gpu, stop_now=[entry]) or status

    def _arm(
        self,
        gpu: GpuIndex,
        stop_now: Sequence[ArmedChannel] = (),
        run_now: Sequence[ArmedChannel] = (),
        leaving: GateClient | None = None,
        was_off: Any = ffi.NULL,
    ) -> int:
        """Hand the issuer its new list. 0, or what stopping `stop_now` met (only while the GPU is stopped)."""
        self._forget_gone(gpu)
        plan = self._channels.plan(gpu)
        stops = _entries(entry_of(channel, self._clients[channel.client]) for channel in stop_now)
        ordered = sorted(run_now, key=lambda channel: channel.place)
        runs = _entries(entry_of(channel, leaving or self._clients[channel.client]) for channel in ordered)
        return int(lib.valve_arm(self._gate, gpu, plan.entries, len(plan), *stops, *runs, was_off))

    def remove_channel(self, client: ClientId, h_client: int, h_channel: int) -> None:
        """Forget a channel that its process frees. It is not enabled first: an enabled channel would run its group."""
        channel = self._channels.pop(client, h_client, h_channel)
        if channel is not None and channel.is_armed:
            self._arm(channel.ref.gpu)

    def stop_again(self, client: ClientId, h_client: int) -> None:
        mine = [c for c in self._channels.of(client) if c.ref.h_client == h_client and c.is_armed]
        for gpu in {channel.ref.gpu for channel in mine}:
            if self._is_gated(gpu):
                self._arm(gpu, stop_now=[channel for channel in mine if channel.ref.gpu == gpu])

    def switches(self, client: ClientId) -> bool:
        return self._channels.are_switched(client)

    def run_again(self, client: ClientId) -> None:
        for gpu in {channel.ref.gpu for channel in self._channels.of(client) if channel.is_ours_to_run}:
            lib.valve_gpu_run_again(self._gate, gpu)

    def give_up(self, client: ClientId, why: str) -> None:
        self._clients[client].is_given_up = True
        mine = self._channels.pop_client(client)
        for gpu in {channel.ref.gpu for channel in mine}:
            gone = [channel for channel in mine if channel.ref.gpu == gpu]
            self._reasons[gpu, Reach.CHANNEL_OWN] = f"{Reach.CHANNEL_OWN.value}: {why}"
            self._arm(gpu, run_now=[channel for channel in gone if channel.is_armed])
        for channel in mine:
            self._put(replace(channel, reach=Reach.NONE))

    def give_rm_client(
        self, client: ClientId, gpu: GpuIndex, h_client: int, h_device: int, h_subdevice: int, fd: int
    ) -> None:
        del gpu, h_device  # each channel names its GPU; a call needs client and subdevice only
        holder = self._clients[client]
        numbers = holder.rm_clients.setdefault(h_client, RmNumbers())
        before = replace(numbers)
        numbers.h_subdevice = h_subdevice
        if fd >= 0 and lib.valve_client_take_fd(holder.native, fd) == 0:
            numbers.fd = fd  # else the process has too many RM clients, and the fd is closed
        if numbers == before:
            return
        mine = [c for c in self._channels.of(client) if c.ref.h_client == h_client and c.ref.compute]
        for channel in mine if not holder.is_given_up else ():
            if numbers.fd != before.fd and is_worse(channel.reach, Reach.CHANNEL_FD):
                # The fd has come: look for the best rung again, from the fd's on. Orders of the old rung hold until the
                # next wake, which takes back every order of every client in the plan.
                numbers.reach = None
                if self._climb(holder, numbers, channel, start=Reach.CHANNEL_FD)[1].is_armed:
                    self.kept.drop(channel.ref)
            else:
                self._put(channel)  # its entry has the new numbers

    def note_app_disabled(self, client: ClientId, h_client: int, h_channel: int, disabled: bool) -> None:
        channel = self._channels.get(client, h_client, h_channel)
        if channel is None or channel.app_disabled == disabled:
            return
        self._put(channel := replace(channel, app_disabled=disabled))
        self._arm(channel.ref.gpu, stop_now=[channel] if channel.is_ours_to_run else ())

    def _is_stopping(self, gpu: GpuIndex) -> bool:
        """The GPU is stopped, or a stop was tried: the next wake enables a channel that is armed now, too."""
        return lib.valve_gpu_state(self._gate, gpu) in _STOPPING

    def reach(self, gpu: GpuIndex) -> tuple[Reach, str]:
        if self._refusal:
            return Reach.NONE, self._refusal
        used = self._channels.weakest(gpu)
        status = self._infos[gpu].status
        if used is None:
            note = f"own RM client: {status_text(status)}" if status else "not tested: no offline channel yet"
            return (Reach.CHANNEL_FD if status else Reach.CHANNEL_OWN), note
        if used is LADDER[0]:  # asked while a service waits for memory
            return used, ""
        better = (self._reasons.get((gpu, rung)) for rung in LADDER if is_worse(used, rung))
        return used, "; ".join(filter(None, better))

    def disabled(self) -> tuple[ChannelRef, ...]:
        """Channels that are disabled, or about to be."""
        return tuple(one.ref for one in self._channels if one.is_ours_to_run and self._is_gated(one.ref.gpu))

    def client_leaves(self, client: ClientId, holder: GateClient, *, lives_on: bool) -> tuple[ChannelRef, ...]:
        """Forgets the client's channels and enables them. Returns those that were off. If the process lives on,
        channels that valved can enable later stay off, and only these are returned."""
        off, mine = list[ChannelRef](), self._channels.pop_client(client)
        for gpu in {channel.ref.gpu for channel in mine}:
            gone = [channel for channel in mine if channel.ref.gpu == gpu and channel.is_ours_to_run]
            kept = dict.fromkeys(_can_wait(gone, with_files=self.kept.has_room(holder)) if lives_on else ())
            was = ffi.new("uint32_t *", lib.VALVE_WAS_OFF)
            self._arm(gpu, run_now=[c for c in gone if c not in kept], leaving=holder, was_off=was)
            if was[0] == lib.VALVE_WAS_ON:
                continue
            off.extend(channel.ref for channel in (kept if lives_on else gone))
            for channel in (one for one in kept if one.reach is Reach.CHANNEL_FD):
                self.kept.put(channel, holder)
            if was[0] == lib.VALVE_WAS_UNKNOWN:  # the driver hangs: taken as off until it answers
                self._unsure.append((was, {channel.ref for channel in kept}, client))
        return tuple(off)

    def turned_out_on(self) -> set[ChannelRef]:
        told = [one for one in self._unsure if one[0][0] != lib.VALVE_WAS_UNKNOWN]  # it may change at any time
        self._unsure = [one for one in self._unsure if one not in told]
        on = set[ChannelRef]().union(*(refs for was, refs, _ in told if was[0] == lib.VALVE_WAS_ON))
        for channel in on:
            self.kept.drop(channel)
        return on

    def behind(self) -> set[ClientId]:
        self._unsure = [one for one in self._unsure if one[1] or one[0][0] == lib.VALVE_WAS_UNKNOWN]
        return {client for was, _, client in self._unsure if was[0] == lib.VALVE_WAS_UNKNOWN}

    def _is_gated(self, gpu: GpuIndex) -> bool:
        return bool(lib.valve_gpu_gated(self._gate, gpu))


def _entries(group: Iterable[dict[str, Any]]) -> tuple[Any, int]:
    entries = list(group)
    return ffi.new("struct valve_entry[]", entries), len(entries)


def _can_wait(gone: Sequence[ArmedChannel], *, with_files: bool) -> list[ArmedChannel]:
    """Channels that valved can enable later. All other rungs go through the client itself."""
    reaches = {Reach.CHANNEL_OWN, Reach.CHANNEL_FD} if with_files else {Reach.CHANNEL_OWN}
    return [channel for channel in gone if channel.reach in reaches]
