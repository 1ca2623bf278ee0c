"""The driver objects a context is made of, as a reader of ioctls sees them."""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import byref, c_int, c_void_p

from cuda_driver import Cuda
from emulated import on_gpu

GR0, COPY0, COPY1 = 1, 9, 10


@on_gpu()
def test_a_context_has_eight_compute_channels_and_two_copy_engines(cuda: Cuda) -> None:
    cuda.start()
    channels = cuda.channels()

    assert Counter(c.engine for c in channels) == {GR0: 8, COPY0: 1, COPY1: 1}
    assert len({c.tsg for c in channels}) == 3
    assert all(c.uvm and c.scheduled and not c.disabled for c in channels)
    assert len({c.cid for c in channels}) == 10


@on_gpu()
def test_the_number_of_channels_is_what_max_connections_says(cuda: Cuda) -> None:
    ctypes.CDLL(None).setenv(b"CUDA_DEVICE_MAX_CONNECTIONS", b"3", 1)
    cuda.start()

    assert sum(c.is_compute for c in cuda.channels()) == 3


@on_gpu(cuda="xfer=1")
def test_the_calls_may_come_wrapped(cuda: Cuda) -> None:
    cuda.start()
    cuda.launch(cuda.kernel("emu_spin"), 10)
    cuda.cuCtxSynchronize()

    assert len(cuda.channels()) == 10


def use(cuda: Cuda) -> None:
    cuda.start()
    cuda.launch(cuda.kernel("emu_fill"), cuda.alloc(2 << 20), 4096, 1)
    cuda.cuCtxSynchronize()
    state = cuda.emulator.state()
    assert len(cuda.channels()) == 10
    assert [state.unknown(kind) for kind in ("controls", "classes", "escapes", "uvm")] == [{}] * 4


@on_gpu(knobs={"driver": "535.183.01"})
def test_it_speaks_the_layouts_of_branch_535(cuda: Cuda) -> None:
    use(cuda)


@on_gpu(knobs={"driver": "570.86.16"})
def test_it_speaks_the_layouts_of_branch_570(cuda: Cuda) -> None:
    use(cuda)


@on_gpu(knobs={"driver": "595.45.04"})
def test_it_speaks_the_layouts_of_branch_595(cuda: Cuda) -> None:
    use(cuda)


@on_gpu()
def test_the_primary_context_is_counted_and_gone_with_its_last_user(cuda: Cuda) -> None:
    cuda.start()
    again = c_void_p()
    cuda.cuDevicePrimaryCtxRetain(byref(again), 0)
    cuda.alloc(8 << 20)
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    kept = len(cuda.channels())
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    active = c_int(-1)
    cuda.cuDevicePrimaryCtxGetState(0, 0, byref(active))

    assert again.value == cuda.context.value  # type: ignore[union-attr]
    assert (kept, len(cuda.channels()), active.value) == (10, 0, 0)
    assert cuda.emulator.state().used_bytes() == 0


@on_gpu()
def test_contexts_stack_per_thread(cuda: Cuda) -> None:
    cuda.start()
    second = c_void_p()
    cuda.cuCtxCreate_v2(byref(second), 0, 0)
    top = cuda.value("cuCtxGetCurrent", kind=c_void_p)
    cuda.cuCtxPopCurrent_v2(byref(c_void_p()))
    below = cuda.value("cuCtxGetCurrent", kind=c_void_p)
    cuda.cuCtxDestroy_v2(second)

    assert (top, below) == (second.value, cuda.context.value)  # type: ignore[union-attr]
    assert cuda.call("cuCtxSetCurrent", second) == 201
    assert len(cuda.channels()) == 10


@on_gpu(gpus=2)
def test_each_gpu_has_channels_of_its_own(cuda: Cuda) -> None:
    cuda.start()
    other = c_void_p()
    cuda.cuDevicePrimaryCtxRetain(byref(other), 1)
    cuda.cuCtxSetCurrent(other)
    cuda.launch(cuda.kernel("emu_spin"), 10)
    cuda.cuCtxSynchronize()

    assert Counter(c.gpu for c in cuda.channels()) == {0: 10, 1: 10}
    assert [c.gpu for c in cuda.channels() if c.launches] == [1]


@on_gpu()
def test_the_card_says_what_it_is(cuda: Cuda) -> None:
    cuda.cuInit(0)
    name, uuid = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
    cuda.cuDeviceGetName(name, 64, 0)
    cuda.cuDeviceGetUuid_v2(uuid, 0)
    major = cuda.value("cuDeviceGetAttribute", 75, 0, kind=c_int)

    assert name.value.startswith(b"NVIDIA H100")
    assert uuid.raw.hex() == cuda.emulator.state().raw["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", "")
    assert (major, cuda.value("cuDeviceGetAttribute", 90, 0, kind=c_int)) == (9, 1)
    assert cuda.value("cuDeviceTotalMem_v2", 0) == 1 << 30
