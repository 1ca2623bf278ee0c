"""The driver checks by struct file: which fd a call came on, and when its last copy is closed."""

from __future__ import annotations

import errno
import socket
import struct

from rm_process import (
    ALLOC,
    BAD_CLIENT,
    CONTROL,
    DEVICE,
    ID_INFO,
    NO_PERMISSION,
    NOT_SUPPORTED,
    OK,
    REGISTER_FD,
    ROOT,
    RmProcess,
    device_params,
    grow_tree,
    request,
    use_uvm,
)
from valve_tools.emulator.client import Emulator

FIRST_GPU_ID = 3 << 8
PAGES = 5  # wire.h: a connection that changes the pages of a uvm file's owner


def id_info(gpu_id: int = FIRST_GPU_ID) -> bytes:
    return struct.pack("<I", gpu_id) + bytes(28)


def client_on(process: RmProcess, ctl: int) -> int:
    return process.alloc(ctl, 0, 0, 0, ROOT).handle


def test_a_client_answers_only_on_the_file_that_owns_it(process: RmProcess) -> None:
    own, other = process.open("/dev/nvidiactl"), process.open("/dev/nvidiactl")
    client = client_on(process, own)

    assert process.control(own, client, client, ID_INFO, id_info()).status == OK
    assert process.control(other, client, client, ID_INFO, id_info()).status == BAD_CLIENT


def test_a_passed_fd_carries_the_authority_of_its_file(process: RmProcess, another: RmProcess) -> None:
    tree = grow_tree(process)
    passed = process.pass_fd(tree.ctl, another)

    assert another.control(passed, tree.client, tree.client, ID_INFO, id_info()).status == OK


def test_a_file_registered_to_another_stands_for_it(process: RmProcess) -> None:
    own, second = process.open("/dev/nvidiactl"), process.open("/dev/nvidiactl")
    client = client_on(process, own)

    registered = process.ioctl(second, request(REGISTER_FD, 4), struct.pack("<i", own))

    assert registered.errno == 0
    assert process.control(second, client, client, ID_INFO, id_info()).status == OK


def test_a_registered_file_keeps_the_first_one_alive(emulator: Emulator, process: RmProcess) -> None:
    own, second = process.open("/dev/nvidiactl"), process.open("/dev/nvidiactl")
    client_on(process, own)
    process.ioctl(second, request(REGISTER_FD, 4), struct.pack("<i", own))

    process.call("close", fd=own)
    process.call("close", fd=process.open("/dev/nvidiactl"))  # a later close: the first one has been noticed
    emulator.wait(lambda state: len(state.raw["files"]) == 2, "the third file released")

    assert len(emulator.state().raw["clients"]) == 1


def test_a_client_lives_until_the_last_copy_of_its_file_closes(
    emulator: Emulator, process: RmProcess, another: RmProcess
) -> None:
    tree = grow_tree(process)
    kept = process.pass_fd(tree.ctl, another)
    process.kill()
    emulator.wait(lambda state: all(row["kind"] != "node" for row in state.raw["files"]), "the node closed")
    alive = len(emulator.state().channels)

    another.call("close", fd=kept)

    assert len(tree.channels) == alive
    emulator.wait(lambda state: not state.raw["clients"] and not state.channels, "no client left")


def test_a_forked_child_keeps_the_file_of_its_parent(emulator: Emulator, process: RmProcess) -> None:
    import os
    import signal

    grow_tree(process)
    child = process.call("fork_holding_everything")
    process.kill()

    assert len(emulator.state().raw["clients"]) == 1

    os.kill(child, signal.SIGKILL)
    emulator.wait(lambda state: not state.raw["clients"] and not state.raw["files"], "everything released")


def test_a_forked_child_calls_through_the_file_that_it_inherited(process: RmProcess) -> None:
    """The connection of a thread is not shared with a child: two processes would read each other's answers."""
    tree = grow_tree(process)
    arg = process.control_arg(tree.client, tree.client, ID_INFO, 32)

    statuses = process.call(
        "ioctl_in_children", count=4, fd=tree.ctl, request=request(CONTROL, 32), arg=arg.hex(), params=id_info().hex()
    )

    assert statuses == [OK] * 4


def test_a_device_needs_a_fd_of_its_node_wherever_that_came_from(process: RmProcess, another: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")
    client = client_on(process, ctl)

    refused = process.alloc(ctl, client, client, 0, DEVICE, device_params(0, client))
    another.pass_fd(another.open("/dev/nvidia0"), process)
    granted = process.alloc(ctl, client, client, 0, DEVICE, device_params(0, client))

    assert (refused.status, granted.status) == (NO_PERMISSION, OK)


def test_the_node_of_one_card_opens_no_device_on_another(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")
    client = client_on(process, ctl)
    process.open("/dev/nvidia0")

    assert process.alloc(ctl, client, client, 0, DEVICE, device_params(1, client)).status == NO_PERMISSION


def test_object_calls_are_refused_on_a_card_node(process: RmProcess) -> None:
    node = process.open("/dev/nvidia0")

    assert process.alloc(node, 0, 0, 0, ROOT).errno == errno.EINVAL


def test_a_wrong_struct_size_is_an_error_of_ioctl_itself(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")

    assert process.ioctl(ctl, request(ALLOC, 40), bytes(40)).errno == errno.EINVAL
    assert process.ioctl(ctl, request(CONTROL, 28), bytes(28)).errno == errno.EINVAL


def test_nodes_that_do_not_exist_cannot_be_opened(process: RmProcess) -> None:
    assert process.call("open_error", path="/dev/nvidia7") == errno.ENOENT


def test_both_forms_of_alloc_and_a_wrapped_one_are_the_same_call(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")

    small = process.alloc(ctl, 0, 0, 0, ROOT, form=32)
    large = process.alloc(ctl, 0, 0, 0, ROOT, form=48)
    inner = struct.pack("<IIIIQII", 0, 0, 0, ROOT, 0, 0, 0)
    wrapped = process.ioctl(ctl, request(211, 16), struct.pack("<IIQ", ALLOC, len(inner), 0), inner, at=8)

    assert [small.status, large.status, struct.unpack_from("<I", wrapped.params, 28)[0]] == [OK, OK, OK]
    assert [large.handle - small.handle, struct.unpack_from("<I", wrapped.params, 8)[0] - large.handle] == [1, 1]


def test_a_wrapped_call_above_16_kib_is_refused(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")

    assert process.ioctl(ctl, request(211, 16), struct.pack("<IIQ", ALLOC, 16385, 0)).errno == errno.EINVAL


def test_an_unknown_command_is_refused_by_status_and_counted(emulator: Emulator, process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")
    client = client_on(process, ctl)

    status = process.control(ctl, client, client, 0xBEEF, bytes(4)).status

    assert status == NOT_SUPPORTED
    assert emulator.state().unknown("controls") == {0xBEEF: 1}


def test_card_info_lists_every_card_or_refuses_a_short_array(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")

    full = process.ioctl(ctl, request(200, 72 * 32), bytes(72 * 32))
    short = process.ioctl(ctl, request(200, 72), bytes(72))

    assert [(full.arg[72 * i], full.word(72 * i + 16), full.word(72 * i + 56)) for i in range(3)] == [
        (1, FIRST_GPU_ID, 0),
        (1, FIRST_GPU_ID + 256, 1),
        (0, 0, 0),
    ]
    assert short.errno == errno.EINVAL


def test_a_thread_that_closed_every_fd_of_the_process_can_call_again(process: RmProcess) -> None:
    """Daemons close fds they do not know; the preload's own connections are among them."""
    ctl = process.open("/dev/nvidiactl")
    client = client_on(process, ctl)

    for fd in range(700, 760):
        process.start("close", fd=fd).exception(60)

    assert process.control(ctl, client, client, ID_INFO, id_info()).status == OK


def test_only_the_owner_of_a_uvm_file_serves_its_pages(emulator: Emulator, process: RmProcess) -> None:
    """Whoever else offers that is sent away, and keeps no file alive."""
    use_uvm(grow_tree(process))

    for row in emulator.state().raw["files"]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(str(emulator.directory / "emu.sock"))
            link.send(struct.pack("<IIIIQ", 0x33554D45, PAGES, 0, 0, row["id"]))
            assert struct.unpack("<iIQ", link.recv(16))[0] == errno.EPERM
    process.kill()

    emulator.wait(lambda state: not state.raw["files"], "every file released")
