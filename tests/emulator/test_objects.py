"""Trees of objects: which class stands where, what a free takes with it, who may duplicate."""

from __future__ import annotations

import struct

import pytest
from rm_process import (
    BAD_ARGUMENT,
    BAD_PARENT,
    CHANNEL,
    CHANNEL_IDS,
    COMPUTE,
    DEVICE,
    DUP,
    LOCAL_MEMORY,
    NO_PERMISSION,
    NOT_FOUND,
    OK,
    ROOT,
    SHARE,
    SUBDEVICE,
    TSG,
    RmProcess,
    Tree,
    channel_params,
    grow_tree,
    memory_params,
    request,
    tsg_params,
)
from valve_tools.emulator.client import Emulator


def live(emulator: Emulator) -> set[int]:
    return {channel.h_channel for channel in emulator.state().channels}


def test_client_handles_count_up_from_the_driver_s_base(process: RmProcess) -> None:
    ctl = process.open("/dev/nvidiactl")

    handles = [process.alloc(ctl, 0, 0, 0, ROOT).handle for _ in range(3)]

    assert handles == [0xC1D00001, 0xC1D00002, 0xC1D00003]


def test_freeing_a_vaspace_takes_the_groups_and_channels_that_depend_on_it(
    emulator: Emulator, process: RmProcess
) -> None:
    tree = grow_tree(process, channels=3)

    status = tree.free(tree.vaspace)

    assert status == OK
    assert set() == live(emulator)
    assert tree.free(tree.tsg) == NOT_FOUND


def test_freeing_a_context_share_takes_only_its_channels(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process, channels=1)
    share, bound = 0x5C000020, 0x5C000021
    tree.alloc(tree.tsg, share, SHARE, struct.pack("<III", tree.vaspace, 0, 0))
    params = bytearray(channel_params(tree.vaspace))
    params[24:28] = struct.pack("<I", share)
    tree.alloc(tree.tsg, bound, CHANNEL, bytes(params))

    tree.free(share)

    assert set(tree.channels) == live(emulator)


def test_freeing_the_root_drops_the_client(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)

    assert tree.free(tree.client) == OK
    assert (emulator.state().raw["clients"], emulator.state().channels) == ([], ())


def test_a_handle_can_be_used_again_and_the_channel_id_tells(process: RmProcess) -> None:
    tree = grow_tree(process, channels=1)
    tree.free(tree.channels[0])

    again = tree.alloc(tree.tsg, tree.channels[0], CHANNEL, channel_params(tree.vaspace))

    assert again.status == OK
    assert again.word(132) != tree.cids[0]


def test_a_handle_in_use_is_refused(process: RmProcess) -> None:
    tree = grow_tree(process, channels=1)

    assert tree.alloc(tree.tsg, tree.channels[0], CHANNEL, channel_params(tree.vaspace)).status == 0x19


def test_the_same_handles_in_two_processes_are_two_channels(
    emulator: Emulator, process: RmProcess, another: RmProcess
) -> None:
    first, second = grow_tree(process, channels=1), grow_tree(another, channels=1)

    assert first.channels == second.channels
    assert len({channel.cid for channel in emulator.state().channels}) == 2


@pytest.mark.parametrize(
    ("cls", "parent", "params"),
    [
        (SUBDEVICE, "client", bytes(4)),
        (TSG, "subdevice", tsg_params(0)),
        (CHANNEL, "vaspace", channel_params(0)),
        (COMPUTE, "tsg", b""),
        (LOCAL_MEMORY, "tsg", memory_params(4096)),
        (DEVICE, "device", bytes(56)),
    ],
)
def test_a_class_below_the_wrong_parent_is_refused(process: RmProcess, cls: int, parent: str, params: bytes) -> None:
    tree = grow_tree(process)

    assert tree.alloc(getattr(tree, parent), 0, cls, params).status == BAD_PARENT


def test_a_device_has_one_subdevice(process: RmProcess) -> None:
    tree = grow_tree(process)

    assert tree.alloc(tree.device, 0, SUBDEVICE, bytes(4)).status == 0x40


def test_an_unknown_class_is_refused_and_counted(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)

    assert tree.alloc(tree.device, 0, 0x7777, b"").status == 0x22
    assert emulator.state().unknown("classes") == {0x7777: 1}


def test_a_channel_below_a_device_gets_a_group_of_its_own(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process, channels=1)
    params = bytearray(channel_params(tree.vaspace))
    params[128:132] = struct.pack("<I", 9)  # copy engine 0

    tree.alloc(tree.device, 0x5C000030, CHANNEL, bytes(params))

    alone = next(channel for channel in emulator.state().channels if channel.h_channel == 0x5C000030)
    assert (alone.engine, alone.is_compute) == (9, False)
    assert alone.tsg not in {
        channel.tsg for channel in emulator.state().channels if channel is not alone and channel.h_channel != 0x5C000030
    }


def test_channel_ids_of_a_foreign_process_can_be_verified(process: RmProcess, another: RmProcess) -> None:
    workload, daemon = grow_tree(process, channels=2), grow_tree(another, channels=0)

    def ask(pairs: list[tuple[int, int]]) -> tuple[int, list[int]]:
        clients = [pair[0] for pair in pairs] + [0] * (128 - len(pairs))
        channels = [pair[1] for pair in pairs] + [0] * (128 - len(pairs))
        params = struct.pack("<256II128I", *clients, *channels, len(pairs), *([0] * 128))
        answer = daemon.control(daemon.subdevice, CHANNEL_IDS, params)
        return answer.status, list(struct.unpack_from(f"<{len(pairs)}I", answer.params, 1028))

    assert (OK, workload.cids) == ask(workload.pairs)
    assert ask([(workload.client, 0x5C0000FF)])[0] == NOT_FOUND


def dup(into: Tree, source: Tree, handle: int) -> int:
    arg = struct.pack("<7I", into.client, into.device, 0, source.client, handle, 0, 0)
    return into.process.ioctl(into.ctl, request(DUP, 28), arg).word(24)


def test_memory_and_groups_can_be_duplicated_within_a_process_but_channels_cannot(process: RmProcess) -> None:
    source, target = grow_tree(process), grow_tree(process)
    memory = source.allocate_memory(1 << 20).handle

    assert dup(target, source, memory) == OK
    assert dup(target, source, source.tsg) == OK
    assert dup(target, source, source.channels[0]) == BAD_ARGUMENT


def share(owner: Tree, handle: int, kind: int, target: int = 0) -> int:
    arg = struct.pack("<IIIIHBBI", owner.client, handle, target, 1, kind, 0, 0, 0)
    return owner.process.ioctl(owner.ctl, request(0x35, 24), arg).word(20)


def test_another_process_may_duplicate_only_what_its_owner_shared(process: RmProcess, another: RmProcess) -> None:
    owner, taker = grow_tree(process), grow_tree(another)

    before = dup(taker, owner, owner.tsg)
    shared = share(owner, owner.tsg, 3, taker.client)
    after = dup(taker, owner, owner.tsg)

    assert [before, shared, after] == [NO_PERMISSION, OK, OK]


def test_a_duplicated_group_outlives_its_owner(emulator: Emulator, process: RmProcess, another: RmProcess) -> None:
    owner, taker = grow_tree(process), grow_tree(another)
    share(owner, owner.tsg, 1)
    arg = struct.pack("<7I", taker.client, taker.device, 0x5C000050, owner.client, owner.tsg, 0, 0)
    another.ioctl(taker.ctl, request(DUP, 28), arg)

    process.kill()
    emulator.wait(lambda state: len(state.raw["clients"]) == 1, "the owner's client gone")

    assert taker.control(0x5C000050, 0xA06C0104, bytes(8)).status == OK
