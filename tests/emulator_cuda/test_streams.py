"""What orders work: streams, events, the default streams, host functions, memory operations."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_void_p

from cuda_driver import NOT_READY, PER_THREAD, Cuda, wait_until, word
from emulated import on_gpu

NON_BLOCKING, BLOCKING = 1, 0
HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


def hold(cuda: Cuda, stream: int) -> int:
    """An endless kernel; returns the page whose third word ends it."""
    page = cuda.pinned(4096)
    cuda.launch(cuda.kernel("emu_heartbeat"), page, 500, 0, stream=stream)
    wait_until(lambda: word(page) > 0, "the kernel runs")
    return page


def release(page: int) -> None:
    ctypes.c_uint64.from_address(page + 16).value = 1


@on_gpu()
def test_work_of_one_stream_runs_in_the_order_of_its_calls(cuda: Cuda) -> None:
    cuda.start()
    stream, address = cuda.stream(), cuda.alloc(1 << 16)
    fill = cuda.kernel("emu_fill")
    for value in range(20):
        cuda.launch(fill, address, 1 << 16, value, stream=stream)
        cuda.cuMemcpyDtoDAsync_v2(address + 8, address, 8, stream)
    cuda.cuMemsetD8Async(address, 0xAB, 4, stream)
    cuda.cuStreamSynchronize(stream)

    assert cuda.read(address, 16) == bytes.fromhex("abababab00000000" + "1300000000000000")


@on_gpu()
def test_host_copies_and_kernels_of_one_stream_keep_their_order_across_engines(cuda: Cuda) -> None:
    """Given copies on the copy engine between kernels on compute, then each sees the one before it."""
    cuda.start()
    stream, address, host = cuda.stream(), cuda.alloc(4096), cuda.pinned(4096)
    fill = cuda.kernel("emu_fill")
    for value in range(1, 11):
        cuda.launch(fill, address, 4096, value, stream=stream)
        cuda.cuMemcpyDtoHAsync_v2(host + 8 * value, address, 8, stream)
        cuda.cuMemcpyHtoDAsync_v2(address + 8, host, 8, stream)
    cuda.cuStreamSynchronize(stream)

    assert [word(host, value) for value in range(1, 11)] == list(range(1, 11))
    assert cuda.read(address + 8, 8) == bytes(8)


@on_gpu()
def test_streams_run_beside_each_other_and_an_event_joins_them(cuda: Cuda) -> None:
    cuda.start()
    held, other, event = cuda.stream(), cuda.stream(), cuda.event()
    page = hold(cuda, held)
    cuda.cuEventRecord(event, held)
    cuda.launch(cuda.kernel("emu_spin"), 100, stream=other)
    cuda.cuStreamSynchronize(other)  # not held by the first
    cuda.cuStreamWaitEvent(other, event, 0)
    cuda.launch(cuda.kernel("emu_spin"), 100, stream=other)
    joined = cuda.call("cuStreamQuery", other)
    release(page)
    cuda.cuStreamSynchronize(other)

    assert joined == NOT_READY


@on_gpu()
def test_the_legacy_stream_waits_for_blocking_streams_and_not_for_others(cuda: Cuda) -> None:
    cuda.start()
    spin = cuda.kernel("emu_spin")
    free_page = hold(cuda, cuda.stream(NON_BLOCKING))
    cuda.launch(spin, 10)
    cuda.cuStreamSynchronize(0)
    blocking_page = hold(cuda, cuda.stream(BLOCKING))
    cuda.launch(spin, 10)
    behind = cuda.call("cuStreamQuery", 0)
    release(blocking_page)
    cuda.cuStreamSynchronize(0)
    release(free_page)
    cuda.cuCtxSynchronize()

    assert behind == NOT_READY


@on_gpu()
def test_per_thread_default_streams_are_one_for_each_thread(cuda: Cuda) -> None:
    cuda.start()
    page = hold(cuda, PER_THREAD)
    done: list[int] = []

    def in_a_thread() -> None:
        cuda.cuCtxSetCurrent(cuda.context)
        cuda.try_launch(cuda.kernel("emu_spin"), 10, entry="cuLaunchKernel_ptsz")
        cuda.cuStreamSynchronize_ptsz(0)
        done.append(cuda.call("cuStreamQuery", PER_THREAD))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    mine = cuda.call("cuStreamQuery_ptsz", 0)
    release(page)
    cuda.cuStreamSynchronize(PER_THREAD)

    assert done == [0]
    assert mine == NOT_READY


@on_gpu()
def test_more_streams_than_channels_share_them_and_still_all_finish(cuda: Cuda) -> None:
    cuda.start()
    streams = [cuda.stream() for _ in range(40)]
    for _ in range(5):
        for stream in streams:
            cuda.launch(cuda.kernel("emu_spin"), 20, stream=stream)
    cuda.cuCtxSynchronize()

    assert {cuda.call("cuStreamQuery", stream) for stream in streams} == {0}
    assert sum(c.launches for c in cuda.channels()) == 200


@on_gpu()
def test_a_host_function_runs_between_the_work_around_it(cuda: Cuda) -> None:
    cuda.start()
    stream, address, host = cuda.stream(), cuda.alloc(4096), cuda.pinned(4096)
    seen: list[int] = []
    called = HOST_FUNCTION(lambda _user: seen.append(word(host)))
    for value in (5, 6):
        cuda.launch(cuda.kernel("emu_fill"), address, 8, value, stream=stream)
        cuda.cuMemcpyDtoHAsync_v2(host, address, 8, stream)
        cuda.cuLaunchHostFunc(stream, called, 0)
    cuda.cuStreamSynchronize(stream)

    assert seen == [5, 6]


@on_gpu()
def test_a_stream_waits_for_a_value_in_memory(cuda: Cuda) -> None:
    cuda.start()
    stream, other, flag = cuda.stream(), cuda.stream(), cuda.pinned(4096)
    cuda.cuStreamWaitValue64_v2(stream, flag, 3, 0)
    cuda.launch(cuda.kernel("emu_spin"), 10, stream=stream)
    cuda.cuStreamWriteValue64_v2(other, flag, 2, 0)
    cuda.cuStreamSynchronize(other)
    early = cuda.call("cuStreamQuery", stream)
    cuda.cuStreamWriteValue64_v2(other, flag, 4, 0)
    cuda.cuStreamSynchronize(stream)

    assert early == NOT_READY
    assert word(flag) == 4


@on_gpu()
def test_an_event_over_a_context_covers_all_its_streams_and_stands_in_nobodys_way(cuda: Cuda) -> None:
    cuda.start()
    event, held, other = cuda.event(), cuda.stream(), cuda.stream()
    page = hold(cuda, held)
    cuda.cuCtxRecordEvent(cuda.context, event)
    cuda.launch(cuda.kernel("emu_spin"), 10, stream=other)
    cuda.cuStreamSynchronize(other)
    early = cuda.call("cuEventQuery", event)
    release(page)
    cuda.cuEventSynchronize(event)

    assert early == NOT_READY


@on_gpu()
def test_a_destroyed_stream_still_finishes_its_work(cuda: Cuda) -> None:
    cuda.start()
    stream = cuda.stream()
    page = hold(cuda, stream)
    cuda.cuStreamDestroy_v2(stream)
    event = cuda.event()
    cuda.cuCtxRecordEvent(cuda.context, event)
    early = cuda.call("cuEventQuery", event)
    release(page)
    cuda.cuCtxSynchronize()

    assert early == NOT_READY
    assert cuda.call("cuEventQuery", event) == 0


@on_gpu()
def test_a_context_that_faulted_says_so_to_everyone_and_lets_nobody_wait(cuda: Cuda) -> None:
    cuda.start()
    hole, streams = cuda.alloc(2 << 20), [cuda.stream() for _ in range(3)]
    cuda.cuMemFree_v2(hole)
    spin = cuda.kernel("emu_spin")
    cuda.launch(cuda.kernel("emu_touch"), hole, 4096, 4096, stream=streams[0])
    codes = {cuda.call("cuStreamSynchronize", streams[0])}
    for stream in streams:
        codes.add(cuda.try_launch(spin, 10, stream=stream))
        codes.add(cuda.call("cuStreamSynchronize", stream))

    assert codes == {700}
