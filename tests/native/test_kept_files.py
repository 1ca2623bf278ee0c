"""Files of clients whose link ended while their process lives on: channels that these alone reach."""

from __future__ import annotations

import os
from contextlib import suppress

from gates import Rig, Workload, wait_until
from instructions import instructions_of
from scarce import left

from valved.gate.armed import ArmedChannel, GateClient
from valved.gate.kept import KeptFiles
from valved.machine.ports import ClientFds, LeftOff, WakeOutcome
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId

DENIED = 0x1B
NO_FDS = ClientFds(control=-1, region=-1, doorbell=-1, order=-1)


def let_run(rig: Rig) -> None:
    assert rig.gate.wake(ServiceId(7)) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)


def copies(fd: int) -> int:
    """How many descriptors of this process are of that file."""
    inode, found = os.fstat(fd).st_ino, 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.stat(f"/proc/self/fd/{name}").st_ino == inode
    return found


def test_channels_reached_by_a_passed_file_never_run_beside_a_service_because_a_link_ended(rig: Rig) -> None:
    """Their process lives on. The file stays until they are enabled: nobody could do it without."""
    workload, off = left_beside_a_service(rig)

    assert workload.on() == 0
    assert off == tuple(workload.channels)
    assert [rig.gate.channels.enable_unless_held(channel) for channel in off] == [LeftOff.HELD] * 3

    assert rig.gate.channels.enable_foreign(off) == 3  # it has ended

    assert workload.on() == 3
    wait_until(lambda: copies(workload.fd) == 1, "only the workload's own is left")


def test_a_process_that_is_back_on_a_new_link_never_loses_the_channels_that_its_file_alone_reaches(rig: Rig) -> None:
    workload, _ = left_beside_a_service(rig)
    workload.client = rig.offline().client  # a link that has not shown the file yet

    told = [rig.gate.channels.add_channel(workload.client, channel) for channel in workload.channels]

    assert [(result.reach, result.want_fd, result.gated) for result in told] == [(Reach.CHANNEL_FD, False, True)] * 3
    assert workload.on() == 0
    let_run(rig)
    assert workload.on() == 3
    rig.gate.remove_client(workload.client)
    wait_until(lambda: copies(workload.fd) == 1, "only the workload's own is left")


def test_a_process_that_is_back_is_never_lost_because_no_descriptor_is_left(rig: Rig) -> None:
    """Its file could not be handed on: it is asked for it, as one that is new, and none is kept then."""
    workload, _ = left_beside_a_service(rig)
    workload.client = rig.offline().client

    with left(0):
        told = [rig.gate.channels.add_channel(workload.client, channel) for channel in workload.channels]

    assert [(result.reach, result.want_fd) for result in told] == [(Reach.NONE, True)] * 3
    workload.pass_fd()
    assert workload.on() == 0
    let_run(rig)
    assert workload.on() == 3
    rig.gate.remove_client(workload.client)
    wait_until(lambda: copies(workload.fd) == 1, "only the workload's own is left")


def test_the_end_of_one_process_never_costs_more_because_of_files_that_are_kept_of_others() -> None:
    """64 such processes of 1,024 channels each: the loop stood for seconds at the end of one."""

    def cost(others: int) -> int:
        kept = KeptFiles(None)
        for number in range(others + 1):
            holder = GateClient(native=None, role=Role.OFFLINE, service=ServiceId(0), fds=NO_FDS)
            for channel in range(8):
                kept.put(_by_file(number, channel), holder)
        kept.put(_by_file(others, 8), holder)  # one that stays: the native client is not freed
        return instructions_of(lambda: [kept.drop(_by_file(others, channel).ref) for channel in range(8)])

    assert cost(others=60) == cost(others=1)


def _by_file(number: int, channel: int) -> ArmedChannel:
    ref = ChannelRef(gpu=GpuIndex(0), h_client=number, h_channel=channel, cid=1, h_tsg=1, engine=1, compute=True)
    return ArmedChannel(ref=ref, client=ClientId(number), reach=Reach.CHANNEL_FD)


def left_beside_a_service(rig: Rig) -> tuple[Workload, tuple[ChannelRef, ...]]:
    """Three channels that only the passed file reaches are off, and the link of their process has ended."""
    rig.driver.rules.deny_foreign = DENIED
    workload = rig.offline()
    workload.pass_fd()
    workload.add(3)
    rig.online(7, {0})
    rig.wait_gated(0)
    return workload, rig.gate.remove_client(workload.client, lives_on=True)


def test_a_channel_that_a_service_owns_never_stays_off_because_the_driver_refused_it_once(rig: Rig) -> None:
    """Regression: an online process showed the RM client of a job whose link had ended, and the file went at once."""
    workload, off = left_beside_a_service(rig)
    rig.driver.rules.fail_enable = 0x65

    assert [rig.gate.channels.enable_at_once(channel) for channel in off] == [LeftOff.HELD] * 3
    rig.driver.rules.fail_enable = 0

    wait_until(lambda: workload.on() == 3, "it is tried again, also while the GPU is held")
    let_run(rig)
    assert [rig.gate.channels.enable_unless_held(channel) for channel in off] == [LeftOff.ENABLED] * 3
    wait_until(lambda: copies(workload.fd) == 1, "only the workload's own is left")
