"""Physical memory and who keeps it: allocation, export by fd, UVM mappings, quarantine from outside."""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass

import pytest
from rm_process import BAD_ARGUMENT, BAD_HANDLE, OK, RmProcess, Tree, grow_tree, use_uvm
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options

MIB = 1 << 20
EXPORT, IMPORT, EXPORT_INFO = 0x3D05, 0x3D06, 0x3D08
EXPORT_MANY, IMPORT_MANY = 0x3D0B, 0x3D0C
MAP, FREE_RANGE, UNMAP, CREATE_RANGE, SPARSE = 33, 34, 66, 73, 74
BAD_ADDRESS, ADDRESS_IN_USE, NO_MEMORY, OUT_OF_RANGE = 0x1E, 0x68, 0x51, 0x5B


def export(tree: Tree, memory: int) -> tuple[int, int]:
    """A fresh control file that holds the memory; returns (status, fd)."""
    fd = tree.process.open("/dev/nvidiactl")
    params = struct.pack("<IIIIiI", 1, tree.device, tree.device, memory, fd, 0)
    return tree.control(tree.client, EXPORT, params).status, fd


def take_in(tree: Tree, fd: int, handle: int = 0x5C0000B0) -> int:
    params = struct.pack("<iIIII", fd, 1, tree.device, tree.device, handle)
    return tree.control(tree.client, IMPORT, params).status


def test_memory_counts_against_the_card_until_it_is_freed(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)

    memory = tree.allocate_memory(3 * MIB)
    used = emulator.state().used_bytes()
    tree.free(memory.handle)

    assert (memory.status, used, emulator.state().used_bytes()) == (OK, 3 * MIB, 0)


@pytest.mark.parametrize("emulator", [Options(gpu_bytes=4 * MIB, knobs=NO_LATENCY)], indirect=True)
def test_a_full_card_refuses(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)

    statuses = [tree.allocate_memory(3 * MIB).status, tree.allocate_memory(2 * MIB).status]

    assert statuses == [OK, NO_MEMORY]


def test_a_broker_without_a_client_keeps_memory_by_holding_its_fd(
    emulator: Emulator, process: RmProcess, another: RmProcess
) -> None:
    tree = grow_tree(process)
    status, fd = export(tree, tree.allocate_memory(2 * MIB).handle)
    held = process.pass_fd(fd, another)

    process.kill()
    emulator.wait(lambda state: not state.raw["clients"], "the exporter gone")
    kept = emulator.state().used_bytes()
    another.call("close", fd=held)

    assert (status, kept) == (OK, 2 * MIB)
    emulator.wait(lambda state: state.used_bytes() == 0, "the memory returned")


def test_possession_of_the_fd_is_the_authority_to_import(process: RmProcess, another: RmProcess) -> None:
    owner, taker = grow_tree(process), grow_tree(another)
    _, fd = export(owner, owner.allocate_memory(2 * MIB).handle)
    passed = process.pass_fd(fd, another)

    info = taker.control(taker.client, EXPORT_INFO, struct.pack("<i", passed) + bytes(72))

    assert take_in(taker, passed) == OK
    assert (info.status, info.word(4), info.word(8) & 0xFFFF) == (OK, 0, 1)


def test_a_file_takes_one_export_and_must_be_fresh(process: RmProcess) -> None:
    tree = grow_tree(process)
    memory = tree.allocate_memory(2 * MIB).handle
    _, fd = export(tree, memory)

    def again(target: int) -> int:
        params = struct.pack("<IIIIiI", 1, tree.device, tree.device, memory, target, 0)
        return tree.control(tree.client, EXPORT, params).status

    assert [again(fd), again(tree.ctl)] == [BAD_ARGUMENT, BAD_ARGUMENT]
    assert export(tree, 0x5C0000FE)[0] == BAD_HANDLE


def test_one_file_can_carry_many_pieces_of_memory(emulator: Emulator, process: RmProcess, another: RmProcess) -> None:
    """The array forms: exported in two calls, one piece taken out again, the rest imported in one call."""
    owner, taker = grow_tree(process), grow_tree(another)
    handles = [owner.allocate_memory(2 * MIB).handle for _ in range(3)]
    fd = process.open("/dev/nvidiactl")

    def put(objects: list[int], index: int) -> int:
        params = struct.pack("<iIH64s2x", fd, owner.device, 3, b"pool") + struct.pack("<512I", *objects, *[0] * 511)
        return owner.control(owner.client, EXPORT_MANY, params[: 76 + 2048] + struct.pack("<HH", 1, index)).status

    statuses = [put([handle], index) for index, handle in enumerate(handles)] + [put([0], 1), put(handles[:1], 3)]
    passed = process.pass_fd(fd, another)
    process.kill()
    emulator.wait(lambda state: len(state.raw["clients"]) == 1, "the exporter gone")
    wanted = struct.pack("<128I", 0x5C0000B0, 0x5C0000B1, 0x5C0000B2, *[0] * 125)
    params = struct.pack("<iI", passed, taker.device) + wanted + bytes(128) + struct.pack("<HH", 3, 0)
    got = taker.control(taker.client, IMPORT_MANY, params)
    info = taker.control(taker.client, EXPORT_INFO, struct.pack("<i", passed) + bytes(72))

    assert statuses == [OK, OK, OK, OK, OUT_OF_RANGE]
    assert (got.status, got.params[520:524]) == (OK, bytes([1, 0, 1, 0]))
    assert (info.word(8) & 0xFFFF, info.params[10:14]) == (3, b"pool")
    assert emulator.state().used_bytes() == 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """An external range of UVM in a process, with the calls that change it from any process."""

    tree: Tree
    base: int
    length: int

    def map(self, memory: int, at: int, length: int, offset: int = 0) -> int:
        arg = struct.pack("<QQQ", self.base + at, length, offset) + bytes(256 * 36)
        arg += struct.pack("<QiIII", 1, self.tree.ctl, self.tree.client, memory, 0)
        return self.tree.process.ioctl(self.tree.uvm, MAP, arg).word(24 + 256 * 36 + 20)

    def _plain(self, number: int, at: int, length: int, by: tuple[RmProcess, int] | None = None) -> int:
        process, fd = by or (self.tree.process, self.tree.uvm)
        arg = struct.pack("<QQ", self.base + at, length) + self.tree.uuid + bytes(8)
        return process.ioctl(fd, number, arg).word(32)

    def unmap(self, at: int, length: int) -> int:
        return self._plain(UNMAP, at, length)

    def sparse(self, at: int, length: int, by: tuple[RmProcess, int] | None = None) -> int:
        return self._plain(SPARSE, at, length, by)

    def peek(self, at: int) -> int:
        return int(self.tree.process.call("peek", address=self.base + at))

    def poke(self, at: int, value: int) -> None:
        self.tree.process.call("poke", address=self.base + at, value=value)


@pytest.fixture
def addresses(process: RmProcess) -> Addresses:
    tree = grow_tree(process, channels=1)
    use_uvm(tree)
    length = 16 * MIB
    base = process.call("reserve", length=length)
    created = process.ioctl(tree.uvm, CREATE_RANGE, struct.pack("<QQII", base, length, 0, 0))
    assert created.word(16) == OK
    return Addresses(tree=tree, base=base, length=length)


def test_two_mappings_of_one_memory_see_each_other_s_writes(addresses: Addresses) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle

    statuses = [addresses.map(memory, at, 2 * MIB) for at in (0, 4 * MIB)]
    addresses.poke(64, 42)

    assert (statuses, addresses.peek(4 * MIB + 64)) == ([OK, OK], 42)


def test_a_mapping_replaces_what_was_there_in_place(addresses: Addresses) -> None:
    first, second = (addresses.tree.allocate_memory(4 * MIB).handle for _ in range(2))
    addresses.map(first, 0, 4 * MIB)
    addresses.poke(0, 1)
    addresses.poke(3 * MIB, 3)

    addresses.map(second, 0, 2 * MIB, offset=2 * MIB)

    assert (addresses.peek(0), addresses.peek(3 * MIB)) == (0, 3)


def test_unmapping_takes_any_part_on_a_page_boundary(emulator: Emulator, addresses: Addresses) -> None:
    """The card maps large memory by pages of 2 MiB; a cut through one is refused, a hole is no error."""
    memory = addresses.tree.allocate_memory(6 * MIB).handle
    addresses.map(memory, 0, 6 * MIB)
    addresses.poke(5 * MIB, 5)
    addresses.tree.free(memory)

    statuses = [addresses.unmap(2 * MIB, 2 * MIB), addresses.unmap(5 * MIB, MIB), addresses.unmap(0, 4 * MIB)]
    kept = (addresses.peek(5 * MIB), emulator.state().used_bytes())
    last = addresses.unmap(0, 6 * MIB)

    assert statuses == [OK, BAD_ADDRESS, OK]
    assert kept == (5, 6 * MIB)
    assert (last, emulator.state().used_bytes()) == (OK, 0)


def test_a_sparse_range_is_cut_like_any_other(addresses: Addresses) -> None:
    """Unmapping a part of it leaves a hole there and zeros beside it; a new mapping takes its place."""
    memory = addresses.tree.allocate_memory(8 * MIB).handle
    addresses.map(memory, 0, 8 * MIB)
    addresses.poke(4 * MIB, 4)

    statuses = [addresses.sparse(0, 6 * MIB), addresses.unmap(0, 2 * MIB), addresses.map(memory, 4 * MIB, MIB)]
    statuses.append(addresses.map(memory, 4 * MIB, 2 * MIB, offset=4 * MIB))

    assert (statuses, addresses.sparse(MIB, 4096)) == ([OK, OK, OK, OK], BAD_ADDRESS)
    assert (addresses.peek(2 * MIB), addresses.peek(4 * MIB)) == (0, 4)
    with pytest.raises(ProcessLookupError):
        addresses.peek(0)


def test_what_is_written_to_a_sparse_range_reaches_nobody_else(addresses: Addresses) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle
    for at in (0, 4 * MIB):
        addresses.map(memory, at, 2 * MIB)
    addresses.poke(0, 7)

    addresses.sparse(0, 2 * MIB)
    addresses.poke(0, 1)

    assert addresses.peek(4 * MIB) == 7


def test_an_access_to_a_hole_ends_the_process(emulator: Emulator, addresses: Addresses) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle
    addresses.map(memory, 0, 2 * MIB)
    addresses.unmap(0, 2 * MIB)

    with pytest.raises(ProcessLookupError):
        addresses.peek(0)


def test_a_daemon_quarantines_a_range_through_a_passed_fd(addresses: Addresses, another: RmProcess) -> None:
    """No library call in the owner, and no thread of the owner's that could be stuck: UVM alone."""
    memory = addresses.tree.allocate_memory(8 * MIB).handle
    addresses.map(memory, 0, 8 * MIB)
    for at in (0, 2 * MIB, 7 * MIB):
        addresses.poke(at, 7)
    passed = addresses.tree.process.pass_fd(addresses.tree.uvm, another)

    status = addresses.sparse(2 * MIB, 4 * MIB, by=(another, passed))

    assert status == OK
    assert [addresses.peek(at) for at in (0, 2 * MIB, 7 * MIB)] == [7, 0, 7]


def test_pages_of_a_process_that_stands_still_change_before_it_goes_on(
    emulator: Emulator, addresses: Addresses, another: RmProcess
) -> None:
    """A daemon may quarantine the memory of a stopped process: the call does not wait for it."""
    owner = addresses.tree.process
    memory = addresses.tree.allocate_memory(4 * MIB).handle
    addresses.map(memory, 0, 4 * MIB)
    addresses.poke(0, 7)
    passed = owner.pass_fd(addresses.tree.uvm, another)
    os.kill(owner.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WNOWAIT)

    statuses = [addresses.sparse(at, 2 * MIB, by=(another, passed)) for at in (0, 2 * MIB)]
    os.kill(owner.pid, signal.SIGCONT)

    assert statuses == [OK, OK]
    emulator.wait(lambda _: addresses.peek(0) == 0, "the pages have changed")
    assert "stands still" in emulator.kernel_log()


@pytest.mark.parametrize(
    ("fault", "status", "reads"), [("status 0x1f", 0x1F, 7), ("silent", OK, 7), ("hang 1ms", OK, 0)]
)
def test_making_sparse_can_fail_in_every_way(
    emulator: Emulator, addresses: Addresses, fault: str, status: int, reads: int
) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle
    addresses.map(memory, 0, 2 * MIB)
    addresses.poke(0, 7)
    emulator.fault(f"on sparse 1: {fault}")

    assert (addresses.sparse(0, 2 * MIB), addresses.peek(0)) == (status, reads)
    assert (addresses.sparse(0, 2 * MIB), addresses.peek(0)) == (OK, 0)


def test_a_mapping_keeps_memory_whose_handle_was_freed(emulator: Emulator, addresses: Addresses) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle
    addresses.map(memory, 0, 2 * MIB)

    addresses.tree.free(memory)
    mapped = emulator.state().used_bytes()
    addresses.unmap(0, 2 * MIB)

    assert (mapped, emulator.state().used_bytes()) == (2 * MIB, 0)


def test_ranges_do_not_overlap_and_are_freed_whole(addresses: Addresses) -> None:
    process, uvm = addresses.tree.process, addresses.tree.uvm
    middle = struct.pack("<QQII", addresses.base + MIB, MIB, 0, 0)
    whole = struct.pack("<QQII", addresses.base, addresses.length, 0, 0)

    assert [
        process.ioctl(uvm, CREATE_RANGE, middle).word(16),
        process.ioctl(uvm, FREE_RANGE, middle).word(16),
        process.ioctl(uvm, FREE_RANGE, whole).word(16),
    ] == [ADDRESS_IN_USE, BAD_ADDRESS, OK]


def test_a_uvm_file_must_be_initialised_first(process: RmProcess) -> None:
    uvm = process.open("/dev/nvidia-uvm")

    assert process.ioctl(uvm, CREATE_RANGE, struct.pack("<QQII", 1 << 40, MIB, 0, 0)).word(16) == 0x16


def test_a_mapping_larger_than_its_memory_is_refused(addresses: Addresses) -> None:
    memory = addresses.tree.allocate_memory(2 * MIB).handle

    assert addresses.map(memory, 0, 4 * MIB) == BAD_ARGUMENT
    assert addresses.map(0x5C0000FD, 0, 2 * MIB) == BAD_HANDLE
