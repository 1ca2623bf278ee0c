"""Disabling and enabling channels: who may be named, what stops, what starts again, what nobody undoes."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator

import pytest
from rm_process import (
    BAD_ARGUMENT,
    BAD_CHANNEL,
    BAD_CLIENT,
    CHANNEL,
    DISABLE_CHANNELS,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    OK,
    SCHEDULE,
    TIMEOUT,
    RmProcess,
    Tree,
    channel_params,
    gate_params,
    grow_tree,
)
from valve_tools.emulator.client import Emulator, NodeMoment, RunlistChannel


@pytest.fixture
def workload(process: RmProcess) -> Tree:
    """A process whose first channel executes an endless kernel."""
    tree = grow_tree(process, channels=2)
    process.call("work", cid=tree.cids[0], gpu=0)
    return tree


@pytest.fixture
def daemon(another: RmProcess) -> Tree:
    """A process with a client of its own on the same card, as a node daemon has."""
    return grow_tree(another, channels=0)


def beats(tree: Tree) -> int:
    return int(tree.process.call("heartbeat", cid=tree.cids[0]))


def wait_for_a_beat(tree: Tree, emulator: Emulator) -> None:
    before = beats(tree)
    emulator.wait(lambda _: beats(tree) > before, "the kernel moves")


def channel(state: NodeMoment, cid: int) -> RunlistChannel:
    return next(one for one in state.channels if one.cid == cid)


def test_a_disable_from_another_client_stops_a_running_kernel(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    wait_for_a_beat(workload, emulator)

    status = daemon.gate(workload.pairs, on=False)
    stopped = channel(emulator.state(), workload.cids[0])
    frozen = beats(workload)

    assert status == OK
    assert (stopped.disabled, stopped.granted, stopped.active) == (True, False, 0)
    assert [frozen] * 20 == [beats(workload) for _ in range(20)]


def test_an_enable_lets_it_go_on(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    daemon.gate(workload.pairs, on=False)

    status = daemon.gate(workload.pairs, on=True)

    assert status == OK
    wait_for_a_beat(workload, emulator)
    assert emulator.state().disabled == ()


def test_nobody_enables_again_when_the_disabler_dies(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    daemon.gate(workload.pairs, on=False)

    daemon.process.kill()
    state = emulator.wait(lambda now: len(now.raw["clients"]) == 1, "the daemon's client gone")

    assert set(workload.cids) == {one.cid for one in state.disabled}


def test_disable_and_enable_are_idempotent(workload: Tree, daemon: Tree, emulator: Emulator) -> None:
    assert [daemon.gate(workload.pairs, on=False) for _ in range(2)] == [OK, OK]
    assert [daemon.gate(workload.pairs, on=True) for _ in range(2)] == [OK, OK]
    wait_for_a_beat(workload, emulator)


def test_an_empty_list_is_fine_and_a_list_above_64_is_refused(daemon: Tree) -> None:
    long = bytearray(gate_params([], on=False))
    long[4:8] = struct.pack("<I", 65)

    assert daemon.gate([], on=False) == OK
    assert daemon.control(daemon.subdevice, DISABLE_CHANNELS, bytes(long)).status == BAD_ARGUMENT


@pytest.mark.parametrize(
    ("policy", "status", "stops"), [("allow", OK, True), ("deny", NO_PERMISSION, False), ("silent", OK, False)]
)
def test_the_firmware_s_policy_for_foreign_channels(
    emulator: Emulator, workload: Tree, daemon: Tree, policy: str, status: int, stops: bool
) -> None:
    emulator.set(gsp_foreign=policy)

    assert status == daemon.gate(workload.pairs, on=False)
    assert stops == channel(emulator.state(), workload.cids[0]).disabled


def test_a_passed_fd_reaches_the_channels_even_if_foreign_lists_are_denied(
    emulator: Emulator, workload: Tree, daemon: Tree
) -> None:
    emulator.set(gsp_foreign="deny", gsp_status=0x57)
    passed = workload.process.pass_fd(workload.ctl, daemon.process)
    own, foreign = gate_params(workload.pairs, on=False), daemon.gate(workload.pairs, on=False)

    answer = daemon.process.control(passed, workload.client, workload.subdevice, DISABLE_CHANNELS, own)

    assert (foreign, answer.status) == (NOT_FOUND, OK)
    assert channel(emulator.state(), workload.cids[0]).disabled


@pytest.mark.parametrize(("rule", "first_is_off"), [("keep", True), ("none", False)])
def test_a_stale_handle_in_the_list_is_an_error_with_the_chosen_effect_on_the_rest(
    emulator: Emulator, workload: Tree, daemon: Tree, rule: str, first_is_off: bool
) -> None:
    emulator.set(partial=rule)
    pairs = [workload.pairs[0], (workload.client, 0x5C0000EE), workload.pairs[1]]

    assert daemon.gate(pairs, on=False) == NOT_FOUND
    state = emulator.state()
    assert [first_is_off, False] == [channel(state, cid).disabled for cid in workload.cids]


def test_a_dead_client_in_the_list_is_an_error(daemon: Tree) -> None:
    assert daemon.gate([(0xC1D0FFFF, 0x5C000010)], on=False) == BAD_CLIENT


def test_a_channel_of_another_card_is_refused(process: RmProcess, another: RmProcess) -> None:
    elsewhere, here = grow_tree(process, gpu=1), grow_tree(another, gpu=0, channels=0)

    assert here.gate(elsewhere.pairs, on=False) == BAD_CHANNEL


def test_the_completion_event_needs_the_kernel_unless_the_call_is_routed_to_the_firmware(
    emulator: Emulator, daemon: Tree
) -> None:
    params = gate_params([], on=False, event=1)
    stock = daemon.control(daemon.subdevice, DISABLE_CHANNELS, params).status
    emulator.set(lock="route-to-physical")
    routed = daemon.control(daemon.subdevice, DISABLE_CHANNELS, params).status

    assert (stock, routed) == (NO_PERMISSION, OK)


def test_without_a_firmware_processor_nothing_can_be_disabled(emulator: Emulator, daemon: Tree) -> None:
    emulator.set(gsp=0)

    assert daemon.gate([], on=False) == NOT_SUPPORTED


def test_scheduling_the_group_again_enables_it(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    """Why a shim has to hold this call while the gate is closed."""
    daemon.gate(workload.pairs, on=False)

    workload.schedule()

    wait_for_a_beat(workload, emulator)
    assert emulator.state().disabled == ()


def test_scheduling_may_leave_a_disabled_channel_alone(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    daemon.gate(workload.pairs, on=False)

    workload.control(workload.tsg, SCHEDULE, bytes([1, 0, 1]))  # bSkipEnable

    assert len(emulator.state().disabled) == 2


def test_a_channel_made_while_its_group_is_off_is_enabled(emulator: Emulator, workload: Tree, daemon: Tree) -> None:
    daemon.gate(workload.pairs, on=False)

    late = workload.alloc(workload.tsg, 0x5C0000A0, CHANNEL, channel_params(workload.vaspace))

    one = channel(emulator.state(), late.word(132))
    assert (one.disabled, one.scheduled) == (False, False)


def test_only_scheduling_leaves_the_kernel_on_until_another_group_wants_the_engine(
    emulator: Emulator, workload: Tree, daemon: Tree
) -> None:
    params = gate_params(workload.pairs, on=False, only_scheduling=True)

    assert daemon.control(daemon.subdevice, DISABLE_CHANNELS, params).status == OK
    emulator.wait(lambda state: not channel(state, workload.cids[0]).granted, "the slice ends")


def test_two_processes_share_by_slices_and_a_disabled_one_takes_none(
    emulator: Emulator, workload: Tree, another: RmProcess
) -> None:
    second = grow_tree(another, channels=1)
    another.call("work", cid=second.cids[0], gpu=0)
    for tree in (workload, second):
        wait_for_a_beat(tree, emulator)

    second.gate(workload.pairs, on=False)
    frozen = beats(workload)
    wait_for_a_beat(second, emulator)

    state = emulator.state()
    assert frozen == beats(workload)
    assert (channel(state, workload.cids[0]).granted, channel(state, second.cids[0]).granted) == (False, True)


def test_at_no_time_two_groups_execute(emulator: Emulator, workload: Tree, another: RmProcess) -> None:
    second = grow_tree(another, channels=1)
    another.call("work", cid=second.cids[0], gpu=0)

    for _ in range(200):
        granted = {one.tsg for one in emulator.state().channels if one.granted}
        assert len(granted) <= 1


def test_time_slices_can_be_set_and_read(workload: Tree) -> None:
    default = struct.unpack("<Q", workload.control(workload.tsg, 0xA06C0104, bytes(8)).params)[0]
    workload.control(workload.tsg, 0xA06C0103, struct.pack("<Q", 5000))
    after = struct.unpack("<Q", workload.control(workload.tsg, 0xA06C0104, bytes(8)).params)[0]

    assert (default, after) == (1024, 5000)


def test_a_preempt_is_for_once(emulator: Emulator, workload: Tree) -> None:
    assert workload.control(workload.tsg, 0xA06C0105, bytes([1, 0, 0, 0]) + bytes(4)).status == OK
    wait_for_a_beat(workload, emulator)


def test_a_group_that_was_told_to_yield_while_it_was_off_starves_nobody_later(
    emulator: Emulator, workload: Tree, another: RmProcess
) -> None:
    second = grow_tree(another, channels=1)
    wait_for_a_beat(workload, emulator)

    assert second.control(second.tsg, 0xA06C0105, bytes([1, 0, 0, 0]) + bytes(4)).status == OK
    another.call("work", cid=second.cids[0], gpu=0)

    for tree in (second, workload, second, workload):
        wait_for_a_beat(tree, emulator)


def test_a_stopped_channel_comes_back_only_by_scheduling(emulator: Emulator, workload: Tree) -> None:
    stop = workload.control(workload.channels[0], 0xA06F0112, b"\0").status
    off = channel(emulator.state(), workload.cids[0]).scheduled
    workload.gate(workload.pairs, on=True)
    still_off = channel(emulator.state(), workload.cids[0]).scheduled

    workload.schedule()

    assert (stop, off, still_off) == (OK, False, False)
    wait_for_a_beat(workload, emulator)


def test_a_kernel_that_does_not_stop_is_reset_with_an_xid(
    emulator: Emulator, process: RmProcess, another: RmProcess
) -> None:
    stuck, daemon = grow_tree(process, channels=1), grow_tree(another, channels=0)
    process.call("hang_on", cid=stuck.cids[0])
    emulator.set(preempt_timeout_ms=30)

    status = daemon.gate(stuck.pairs, on=False)

    assert status == TIMEOUT
    assert channel(emulator.state(), stuck.cids[0]).reset
    assert ": 109, pid=" in emulator.kernel_log()
    assert daemon.gate(stuck.pairs, on=False) == OK  # what is lost has stopped


def test_a_process_killed_while_it_executes_does_not_hold_up_a_disable(
    emulator: Emulator, workload: Tree, daemon: Tree
) -> None:
    """Its words on the board stay up; the fd that the daemon was passed keeps its channels."""
    workload.process.pass_fd(workload.ctl, daemon.process)
    wait_for_a_beat(workload, emulator)
    workload.process.kill()

    assert daemon.gate(workload.pairs, on=False) == OK
    assert not channel(emulator.state(), workload.cids[0]).reset


def test_a_process_stopped_by_a_signal_while_it_executes_does_not_hold_up_a_disable(
    emulator: Emulator, workload: Tree, daemon: Tree
) -> None:
    wait_for_a_beat(workload, emulator)
    os.kill(workload.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, workload.process.pid, os.WSTOPPED | os.WNOWAIT)

    assert daemon.gate(workload.pairs, on=False) == OK
    assert not channel(emulator.state(), workload.cids[0]).reset

    os.kill(workload.process.pid, signal.SIGCONT)
    assert daemon.gate(workload.pairs, on=True) == OK
    wait_for_a_beat(workload, emulator)


@pytest.mark.parametrize(
    ("version", "size", "unique_ids"), [("535.98", 2, False), ("570.211.01", 2, True), ("595.45.04", 3, True)]
)
def test_sizes_and_commands_follow_the_driver_branch(
    emulator: Emulator, process: RmProcess, version: str, size: int, unique_ids: bool
) -> None:
    tree = grow_tree(process)

    emulator.set(driver=version)

    wrong = 5 - size
    assert tree.control(tree.tsg, SCHEDULE, bytes(size)).status == OK
    assert tree.control(tree.tsg, SCHEDULE, bytes(wrong)).status == BAD_ARGUMENT
    expected = BAD_ARGUMENT if unique_ids else NOT_SUPPORTED
    assert expected == tree.control(tree.subdevice, 0x20801124, bytes(1540)).status
    assert version in (emulator.directory / "proc" / "version").read_text()


@pytest.fixture(autouse=True)
def books_balance(emulator: Emulator) -> Iterator[None]:
    yield
    state = emulator.state()
    clients = {row["handle"] for row in state.raw["clients"]}
    assert {one.h_client for one in state.channels} <= clients
