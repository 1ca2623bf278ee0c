"""Device and pinned memory: books that balance with the server's, honest refusals, copies that copy."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from cuda_driver import ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, Cuda
from emulated import on_gpu

MIB = 1 << 20
ARENA = 0x7EA000000000


def words(cuda: Cuda, address: int, count: int) -> list[int]:
    data = cuda.read(address, 8 * count)
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(count)]


@on_gpu()
def test_memory_is_accounted_with_the_node_and_given_back(cuda: Cuda) -> None:
    cuda.start()
    before = cuda.emulator.state().used_bytes()
    large, small = cuda.alloc(100 * MIB + 1), [cuda.alloc(700) for _ in range(10)]
    held, free = cuda.emulator.state().used_bytes() - before, cuda.free_bytes()
    for address in [large, *small]:
        cuda.cuMemFree_v2(address)

    assert held == 104 * MIB  # whole 2 MiB pages: 102 for the large one, one for all the small ones
    assert free == (1 << 30) - cuda.emulator.state().used_bytes() - held
    assert cuda.emulator.state().used_bytes() == before
    assert large >= ARENA


@on_gpu()
def test_small_allocations_do_not_overlap_and_are_aligned(cuda: Cuda) -> None:
    cuda.start()
    sizes = [1, 511, 512, 513, 4096, 100_000, 900_000] * 6
    pieces = sorted((cuda.alloc(size), size) for size in sizes)

    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(pieces))
    assert {address % 512 for address, _ in pieces} == {0}


@on_gpu()
def test_more_than_the_card_has_is_refused_and_costs_nothing(cuda: Cuda) -> None:
    cuda.start()
    used = cuda.emulator.state().used_bytes()

    assert cuda.call("cuMemAlloc_v2", byref(c_uint64()), 2 << 30) == OUT_OF_MEMORY
    assert cuda.emulator.state().used_bytes() == used
    cuda.alloc(512 * MIB)
    assert cuda.call("cuMemAlloc_v2", byref(c_uint64()), 600 * MIB) == OUT_OF_MEMORY
    assert cuda.call("cuMemAlloc_v2", byref(c_uint64()), 0) == INVALID_VALUE


@on_gpu()
def test_what_was_never_allocated_cannot_be_freed(cuda: Cuda) -> None:
    cuda.start()
    address = cuda.alloc(4 * MIB)

    assert cuda.call("cuMemFree_v2", address + 512) == INVALID_VALUE
    assert cuda.call("cuMemFree_v2", 0) == 0
    cuda.cuMemFree_v2(address)
    assert cuda.call("cuMemFree_v2", address) == INVALID_VALUE


@on_gpu()
def test_fills_of_every_width_and_pitch(cuda: Cuda) -> None:
    cuda.start()
    address = cuda.alloc(4096)
    cuda.cuMemsetD8_v2(address, 0, 4096)
    cuda.cuMemsetD32_v2(address, 0x01020304, 2)
    cuda.cuMemsetD16_v2(address + 8, 0xBEEF, 4)
    cuda.cuMemsetD2D8_v2(address + 16, 8, 0x11, 4, 2)

    assert words(cuda, address, 4) == [0x0102030401020304, 0xBEEFBEEFBEEFBEEF, 0x11111111, 0x11111111]
    assert cuda.call("cuMemsetD32_v2", address + 1, 0, 1) == INVALID_VALUE


@on_gpu()
def test_boxes_are_copied_row_by_row(cuda: Cuda) -> None:
    """Given a 4 x 3 box in rows of 16 bytes, when it is copied to rows of 32, then only the box arrives."""
    cuda.start()
    address, source = cuda.alloc(4096), ctypes.create_string_buffer(bytes(range(48)), 48)
    cuda.cuMemsetD8_v2(address, 0xFF, 96)
    source_side = [2, 1, 1, ctypes.addressof(source), 0, 0, 16]
    target_side = [0, 0, 2, 0, address, 0, 32]
    cuda.cuMemcpy2D_v2((c_uint64 * 16)(*source_side, *target_side, 4, 2))
    rows = cuda.read(address, 64)

    assert (rows[:4], rows[32:36]) == (bytes([18, 19, 20, 21]), bytes([34, 35, 36, 37]))
    assert rows[4:32] == b"\xff" * 28


@on_gpu()
def test_a_pageable_source_may_change_as_soon_as_the_call_returns(cuda: Cuda) -> None:
    cuda.start()
    stream, address = cuda.stream(), cuda.alloc(4 * MIB)
    cuda.launch(cuda.kernel("emu_spin"), 5000, stream=stream)
    results = []
    for size in (4096, 3 * MIB):
        source = ctypes.create_string_buffer(b"a" * size, size)
        cuda.cuMemcpyHtoDAsync_v2(address, source, size, stream)
        ctypes.memset(source, ord("b"), size)
        cuda.cuStreamSynchronize(stream)
        results.append(cuda.read(address, size))

    assert results == [b"a" * 4096, b"a" * (3 * MIB)]


@on_gpu()
def test_a_copy_from_a_bad_address_faults_instead_of_crashing(cuda: Cuda) -> None:
    cuda.start()
    address = cuda.alloc(4096)

    assert cuda.call("cuMemcpyHtoD_v2", address, 64, 4096) == ILLEGAL_ADDRESS


@on_gpu()
def test_pinned_memory_is_seen_by_the_device_and_registered_only_once(cuda: Cuda) -> None:
    cuda.start()
    own = ctypes.create_string_buffer(8192)
    page = (ctypes.addressof(own) + 4095) & ~4095
    cuda.cuMemHostRegister_v2(page, 4096, 0)
    cuda.launch(cuda.kernel("emu_fill"), cuda.value("cuMemHostGetDevicePointer_v2", page, 0), 64, 9)
    cuda.cuCtxSynchronize()

    assert c_uint64.from_address(page + 56).value == 9
    assert cuda.call("cuMemHostRegister_v2", page + 64, 64, 0) == 712
    cuda.cuMemHostUnregister(page)
    assert cuda.call("cuMemHostUnregister", page) == 713


@on_gpu()
def test_addresses_tell_what_they_are(cuda: Cuda) -> None:
    cuda.start()
    address, page = cuda.alloc(3 * MIB), cuda.pinned(4096)
    base, size, kind = c_uint64(), c_size_t(), c_int()
    cuda.cuMemGetAddressRange_v2(byref(base), byref(size), address + 5)
    kinds = []
    for pointer in (address + 5, page):
        cuda.cuPointerGetAttribute(byref(kind), 2, pointer)
        kinds.append(kind.value)
    ordinal, start = c_int(-1), c_uint64()
    attributes, answers = (c_int * 2)(9, 11), (c_void_p * 2)(ctypes.addressof(ordinal), ctypes.addressof(start))
    cuda.cuPointerGetAttributes(2, attributes, answers, address + 5)

    assert (base.value, size.value) == (address, 3 * MIB)
    assert kinds == [2, 1]
    assert (ordinal.value, start.value) == (0, address)
    assert cuda.call("cuPointerGetAttribute", byref(kind), 2, 4096) == INVALID_VALUE


@on_gpu()
def test_pools_hand_out_at_once_and_take_back_in_stream_order(cuda: Cuda) -> None:
    cuda.start()
    stream, used = cuda.stream(), c_uint64()
    address = cuda.value("cuMemAllocAsync", 4 * MIB, stream)
    pool = cuda.value("cuDeviceGetDefaultMemPool", 0, kind=c_void_p)
    cuda.launch(cuda.kernel("emu_fill"), address, 4 * MIB, 3, stream=stream)
    cuda.cuMemFreeAsync(address, stream)
    cuda.cuStreamSynchronize(stream)
    cuda.cuMemPoolGetAttribute(pool, 7, byref(used))

    assert used.value == 0
    assert cuda.call("cuMemFree_v2", address) == INVALID_VALUE
    assert cuda.call("cuCtxSynchronize") == 0
