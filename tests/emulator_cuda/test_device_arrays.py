"""Device memory as arrays of the program: what an engine on the CPU keeps its KV cache in."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cuda_driver import Cuda, word
from cuda_memory import PAGE, allow, create, daemon_with_uvm, reserve
from emulated import on_gpu
from valve_tools.emulator.device import Device, DeviceError, address_of, view


@on_gpu()
def test_an_array_is_the_memory_that_kernels_see(cuda: Cuda) -> None:
    cuda.start()
    memory = Device().array(4 * PAGE)
    numbers = np.frombuffer(memory, dtype=np.uint64)
    numbers[:] = 5
    cuda.launch(cuda.kernel("emu_fill"), address_of(memory), PAGE, 7)
    cuda.cuCtxSynchronize()

    assert len(memory) == 4 * PAGE
    assert (set(numbers[: PAGE // 8]), set(numbers[PAGE // 8 :])) == ({7}, {5})
    assert word(address_of(memory) + PAGE) == 5


@on_gpu()
def test_what_is_mapped_under_an_array_shows_in_it(cuda: Cuda) -> None:
    """Given an array over mapped memory, when another handle or zeros take its place, then the array shows those."""
    cuda.start()
    address, first, second = reserve(cuda, 2 * PAGE), create(cuda, 2 * PAGE), create(cuda, 2 * PAGE)
    numbers = np.frombuffer(view(address, 2 * PAGE), dtype=np.float32)
    seen = []
    for handle, value in ((first, 1.5), (second, 2.5), (first, None)):
        cuda.cuMemMap(address, 2 * PAGE, 0, handle, 0)
        allow(cuda, address, 2 * PAGE)
        if value is not None:
            numbers[:] = value
        seen.append(float(numbers.mean()))
        if value is not None:
            cuda.cuMemUnmap(address, 2 * PAGE)
    with daemon_with_uvm(cuda) as sparse:
        sparse(address, PAGE)
    halves = numbers.reshape(2, -1)
    halves[0, 3] = 9.0  # a write of the program's own, outside any kernel
    with Device().step():
        halves[0, 7] = 9.0

    assert seen == [1.5, 2.5, 1.5]
    assert halves.mean(axis=1).tolist() == [0.0, 1.5]


@on_gpu()
def test_freed_memory_goes_back_to_the_card(cuda: Cuda) -> None:
    cuda.start()
    device = Device()
    before = cuda.emulator.state().used_bytes()
    memory = device.array(8 * PAGE)
    held = cuda.emulator.state().used_bytes() - before
    device.free(memory)

    assert (held, cuda.emulator.state().used_bytes()) == (8 * PAGE, before)
    with pytest.raises(DeviceError, match=r"cuMemFree_v2: CUDA_ERROR_INVALID_VALUE \(1\)"):
        device.free(memory)


@on_gpu()
def test_a_step_takes_the_cards_time_that_it_is_said_to_take(cuda: Cuda) -> None:
    """Twice: the kernel that only lasts is made once."""
    cuda.start()
    device = Device()
    took_ms = []
    for _ in range(2):
        began = time.monotonic()
        with device.step(least_us=20_000):
            pass
        took_ms.append((time.monotonic() - began) * 1e3)

    assert min(took_ms) >= 20.0
