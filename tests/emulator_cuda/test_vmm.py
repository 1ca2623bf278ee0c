"""Virtual memory management: the rules of the real calls, holes, sharing between processes, sparse ranges."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from ctypes import byref, c_int, c_uint64

from cuda_driver import ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, Cuda
from cuda_memory import (
    MIB,
    PAGE,
    READ_WRITE,
    Access,
    Prop,
    allow,
    backed,
    create,
    daemon_with_uvm,
    reserve,
    wrong_tags,
)
from emulated import on_gpu
from gate_process import gate_of
from valve_tools.emulator.process import inside_ns

ALREADY_MAPPED, OPERATING_SYSTEM = 208, 304


@on_gpu()
def test_a_mapping_gives_no_access_until_it_is_set(cuda: Cuda) -> None:
    cuda.start()
    address = reserve(cuda, PAGE)
    cuda.cuMemMap(address, PAGE, 0, create(cuda), 0)
    flags = c_uint64(9)
    cuda.cuMemGetAccess(byref(flags), byref(Access(1, 0)), address)
    cuda.launch(cuda.kernel("emu_touch"), address, 4096, 4096)

    assert flags.value == 0
    assert cuda.call("cuCtxSynchronize") == ILLEGAL_ADDRESS


@on_gpu()
def test_mapped_memory_is_memory(cuda: Cuda) -> None:
    cuda.start()
    address, wrong = backed(cuda, 3), cuda.alloc(8)
    cuda.cuMemsetD8_v2(wrong, 0, 8)
    cuda.launch(cuda.kernel("emu_tag"), address, 3 * PAGE, 42)
    cuda.launch(cuda.kernel("emu_check"), address, 3 * PAGE, 42, wrong)
    flags = c_uint64()
    cuda.cuMemGetAccess(byref(flags), byref(Access(1, 0)), address + PAGE)

    assert cuda.read(wrong, 8) == bytes(8)
    assert flags.value == READ_WRITE


@on_gpu()
def test_the_refusals_of_the_real_calls(cuda: Cuda) -> None:
    cuda.start()
    address, handle = reserve(cuda, 4 * PAGE), create(cuda, 2 * PAGE)
    refused = {
        "size is no whole page": cuda.call("cuMemCreate", byref(c_uint64()), 4096, byref(Prop(1, 0, 1, 0)), 0),
        "offset is not 0": cuda.call("cuMemMap", address, PAGE, PAGE, handle, 0),
        "not reserved": cuda.call("cuMemMap", address + 4 * PAGE, PAGE, 0, handle, 0),
        "larger than the handle": cuda.call("cuMemMap", address, 4 * PAGE, 0, handle, 0),
        "nothing mapped": cuda.call("cuMemUnmap", address, 2 * PAGE),
    }
    cuda.cuMemMap(address, 2 * PAGE, 0, handle, 0)
    refused |= {
        "part of a mapping": cuda.call("cuMemUnmap", address, PAGE),
        "beyond the mappings": cuda.call("cuMemUnmap", address, 3 * PAGE),
        "access to more than is mapped": allow(cuda, address, 3 * PAGE),
        "still mapped": cuda.call("cuMemAddressFree", address, 4 * PAGE),
        "not exportable": cuda.call("cuMemExportToShareableHandle", byref(c_int()), create(cuda, PAGE, 0), 1, 0),
    }

    assert dict.fromkeys(refused, INVALID_VALUE) == refused
    assert cuda.call("cuMemMap", address, 2 * PAGE, 0, handle, 0) == ALREADY_MAPPED
    assert cuda.call("cuMemCreate", byref(c_uint64()), 2 << 30, byref(Prop(1, 0, 1, 0)), 0) == OUT_OF_MEMORY


@on_gpu()
def test_one_unmap_may_cover_many_mappings_and_leaves_a_hole(cuda: Cuda) -> None:
    cuda.start()
    address = backed(cuda, 4)
    cuda.cuMemUnmap(address + PAGE, 2 * PAGE)
    cuda.launch(cuda.kernel("emu_touch"), address, PAGE, 4096)
    cuda.cuCtxSynchronize()
    cuda.launch(cuda.kernel("emu_touch"), address, 4 * PAGE, 4096)

    assert cuda.call("cuCtxSynchronize") == ILLEGAL_ADDRESS


@on_gpu()
def test_one_handle_may_stand_in_many_places(cuda: Cuda) -> None:
    """The quarantine page: all ranges show the same bytes."""
    cuda.start()
    address, handle = reserve(cuda, 8 * PAGE), create(cuda)
    for page in range(8):
        cuda.cuMemMap(address + page * PAGE, PAGE, 0, handle, 0)
    allow(cuda, address, 8 * PAGE)
    cuda.write(address + 3 * PAGE, b"seen")

    assert {cuda.read(address + page * PAGE, 4) for page in range(8)} == {b"seen"}
    assert cuda.emulator.state().used_bytes() < 4 * PAGE + 32 * MIB


@on_gpu()
def test_memory_lives_until_its_last_mapping_and_handle_are_gone(cuda: Cuda) -> None:
    cuda.start()
    before = cuda.emulator.state().used_bytes()
    address, handle = reserve(cuda, PAGE), create(cuda)
    cuda.cuMemMap(address, PAGE, 0, handle, 0)
    allow(cuda, address, PAGE)
    cuda.cuMemRelease(handle)
    kept = cuda.value("cuMemRetainAllocationHandle", address + 100)
    used = [cuda.emulator.state().used_bytes() - before]
    cuda.cuMemUnmap(address, PAGE)
    used.append(cuda.emulator.state().used_bytes() - before)
    cuda.cuMemRelease(kept)
    used.append(cuda.emulator.state().used_bytes() - before)
    cuda.cuMemAddressFree(address, PAGE)

    assert kept == handle
    assert used == [PAGE, PAGE, 0]
    assert cuda.call("cuMemRelease", kept) == INVALID_VALUE


@on_gpu()
def test_host_memory_can_be_mapped_as_collective_libraries_do(cuda: Cuda) -> None:
    cuda.start()
    address = reserve(cuda, PAGE)
    cuda.cuMemMap(address, PAGE, 0, create(cuda, place=3), 0)
    allow(cuda, address, PAGE)
    cuda.write(address, b"numa")

    assert cuda.read(address, 4) == b"numa"


def export_fd(cuda: Cuda, handle: int) -> int:
    fd = c_int(-1)
    cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, 0)
    return fd.value


IMPORTER = """
from ctypes import byref, c_void_p
from cuda_driver import Cuda
from cuda_memory import PAGE, allow, reserve
cuda = Cuda().start()
handle = cuda.value("cuMemImportFromShareableHandle", c_void_p({fd}), 1)
address = reserve(cuda, PAGE)
cuda.cuMemMap(address, PAGE, 0, handle, 0)
assert allow(cuda, address, PAGE) == 0
assert cuda.read(address, 5) == b"hello"
cuda.write(address, b"there")
"""


@on_gpu()
def test_an_exported_handle_is_the_same_memory_in_another_process(cuda: Cuda) -> None:
    cuda.start()
    address, handle = reserve(cuda, PAGE), create(cuda)
    cuda.cuMemMap(address, PAGE, 0, handle, 0)
    allow(cuda, address, PAGE)
    cuda.write(address, b"hello")
    fd = export_fd(cuda, handle)
    program = IMPORTER.format(fd=fd)
    done = subprocess.run([sys.executable, "-c", program], pass_fds=[fd], check=False)

    assert done.returncode == 0
    assert cuda.read(address, 5) == b"there"


@on_gpu()
def test_an_exported_fd_alone_keeps_the_memory(cuda: Cuda) -> None:
    cuda.start()
    before = cuda.emulator.state().used_bytes()
    handle = create(cuda)
    fd = export_fd(cuda, handle)
    cuda.cuMemRelease(handle)
    held = cuda.emulator.state().used_bytes() - before
    os.close(fd)
    cuda.emulator.wait(lambda state: state.used_bytes() == before, "the memory is back")

    assert held == PAGE


@on_gpu()
def test_a_sparse_range_reads_zeros_and_can_be_backed_again(cuda: Cuda) -> None:
    """Given the uvm fd elsewhere, when a range is made sparse there, then kernels here read zeros and nobody faults."""
    cuda.start()
    address = backed(cuda, 4)
    cuda.launch(cuda.kernel("emu_tag"), address, 4 * PAGE, 7)
    cuda.cuCtxSynchronize()
    with daemon_with_uvm(cuda) as sparse:
        answer = sparse(address + PAGE, 2 * PAGE)
    zeros_wrong = wrong_tags(cuda, address + PAGE, 2 * PAGE, 0)
    tags_wrong = wrong_tags(cuda, address, PAGE, 7)
    cuda.cuMemUnmap(address + PAGE, 2 * PAGE)
    cuda.cuMemMap(address + PAGE, PAGE, 0, create(cuda), 0)

    assert (answer, zeros_wrong, tags_wrong) == ((0, 0), 0, 0)
    assert allow(cuda, address + PAGE, PAGE) == 0
    assert wrong_tags(cuda, address + PAGE, PAGE, 0) == 0
    cuda.launch(cuda.kernel("emu_touch"), address + 2 * PAGE, 4096, 4096)
    assert cuda.call("cuCtxSynchronize") == ILLEGAL_ADDRESS


@on_gpu()
def test_writes_to_a_sparse_range_are_dropped(cuda: Cuda) -> None:
    """Later kernels read zeros again, and the memory that was mapped there keeps its bytes."""
    cuda.start()
    handle, address = create(cuda, 2 * PAGE), reserve(cuda, 4 * PAGE)
    for at in (0, 2 * PAGE):
        cuda.cuMemMap(address + at, 2 * PAGE, 0, handle, 0)
    allow(cuda, address, 4 * PAGE)
    cuda.launch(cuda.kernel("emu_tag"), address, 2 * PAGE, 7)
    cuda.cuCtxSynchronize()
    with daemon_with_uvm(cuda) as sparse:
        sparse(address, 2 * PAGE)
    for tag in (1, 2, 3):
        cuda.launch(cuda.kernel("emu_tag"), address, 2 * PAGE, tag)
    cuda.cuMemsetD8_v2(address, 9, PAGE)
    cuda.write(address, b"hello")

    assert wrong_tags(cuda, address, 2 * PAGE, 0) == 0
    assert wrong_tags(cuda, address + 2 * PAGE, 2 * PAGE, 7) == 0


@on_gpu()
def test_a_hole_kills_the_context_that_met_it_and_no_other(cuda: Cuda) -> None:
    """Given two processes on the card, when a kernel of one touches a hole, then that one gets 700 for ever, the kernel
    log names it, and the other goes on."""
    cuda.start()
    address = backed(cuda)
    cuda.cuMemUnmap(address, PAGE)
    with gate_of(cuda) as other:
        cuda.launch(cuda.kernel("emu_touch"), address + 4096, 4096, 4096)
        results = [cuda.call("cuCtxSynchronize"), cuda.call("cuMemAlloc_v2", byref(c_uint64()), 4096)]
        log, state = cuda.emulator.kernel_log(), cuda.emulator.state()
        other.close()

    assert results == [ILLEGAL_ADDRESS, ILLEGAL_ADDRESS]
    assert state.raw["mmu_faults"] == 1
    assert f"31, pid={os.getpid()}, Ch" in log
    assert f"faulted @ 0x{address >> 32:x}_{address + 4096 & 0xFFFFFFFF:08x}" in log


@on_gpu()
def test_an_unmap_that_waits_for_the_context_dead_locks_while_gated(cuda: Cuda) -> None:
    """The hazard of a helper thread, as a setting of one process that can be changed while it runs."""
    cuda.start()
    address = backed(cuda)
    cuda.emulator.process(os.getpid()).set(unmap_waits=1)
    with gate_of(cuda) as gate:
        gate.close()
        cuda.launch(cuda.kernel("emu_spin"), 1000)
        thread = threading.Thread(target=cuda.cuMemUnmap, args=(address, PAGE))
        thread.start()
        thread.join(0.05)
        stuck = thread.is_alive()
        gate.open()
        thread.join()

    assert stuck


@on_gpu(knobs={"gpfifo_depth": "4"})
def test_a_launch_that_blocks_can_keep_out_a_thread_that_moves_memory(cuda: Cuda) -> None:
    """The other hazard: the queue is full while gated, and the launch holds a lock of the library."""
    cuda.start()
    address, handle = reserve(cuda, PAGE), create(cuda)
    kernel = cuda.kernel("emu_spin")
    cuda.emulator.process(os.getpid()).set(launch_locks=1)

    def launch_many() -> None:
        cuda.cuCtxSetCurrent(cuda.context)
        for _ in range(8):
            cuda.launch(kernel, 10)

    with gate_of(cuda) as gate:
        gate.close()
        launches = threading.Thread(target=launch_many)
        launches.start()
        cuda.emulator.wait(lambda state: any(c.pending == 4 for c in state.of(os.getpid())), "the queue is full")
        mapping = threading.Thread(target=cuda.cuMemMap, args=(address, PAGE, 0, handle, 0))
        mapping.start()
        mapping.join(0.05)
        stuck = (launches.is_alive(), mapping.is_alive())
        gate.open()
        launches.join()
        mapping.join()

    assert stuck == (True, True)


@on_gpu()
def test_out_of_files_an_export_fails_and_nothing_is_lost(cuda: Cuda) -> None:
    cuda.start()
    handles = [create(cuda) for _ in range(16)]
    used = cuda.emulator.state().used_bytes()
    low = sum(int(fd) < 700 for fd in os.listdir("/proc/self/fd"))  # the driver's own descriptors lie higher
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low + 2, limits[1]))
    fd = c_int(-1)
    codes = [cuda.call("cuMemExportToShareableHandle", byref(fd), handle, 1, 0) for handle in handles]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert codes[0] == 0
    assert codes[-1] == OPERATING_SYSTEM
    assert cuda.emulator.state().used_bytes() == used
    assert cuda.call("cuMemExportToShareableHandle", byref(fd), handles[-1], 1, 0) == 0


@on_gpu(knobs={"map_us": "36", "unmap_us": "26", "alloc_us": "193", "book_us": "1.5"})
def test_the_time_in_driver_calls_is_published_by_kind(cuda: Cuda) -> None:
    """The wall clock decides nothing but lower bounds: a sleep is never shorter than the model says."""
    cuda.start()
    page = cuda.emulator.process(os.getpid())
    begin = time.monotonic_ns()
    address = backed(cuda, 50)
    cuda.cuMemUnmap(address, 50 * PAGE)
    end = time.monotonic_ns()
    spent = page.spent()
    counts = {kind: spent[kind].count for kind in ("reserve", "create", "map", "access", "unmap")}
    model_us = {kind: spent[kind].model_ns / 1000 for kind in ("create", "map", "access", "unmap")}

    assert counts == {"reserve": 1, "create": 50, "map": 50, "access": 1, "unmap": 1}
    assert model_us == {"create": 50 * 193, "map": 50 * 1.5, "access": 50 * 36, "unmap": 50 * 26}
    assert inside_ns([page], begin, end) == sum(spent[kind].wall_ns for kind in counts)
    assert inside_ns([page], begin, end) >= 50 * (193 + 1.5 + 36 + 26) * 1000
    assert inside_ns([page], begin, end, lambda call: call.kind == "access") == spent["access"].wall_ns
    assert {call.thread for call in page.intervals(begin)} == {threading.get_native_id()}
    assert spent["map ioctl"].count == 0  # those inside cuMemSetAccess are part of it


@on_gpu()
def test_the_costs_of_a_card_are_set_by_its_name(cuda: Cuda) -> None:
    cuda.emulator.set(costs="gb10")
    knobs = cuda.emulator.knobs()
    cuda.start()
    handle, address = create(cuda, 64 * MIB), reserve(cuda, 64 * MIB)
    cuda.cuMemMap(address, 64 * MIB, 0, handle, 0)
    allow(cuda, address, 64 * MIB)
    spent = cuda.emulator.process(os.getpid()).spent()

    assert (knobs["map_us"], knobs["map_mib_us"], knobs["book_us"]) == (23.6, 4.7, 1.45)
    assert spent["access"].model_ns == 23_600 + 64 * 4_700


@on_gpu()
def test_zeroing_gives_zeros_wherever_it_begins_and_ends(cuda: Cuda) -> None:
    """Whole pages are dropped, the rest is written, and a second mapping of the memory sees the same."""
    cuda.start()
    handle, address = create(cuda, 2 * PAGE), reserve(cuda, 4 * PAGE)
    for at in (0, 2 * PAGE):
        cuda.cuMemMap(address + at, 2 * PAGE, 0, handle, 0)
    allow(cuda, address, 4 * PAGE)
    cuda.cuMemsetD32_v2(address, 0x01010101, 2 * PAGE // 4)
    cuda.cuMemsetD8_v2(address + 4096 - 3, 0, PAGE + 6)
    expected = b"\1" * 4093 + bytes(PAGE + 6) + b"\1" * (PAGE - 4096 - 3)

    assert cuda.read(address, 2 * PAGE) == expected
    assert cuda.read(address + 2 * PAGE, 2 * PAGE) == expected
    cuda.cuMemUnmap(address, 2 * PAGE)
    assert cuda.call("cuMemsetD8_v2", address, 0, PAGE) == ILLEGAL_ADDRESS


@on_gpu()
def test_a_range_leaves_as_a_file_only_when_one_mapping_holds_it(cuda: Cuda) -> None:
    """What registers memory with a NIC gets a file; it pins those pages, so a range over two handles is refused."""
    cuda.start()
    address, plain, fd = backed(cuda, 2), cuda.alloc(4 * MIB), c_int(-1)
    cuda.write(address, b"pinned")
    cuda.cuMemGetHandleForAddressRange(byref(fd), address, PAGE, 1, 0)

    assert os.pread(fd.value, 6, 0) == b"pinned"
    assert cuda.call("cuMemGetHandleForAddressRange", byref(fd), address, 2 * PAGE, 1, 0) == INVALID_VALUE
    assert cuda.call("cuMemGetHandleForAddressRange", byref(fd), plain, 4 * MIB, 1, 0) == 0


@on_gpu()
def test_a_nic_goes_on_writing_to_the_pages_that_it_was_given(cuda: Cuda) -> None:
    """Remapping the range does not reach the registration: its memory may be somebody else's by now."""
    cuda.start()
    address, given, fd = reserve(cuda, PAGE), create(cuda), c_int(-1)
    cuda.cuMemMap(address, PAGE, 0, given, 0)
    allow(cuda, address, PAGE)
    cuda.cuMemGetHandleForAddressRange(byref(fd), address, PAGE, 1, 0)
    cuda.cuMemUnmap(address, PAGE)
    cuda.cuMemMap(address, PAGE, 0, create(cuda), 0)
    allow(cuda, address, PAGE)
    os.pwrite(fd.value, b"late", 0)
    here = cuda.read(address, 4)
    cuda.cuMemUnmap(address, PAGE)
    cuda.cuMemMap(address, PAGE, 0, given, 0)
    allow(cuda, address, PAGE)

    assert (here, cuda.read(address, 4)) == (bytes(4), b"late")


@on_gpu()
def test_mapped_ranges_cannot_be_shared_by_the_old_calls(cuda: Cuda) -> None:
    cuda.start()
    address, capable = backed(cuda), ctypes.c_ubyte(9)
    cuda.cuPointerGetAttribute(byref(capable), 10, address)

    assert capable.value == 0
    assert cuda.call("cuIpcGetMemHandle", ctypes.create_string_buffer(64), address) == INVALID_VALUE
