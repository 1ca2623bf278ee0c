"""The same gate on the emulated card: real struct sizes, struct-file rules, refusals, channels of another process."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from emulated import on_gpu
from gates import HASTY, SETTINGS, Launcher, wait_until
from grant_scene import FAR, NEVER_IDLE, Hook
from rm_process import RmProcess, Tree, grow_tree
from valve_abi import GrantAnswer, Order
from valve_tools.bench import region_pages
from valve_tools.emulator.client import Emulator
from valved.native._gate import lib

from valved.gate.adapter import NativeGate, NativeSettings
from valved.machine.ports import ArmResult, WakeOutcome
from valved.machine.stamps import Stamp, StampKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.policy.locks import SAMPLES, LockState, Stop, step_locks

SERVICE = ServiceId(7)
OFFLINE = ClientId(1)
GPU = GpuIndex(0)
GET_TIMESLICE = 0xA06C0104


class World:
    """The gate in this process, a workload in another, both on the node that this process was started on."""

    def __init__(self, settings: NativeSettings) -> None:
        directory = Path(os.environ["VALVE_EMU_DIR"])
        self.emulator = Emulator(directory)
        self.process = RmProcess(directory)
        self.gate = NativeGate(settings)
        self.fds = self.gate.create_client(OFFLINE, Role.OFFLINE, ServiceId(0))
        self.control = region_pages.control_page(self.fds.control)
        self.stamps: list[Stamp] = []
        self.refs: list[ChannelRef] = []

    def workload(self, gpu: int = 0, channels: int = 4) -> tuple[Tree, list[ArmResult]]:
        tree = grow_tree(self.process, gpu=gpu, channels=channels)
        refs = [
            ChannelRef(
                gpu=GpuIndex(gpu),
                h_client=tree.client,
                h_channel=handle,
                cid=cid,
                h_tsg=tree.tsg,
                engine=1,
                compute=True,
            )
            for handle, cid in zip(tree.channels, tree.cids, strict=True)
        ]
        self.refs += refs
        return tree, [self.gate.channels.add_channel(OFFLINE, ref) for ref in refs]

    def pass_file(self, tree: Tree) -> None:
        passed = self.take_fd(tree.ctl)
        self.gate.channels.give_rm_client(OFFLINE, GPU, tree.client, tree.device, tree.subdevice, passed)

    def hook(self) -> Hook:
        rig = SimpleNamespace(gate=self.gate, name=lambda: ClientId(3), _everyone=[])
        return Hook(rig, SERVICE)  # type: ignore[arg-type]  # all that it asks for

    def online(self, gpus: set[int]) -> Launcher:
        self.gate.put_service(SERVICE, frozenset(map(GpuIndex, gpus)))
        return Launcher(self, ClientId(2), SERVICE)  # type: ignore[arg-type]  # it asks for .gate only

    def wake(self, *gpus: int) -> None:
        assert self.gate.wake(SERVICE) is WakeOutcome.WOKEN
        for gpu in gpus:  # whose issuer may be half way through the stop that is over already
            wait_until(lambda gpu=gpu: not lib.valve_gate_settle(self.gate._gate, 0) >> gpu & 1, "it has seen this")
            assert not self.gate.is_gated(GpuIndex(gpu))

    def stamp(self, wanted: Callable[[Stamp], bool]) -> Stamp:
        def found() -> bool:
            self.stamps += self.gate.drain_stamps()
            return any(map(wanted, self.stamps))

        wait_until(found, "a stamp")
        return next(filter(wanted, self.stamps))

    def off(self) -> int:
        return len(self.emulator.state().disabled)

    def runs(self) -> int:
        """Calls that enable channels."""
        return sum(call.on for call in self.emulator.state().gates)

    def take_fd(self, fd: int) -> int:
        """The workload's fd, as a link would carry it."""
        self.process.call("send_fd", fd=fd)
        _, fds, _, _ = socket.recv_fds(self.process.relay, 1, 1)
        return fds[0]

    def close(self) -> None:
        self.gate.close()
        self.control.close()
        self.process.kill()
        self.emulator.close()


@contextmanager
def world(settings: NativeSettings = SETTINGS) -> Iterator[World]:
    one = World(settings)
    try:
        yield one
    finally:
        one.emulator.release()
        one.close()


@on_gpu(gpus=2)
def test_channels_of_another_process_stop_at_a_launch_and_run_again_after_the_wake(cuda: Any) -> None:
    with world() as here:
        _, results = here.workload(channels=8)
        online = here.online({0, 1})
        here.wake(0)
        assert here.off() == 0

        online.launch()
        stamp = here.stamp(lambda stamp: stamp.client == online.client and stamp.gpu == 0)

        assert [(result.status, result.reach) for result in results] == [(0, Reach.CHANNEL_OWN)] * 8
        assert (stamp.kind, stamp.channels, stamp.status) == (StampKind.GATE, 8, 0)
        assert here.off() == 8

        online.finish()
        here.wake(0)
        assert here.off() == 0


@on_gpu(gpus=2)
def test_the_cards_are_those_of_the_node(cuda: Any) -> None:
    with world() as here:
        tree, _ = here.workload(gpu=1, channels=1)
        infos = here.gate.gpus()

        assert [info.minor for info in infos] == [0, 1]
        assert infos[1].uuid == tree.uuid
        assert here.gate.driver_version().startswith("580.")


@on_gpu(knobs={"gsp_foreign": "deny"})
def test_firmware_that_denies_foreign_channels_is_reached_on_the_passed_fd(cuda: Any) -> None:
    with world() as here:
        tree, (first, *_) = here.workload(channels=2)
        assert (first.reach, first.want_fd, first.status) == (Reach.NONE, True, 0x1B)

        passed = here.take_fd(tree.ctl)
        here.gate.channels.give_rm_client(OFFLINE, GpuIndex(0), tree.client, tree.device, tree.subdevice, passed)
        online = here.online({0})
        wait_until(lambda: here.off() == 2, "both channels are off")
        assert here.gate.channels.reach(GpuIndex(0))[0] is Reach.CHANNEL_FD

        here.wake(0)
        online.launch()
        wait_until(lambda: here.off() == 2, "both channels are off again")
        here.gate.remove_client(OFFLINE)

        assert here.off() == 0


@on_gpu(knobs={"gsp_foreign": "deny"})
def test_a_killed_workload_is_gone_from_the_card_once_its_passed_fd_is_closed(cuda: Any) -> None:
    with world() as here:
        tree, _ = here.workload(channels=2)
        passed = here.take_fd(tree.ctl)
        here.gate.channels.give_rm_client(OFFLINE, GpuIndex(0), tree.client, tree.device, tree.subdevice, passed)
        here.online({0})
        wait_until(lambda: here.off() == 2, "both channels are off")
        here.process.kill()
        assert len(here.emulator.state().of(here.process.pid)) == 2  # our copy keeps them alive

        here.gate.remove_client(OFFLINE)

        here.emulator.wait(lambda state: not state.channels, "the channels went with the last copy")


def _survives_a_freed_channel() -> None:
    with world() as here:
        tree, _ = here.workload(channels=16)
        online = here.online({0})
        here.wake(0)
        tree.free(tree.channels[5])

        online.launch()
        stamp = here.stamp(lambda stamp: stamp.client == online.client)

        assert (stamp.kind, stamp.status) == (StampKind.GATE, 0)
        assert here.off() == 15


@on_gpu(knobs={"partial": "keep"})
def test_a_freed_channel_does_not_save_its_neighbours_where_a_bad_pair_ends_the_list(cuda: Any) -> None:
    _survives_a_freed_channel()


@on_gpu(knobs={"partial": "none"})
def test_a_freed_channel_does_not_save_its_neighbours_where_a_bad_pair_voids_the_list(cuda: Any) -> None:
    _survives_a_freed_channel()


@on_gpu()
def test_a_disable_that_hangs_is_stamped_and_the_launches_held(cuda: Any) -> None:
    with world(HASTY) as here:
        here.workload(channels=2)
        online = here.online({0})
        here.wake(0)
        here.emulator.fault("on disable 1: hold")

        online.launch()
        failed = here.stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
        assert here.control["order"] == Order.HOLD
        here.emulator.release()
        here.stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.epoch == failed.epoch)
        online.finish()
        here.wake(0)
        wait_until(lambda: here.control["order"] == Order.RUN, "the hold is taken back")

        assert failed.status == -110
        assert here.off() == 0


@on_gpu()
def test_no_channel_of_a_stopped_gpu_is_ever_run_by_a_trial_that_lay_in_the_mail(cuda: Any) -> None:
    """Its first half hung in the driver. A launch came before the second, and before the list with the new channel."""
    with world(HASTY) as here:
        here.workload(channels=1)
        online = here.online({0})
        here.wake(0)
        here.emulator.fault("on disable 1: hold")
        here.workload(channels=1)
        online.launch()
        wait_until(lambda: here.gate.is_gated(GPU), "the ring is heard")
        ran = here.runs()

        here.emulator.release()
        wait_until(lambda: lib.valve_gate_settle(here.gate._gate, 0) == 0, "all mail is answered")

        assert (here.runs(), here.off()) == (ran, 2)
        online.finish()
        here.wake(0)
        assert here.off() == 0


@on_gpu(gpus=2, knobs={"lock": "device-only"})
def test_a_gpu_whose_driver_hangs_delays_no_ring_for_another(cuda: Any) -> None:
    """Whoever heard the first ring hangs with it; another thread has listened since."""
    with world(HASTY) as here:  # should the call begin only after `release`, it is given up soon
        here.workload(gpu=0, channels=1)
        here.workload(gpu=1, channels=1)
        first = here.online({0})
        second = Launcher(here, ClientId(3), ServiceId(8))  # type: ignore[arg-type]
        here.gate.put_service(ServiceId(8), frozenset({GpuIndex(1)}))
        here.wake(0)
        assert here.gate.wake(ServiceId(8)) is WakeOutcome.WOKEN
        wait_until(lambda: not here.gate.is_gated(GpuIndex(1)), "GPU 1 runs")
        here.emulator.fault("on disable 1 gpu 0: hold")

        first.launch()
        wait_until(lambda: here.gate.is_gated(GpuIndex(0)), "the first ring is heard")
        second.launch()
        stamp = here.stamp(lambda stamp: stamp.gpu == 1 and stamp.client == second.client)

        assert (stamp.kind, stamp.status) == (StampKind.GATE, 0)
        assert not here.gate.is_stopped(GpuIndex(0))


def _stop_until_told(*, is_per_gpu: bool) -> None:
    """Calls of 50 ms: a thread that a busy machine starts late is late by little of that. Should most of nine samples
    have been disturbed, later ones take their places; a wrong verdict stays and ends by the deadline.
    """
    with world() as here:
        here.emulator.set(rpc_us=50_000)
        here.workload(gpu=0, channels=1)
        here.workload(gpu=1, channels=1)
        online, state = here.online({0, 1}), LockState()
        while len(state.lags) < SAMPLES or state.is_per_gpu is not is_per_gpu:
            here.wake(0, 1)
            epoch = online.control["gate_epoch"] + 1
            online.launch()
            for gpu in (0, 1):
                wanted = (epoch, gpu, StampKind.GATE)
                here.stamp(lambda stamp, wanted=wanted: (stamp.epoch, stamp.gpu, stamp.kind) == wanted)
            for one in sorted((one for one in here.stamps if one.epoch == epoch), key=lambda one: one.done_ns):
                stop = Stop(service=7, epoch=epoch, ioctl_ns=one.ioctl_ns, done_ns=one.done_ns)
                state = step_locks(state, stop)
            online.finish()


@on_gpu(gpus=2, knobs={"lock": "device-only"})
def test_the_stops_of_a_patched_driver_tell_of_a_lock_for_each_gpu(cuda: Any) -> None:
    _stop_until_told(is_per_gpu=True)


@on_gpu(gpus=2, knobs={"lock": "stock"})
def test_the_stops_of_a_stock_driver_tell_of_one_lock_for_all(cuda: Any) -> None:
    _stop_until_told(is_per_gpu=False)


@on_gpu(gpus=2)
def test_a_card_that_falls_off_the_bus_fails_alone(cuda: Any) -> None:
    with world() as here:
        here.workload(gpu=0, channels=1)
        here.workload(gpu=1, channels=1)
        online = here.online({0, 1})
        here.wake(0, 1)
        here.emulator.lose(0)

        online.launch()
        lost = here.stamp(lambda stamp: stamp.client == online.client and stamp.gpu == 0)
        fine = here.stamp(lambda stamp: stamp.client == online.client and stamp.gpu == 1)

        assert lost.kind is StampKind.GATE_FAILED
        assert (fine.kind, fine.status) == (StampKind.GATE, 0)
        online.finish()
        here.gate.wake(SERVICE)


@on_gpu()
def test_an_unknown_driver_is_only_watched(cuda: Any) -> None:
    Emulator(Path(os.environ["VALVE_EMU_DIR"])).set(driver="999.10")
    with world() as here:
        _, results = here.workload(channels=1)
        online = here.online({0})
        here.wake(0)
        online.launch()
        stamp = here.stamp(lambda stamp: stamp.client == online.client)

        assert results[0].reach is Reach.NONE
        assert (stamp.kind, stamp.channels) == (StampKind.GATE, 0)
        assert here.off() == 0
        assert "999.10" in here.gate.channels.reach(GpuIndex(0))[1]


@on_gpu()
def test_what_one_gate_left_off_its_successor_can_enable(cuda: Any) -> None:
    with world() as here:
        here.workload(channels=3)
        here.online({0})
        wait_until(lambda: here.off() == 3, "all off")
        left = here.gate.channels.disabled()

        successor = NativeGate(SETTINGS)
        known = successor.channels.enable_foreign(left)
        off = here.off()
        successor.close()

        assert (known, off) == (3, 0)


# Granted time by slices


def beats(tree: Tree) -> int:
    return int(tree.process.call("heartbeat", cid=tree.cids[0]))


def moves(tree: Tree) -> None:
    before = beats(tree)
    wait_until(lambda: beats(tree) > before, "it works")


@on_gpu()
def test_the_slice_of_a_group_is_what_the_driver_says_it_is_and_nothing_without_its_file(cuda: Any) -> None:
    with world() as here:
        tree, _ = here.workload(channels=1)
        ref = here.refs[0]
        grants = here.gate.granting
        assert not grants.has_file(OFFLINE, tree.client)

        here.pass_file(tree)

        assert grants.has_file(OFFLINE, tree.client)
        assert grants.shorten(OFFLINE, ref, 300) == ""
        assert struct.unpack("<Q", tree.control(tree.tsg, GET_TIMESLICE, bytes(8)).params)[0] == 300
        assert "RM status" in grants.shorten(OFFLINE, replace(ref, h_tsg=0x7777), 300)


@on_gpu()
def test_offline_work_has_every_pause_and_the_service_every_step_until_the_hook_rings(cuda: Any) -> None:
    with world() as here:
        tree, _ = here.workload(channels=1)
        ref = here.refs[0]
        here.pass_file(tree)
        here.process.call("work", cid=tree.cids[0], gpu=0)
        moves(tree)
        grants, online = here.gate.granting, here.online({0})
        wait_until(lambda: here.off() == 1, "the service holds")
        with RmProcess(here.emulator.directory) as engine:
            steps = grow_tree(engine, channels=1)
            hook = here.hook()
            here.gate.permit(SERVICE, NEVER_IDLE)
            grants.set_grantable(frozenset({GPU}))
            grants.consent(SERVICE, FAR, 0)
            assert grants.shorten(OFFLINE, ref, 200) == ""
            grants.set_sliceable(True, frozenset({GPU}))

            assert hook.ask(time.monotonic_ns() + FAR) is GrantAnswer.GIVEN
            moves(tree)  # the pause
            gates = len(here.emulator.state().gates)
            engine.call("work", cid=steps.cids[0], gpu=0)
            moves(steps)  # a step, beside it
            moves(tree)
            assert not online.launch()
            assert len(here.emulator.state().gates) == gates  # and no call for any of this

            hook.ask(0)
            wait_until(lambda: here.off() == 1, "offline work is stopped")
            frozen = beats(tree)
            moves(steps)
            assert beats(tree) == frozen
