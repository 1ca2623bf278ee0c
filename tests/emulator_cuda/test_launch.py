"""A kernel runs while its channel is granted, and only then."""

from __future__ import annotations

from cuda_driver import ILLEGAL_ADDRESS, NOT_READY, Cuda, word
from emulated import on_gpu


@on_gpu()
def test_a_timed_kernel_occupies_the_gpu_for_its_time(cuda: Cuda) -> None:
    """Given two events around kernels of 2 ms in all, when they are done, then the GPU's clock says at least 2 ms."""
    cuda.start()
    spin, before, after = cuda.kernel("emu_spin"), cuda.event(), cuda.event()

    cuda.cuEventRecord(before, 0)
    for _ in range(4):
        cuda.launch(spin, 500)
    cuda.cuEventRecord(after, 0)
    cuda.cuEventSynchronize(after)

    assert cuda.elapsed_ms(before, after) >= 2.0
    assert sum(channel.launches for channel in cuda.channels()) == 4


@on_gpu()
def test_an_event_is_not_ready_until_the_work_before_it_is_done(cuda: Cuda) -> None:
    cuda.start()
    beat, page, event = cuda.kernel("emu_heartbeat"), cuda.pinned(4096), cuda.event()

    cuda.launch(beat, page, 1000, 0)
    cuda.cuEventRecord(event, 0)
    early = cuda.call("cuEventQuery", event)
    cuda.cuStreamWriteValue32_v2(cuda.stream(), page + 16, 1, 0)
    cuda.cuEventSynchronize(event)

    assert early == NOT_READY
    assert cuda.call("cuEventQuery", event) == 0
    assert word(page) > 0


@on_gpu()
def test_a_kernel_that_touches_a_hole_kills_its_context_and_not_the_process(cuda: Cuda) -> None:
    cuda.start()
    address = cuda.alloc(4 << 20)
    cuda.cuMemFree_v2(address)

    cuda.launch(cuda.kernel("emu_fill"), address, 4096, 1)

    assert cuda.call("cuCtxSynchronize") == ILLEGAL_ADDRESS
    assert cuda.call("cuMemGetInfo_v2", 0, 0) == ILLEGAL_ADDRESS
