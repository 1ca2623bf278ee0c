"""Scripted failures, lost cards, and processes that die at the worst moment."""

from __future__ import annotations

import errno

import pytest
from rm_process import GPU_IS_LOST, OK, TIMEOUT, RmProcess, grow_tree, use_uvm
from valve_tools.emulator.client import Emulator, EmulatorError


def test_the_third_disable_fails_and_the_others_do_not(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    emulator.fault("on disable 3: status 0x65")

    assert [tree.gate(tree.pairs, on=False) for _ in range(4)] == [OK, OK, TIMEOUT, OK]


def test_a_rule_may_name_a_card_and_a_rhythm(emulator: Emulator, process: RmProcess) -> None:
    trees = [grow_tree(process, gpu=gpu) for gpu in range(2)]
    emulator.fault("on enable every 2 gpu 1: status 0x65")

    statuses = [[tree.gate(tree.pairs, on=True) for _ in range(3)] for tree in trees]

    assert statuses == [[OK, OK, OK], [OK, TIMEOUT, OK]]


def test_a_silent_disable_reports_success_and_stops_nothing(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    emulator.fault("on disable 1: silent")

    assert tree.gate(tree.pairs, on=False) == OK
    assert emulator.state().disabled == ()


def test_a_late_disable_returns_while_the_kernel_still_runs(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    process.call("work", cid=tree.cids[0], gpu=0)
    emulator.wait(lambda state: any(one.active for one in state.channels), "the kernel runs")
    emulator.fault("on disable 1: late 40s")

    status = tree.gate(tree.pairs, on=False)
    now = emulator.state()

    assert status == OK
    assert [(one.disabled, bool(one.active)) for one in now.channels] == [(True, True), (True, False)]


def test_a_late_disable_takes_effect_in_the_end(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    process.call("work", cid=tree.cids[0], gpu=0)
    emulator.wait(lambda state: any(one.active for one in state.channels), "the kernel runs")
    emulator.fault("on disable 1: late 5ms")

    tree.gate(tree.pairs, on=False)

    emulator.wait(lambda state: not any(one.active for one in state.channels), "the kernel stops late")


def test_an_xid_is_written_to_the_kernel_log(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    emulator.fault("on schedule: xid 31")

    tree.schedule()

    assert f": 31, pid={process.pid}, scripted" in emulator.kernel_log()


def test_the_caller_can_be_killed_at_a_step(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    emulator.fault("on disable: kill")

    call = tree.start_gate(tree.pairs, on=False)

    assert isinstance(call.exception(30), ProcessLookupError)
    emulator.wait(lambda state: not state.raw["files"], "every file released")


@pytest.mark.parametrize(
    "line",
    [
        "on disable 3",
        "disable: silent",
        "on dinner: silent",
        "on disable: explode",
        "on disable: hang",
        "on disable: hang 3 weeks",
        "on disable sometimes: silent",
        "on disable: silent 3",
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_with_a_reason(emulator: Emulator, line: str) -> None:
    with pytest.raises(EmulatorError):
        emulator.fault(line)


def test_unknown_knobs_and_values_are_refused(emulator: Emulator) -> None:
    for setting in ({"warp_speed": 9}, {"lock": "brass"}, {"rpc_us": "soon"}, {"rpc_us": -1}):
        with pytest.raises(EmulatorError):
            emulator.set(**setting)


def test_knobs_can_be_read_back(emulator: Emulator) -> None:
    with emulator.setting(rpc_us=12.5, lock="device-only"):
        inside = emulator.knobs()

    assert (inside["rpc_us"], inside["lock"]) == (12.5, "device-only")
    assert (emulator.knobs()["rpc_us"], emulator.knobs()["lock"]) == (0, "stock")


def test_a_lost_card_stops_everything_and_answers_nothing(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    process.call("work", cid=tree.cids[0], gpu=0)
    emulator.wait(lambda state: any(one.active for one in state.channels), "the kernel runs")

    emulator.lose(0)

    emulator.wait(lambda state: not any(one.active for one in state.channels), "the kernel stops")
    assert tree.gate(tree.pairs, on=False) == GPU_IS_LOST
    assert process.call("open_error", path="/dev/nvidia0") == errno.EIO
    assert "79, pid=0" in emulator.kernel_log()


def test_a_killed_process_leaves_nothing_behind(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process, channels=8)
    use_uvm(tree)
    tree.allocate_memory(1 << 20)

    process.kill()

    state = emulator.wait(lambda now: not now.raw["files"], "every file released")
    assert (
        state.channels,
        state.raw["clients"],
        state.raw["memory"],
        state.used_bytes(),
    ) == ((), [], [], 0)


def queue_work_and_gate(emulator: Emulator, tree_of: RmProcess) -> None:
    tree = grow_tree(tree_of, channels=2)
    use_uvm(tree)
    for cid in tree.cids:
        tree_of.call("work", cid=cid, gpu=0)
    emulator.wait(lambda state: all(one.pending for one in state.channels), "work queued")
    assert tree.gate(tree.pairs, on=False) == OK


def test_closing_a_gated_process_waits_for_each_channel_with_every_lock_held(
    emulator: Emulator, process: RmProcess
) -> None:
    """The reason why Valve enables before it kills."""
    emulator.set(stop_wait_ms=5)
    queue_work_and_gate(emulator, process)

    process.kill()
    emulator.wait(lambda state: not state.raw["files"], "every file released")

    assert "stopping 2 disabled channels" in emulator.kernel_log()


def test_closing_an_enabled_process_waits_for_nothing(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process, channels=2)
    use_uvm(tree)
    process.call("work", cid=tree.cids[0], gpu=0)
    emulator.wait(lambda state: any(one.active for one in state.channels), "the kernel runs")

    process.kill()
    emulator.wait(lambda state: not state.raw["files"], "every file released")

    assert emulator.kernel_log() == ""


def test_a_disabled_channel_may_be_told_to_count_as_idle(emulator: Emulator, process: RmProcess) -> None:
    emulator.set(stop_disabled="idle", stop_wait_ms=3600000)
    queue_work_and_gate(emulator, process)

    process.kill()

    emulator.wait(lambda state: not state.raw["files"], "every file released")


def test_a_thousand_connects_leave_no_trace(emulator: Emulator, process: RmProcess) -> None:
    for _ in range(1000):
        assert process.call("open_error", path="/dev/nvidiactl") == 0

    emulator.wait(lambda state: not state.raw["files"], "every file released")
