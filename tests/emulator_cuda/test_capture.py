"""Capture: calls become nodes, graphs run them, and the documented ways to break a capture break it."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_uint64, c_void_p

from cuda_driver import NOT_READY, Cuda, wait_until, word
from emulated import on_gpu
from gate_process import gate_of

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT = range(900, 907)
CAPTURED_EVENT = 907
SETTLE_S = 0.02  # only gives a wrong implementation time to show itself


def end(cuda: Cuda, stream: int) -> int:
    """The result of ending the capture."""
    return cuda.call("cuStreamEndCapture", stream, byref(c_void_p()))


def capture_fills(cuda: Cuda, stream: int, address: int, count: int) -> int:
    """An executable graph of so many fills, each with its own value."""
    graph = c_void_p()
    cuda.cuStreamBeginCapture_v2(stream, GLOBAL)
    for value in range(count):
        cuda.launch(cuda.kernel("emu_fill"), address + 8 * value, 8, value + 1, stream=stream)
    cuda.cuStreamEndCapture(stream, byref(graph))
    executable = cuda.value("cuGraphInstantiateWithFlags", graph, 0, kind=c_void_p)
    cuda.cuGraphDestroy(graph)
    return executable


@on_gpu()
def test_captured_work_runs_when_the_graph_is_launched_and_not_before(cuda: Cuda) -> None:
    cuda.start()
    stream, address = cuda.stream(), cuda.alloc(4096)
    cuda.cuMemsetD8_v2(address, 0, 4096)
    executable = capture_fills(cuda, stream, address, 5)
    cuda.cuStreamSynchronize(stream)
    before = cuda.read(address, 40)
    cuda.cuGraphUpload(executable, stream)
    cuda.cuGraphLaunch(executable, stream)
    cuda.cuGraphLaunch(executable, stream)
    cuda.cuGraphExecDestroy(executable)  # launches in flight keep what they need
    cuda.cuStreamSynchronize(stream)

    assert before == bytes(40)
    assert [int.from_bytes(cuda.read(address + 8 * i, 8), "little") for i in range(5)] == [1, 2, 3, 4, 5]
    assert sum(c.launches for c in cuda.channels()) == 10


@on_gpu()
def test_a_graph_stops_between_and_within_its_kernels_when_the_gate_closes(cuda: Cuda) -> None:
    cuda.start()
    stream, graph, page, last = cuda.stream(), c_void_p(), cuda.pinned(4096), cuda.pinned(4096)
    beat = cuda.kernel("emu_heartbeat")
    cuda.cuStreamBeginCapture_v2(stream, THREAD_LOCAL)
    for _ in range(10):
        cuda.launch(beat, page, 500, 2000, stream=stream)
    cuda.launch(beat, last, 500, 0, stream=stream)  # until it is told to stop
    cuda.cuStreamEndCapture(stream, byref(graph))
    executable = cuda.value("cuGraphInstantiateWithFlags", graph, 0, kind=c_void_p)
    with gate_of(cuda) as gate:
        cuda.cuGraphLaunch(executable, stream)
        wait_until(lambda: word(page) > 5, "the graph runs")
        gate.close()
        stood, query = (word(page), word(last)), cuda.call("cuStreamQuery", stream)
        time.sleep(SETTLE_S)
        still = (word(page), word(last))
        c_uint64.from_address(last + 16).value = 1
        gate.open()
        cuda.cuStreamSynchronize(stream)

    assert (stood, query) == (still, NOT_READY)
    assert word(page) == 40


@on_gpu()
def test_a_fork_by_events_joins_and_an_unjoined_one_is_an_error(cuda: Cuda) -> None:
    cuda.start()
    origin, side, fork, back = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    spin = cuda.kernel("emu_spin")
    results = []
    for joins in (True, False):
        cuda.cuStreamBeginCapture_v2(origin, GLOBAL)
        cuda.cuEventRecord(fork, origin)
        cuda.cuStreamWaitEvent(side, fork, 0)
        cuda.launch(spin, 1, stream=side)
        cuda.launch(spin, 1, stream=origin)
        if joins:
            cuda.cuEventRecord(back, side)
            cuda.cuStreamWaitEvent(origin, back, 0)
        results.append(end(cuda, origin))

    assert results == [0, UNJOINED]
    cuda.launch(spin, 1, stream=side)  # neither is captured any more
    cuda.cuStreamSynchronize(side)


@on_gpu()
def test_synchronising_a_capturing_stream_is_refused_and_ends_in_an_invalid_graph(cuda: Cuda) -> None:
    cuda.start()
    for call in ("cuStreamSynchronize", "cuStreamQuery"):
        stream = cuda.stream()
        cuda.cuStreamBeginCapture_v2(stream, RELAXED)

        assert cuda.call(call, stream) == UNSUPPORTED
        assert cuda.try_launch(cuda.kernel("emu_spin"), 1, stream=stream) == INVALIDATED
        assert end(cuda, stream) == INVALIDATED


@on_gpu()
def test_an_event_over_the_context_fails_while_it_captures_and_kills_the_capture(cuda: Cuda) -> None:
    """The rule that a watcher who probes for idleness must know (cuda.h on cuCtxRecordEvent)."""
    cuda.start()
    stream, event = cuda.stream(), cuda.event()
    cuda.cuStreamBeginCapture_v2(stream, RELAXED)

    assert cuda.call("cuCtxRecordEvent", cuda.context, event) == UNSUPPORTED
    assert end(cuda, stream) == INVALIDATED


@on_gpu()
def test_the_legacy_stream_may_not_be_used_while_a_blocking_stream_captures(cuda: Cuda) -> None:
    cuda.start()
    blocking, free = cuda.stream(0), cuda.stream(1)
    cuda.cuStreamBeginCapture_v2(blocking, RELAXED)
    refused = cuda.try_launch(cuda.kernel("emu_spin"), 1, stream=0)
    ended = end(cuda, blocking)
    cuda.cuStreamBeginCapture_v2(free, RELAXED)
    allowed = cuda.try_launch(cuda.kernel("emu_spin"), 1, stream=0)

    assert (refused, ended) == (IMPLICIT, INVALIDATED)
    assert (allowed, end(cuda, free)) == (0, 0)


@on_gpu()
def test_unsafe_calls_obey_the_capture_mode_of_the_thread(cuda: Cuda) -> None:
    cuda.start()
    cases = [(GLOBAL, UNSUPPORTED, INVALIDATED), (THREAD_LOCAL, UNSUPPORTED, INVALIDATED), (RELAXED, 0, 0)]
    for mode, allocated, ended in cases:
        stream = cuda.stream()
        cuda.cuStreamBeginCapture_v2(stream, mode)

        assert cuda.call("cuMemAlloc_v2", byref(c_uint64()), 4096) == allocated
        assert end(cuda, stream) == ended

    stream, relaxed = cuda.stream(), c_int(RELAXED)
    cuda.cuStreamBeginCapture_v2(stream, GLOBAL)
    cuda.cuThreadExchangeStreamCaptureMode(byref(relaxed))
    cuda.alloc(4096)

    assert relaxed.value == GLOBAL
    assert end(cuda, stream) == 0


@on_gpu()
def test_events_recorded_in_a_capture_cannot_be_waited_for_outside(cuda: Cuda) -> None:
    cuda.start()
    stream, event = cuda.stream(), cuda.event()
    cuda.cuStreamBeginCapture_v2(stream, RELAXED)
    cuda.cuEventRecord(event, stream)

    assert cuda.call("cuEventQuery", event) == CAPTURED_EVENT
    assert end(cuda, stream) == INVALIDATED


@on_gpu()
def test_a_captured_stream_may_not_wait_for_work_outside_nor_two_captures_meet(cuda: Cuda) -> None:
    cuda.start()
    first, second, outside, inside = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    cuda.cuEventRecord(outside, cuda.stream())
    cuda.cuStreamBeginCapture_v2(first, RELAXED)
    isolation = cuda.call("cuStreamWaitEvent", first, outside, 0)
    end(cuda, first)
    cuda.cuStreamBeginCapture_v2(first, RELAXED)
    cuda.cuStreamBeginCapture_v2(second, RELAXED)
    cuda.cuEventRecord(inside, first)
    merge = cuda.call("cuStreamWaitEvent", second, inside, 0)

    assert (isolation, merge) == (ISOLATION, MERGE)
    assert [end(cuda, first), end(cuda, second)] == [INVALIDATED, INVALIDATED]


@on_gpu()
def test_capture_state_can_be_asked_for(cuda: Cuda) -> None:
    cuda.start()
    stream, status, identity = cuda.stream(), c_int(-1), c_uint64()
    cuda.cuStreamIsCapturing(stream, byref(status))
    idle = status.value
    cuda.cuStreamBeginCapture_v2(stream, GLOBAL)
    cuda.cuStreamGetCaptureInfo_v2(stream, byref(status), byref(identity), 0, 0, 0)

    assert (idle, status.value) == (0, 1)
    assert identity.value > 0
    assert end(cuda, stream) == 0
    assert end(cuda, stream) == 401


@on_gpu()
def test_an_executable_takes_new_parameters_while_a_launch_keeps_the_old(cuda: Cuda) -> None:
    cuda.start()
    stream, address, graph, update_failed = cuda.stream(), cuda.alloc(4096), c_void_p(), 910
    cuda.cuMemsetD8_v2(address, 0, 16)
    executable = capture_fills(cuda, stream, address, 1)
    cuda.cuStreamBeginCapture_v2(stream, GLOBAL)
    cuda.launch(cuda.kernel("emu_fill"), address + 8, 8, 77, stream=stream)
    cuda.cuStreamEndCapture(stream, byref(graph))
    with gate_of(cuda) as gate:
        gate.close()
        cuda.cuGraphLaunch(executable, stream)
        cuda.cuGraphExecUpdate_v2(executable, graph, (ctypes.c_char * 64)())
        cuda.cuGraphLaunch(executable, stream)
        gate.open()
        cuda.cuStreamSynchronize(stream)
    other = c_void_p()
    cuda.cuStreamBeginCapture_v2(stream, GLOBAL)
    cuda.cuStreamEndCapture(stream, byref(other))

    assert cuda.read(address, 16) == bytes([1, *[0] * 7, 77, *[0] * 7])
    assert cuda.call("cuGraphExecUpdate_v2", executable, other, (ctypes.c_char * 64)()) == update_failed
