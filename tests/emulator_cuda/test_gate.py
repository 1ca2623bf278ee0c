"""What a gate from another process does to work here: it stops in the middle, and goes on where it stopped."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import node_workload
from cuda_driver import NOT_READY, Cuda, wait_until, word
from emulated import on_gpu
from gate_process import gate_of

SETTLE_S = 0.05  # only gives a wrong implementation time to show itself


@on_gpu()
def test_a_kernel_stops_in_the_middle_and_goes_on_where_it_stopped(cuda: Cuda) -> None:
    """Given an endless heartbeat, when the gate closes, then the count stands; when it opens, the count grows on."""
    cuda.start()
    page = cuda.pinned(4096)
    cuda.launch(cuda.kernel("emu_heartbeat"), page, 200, 0)
    wait_until(lambda: word(page) > 3, "the first beats")

    with gate_of(cuda) as gate:
        gate.close()
        stood = word(page)
        time.sleep(SETTLE_S)
        after = word(page)
        gate.open()
        wait_until(lambda: word(page) > after, "beats after the gate opened")

    assert stood == after


@on_gpu()
def test_the_output_of_a_unit_is_the_same_however_often_it_is_stopped(cuda: Cuda) -> None:
    cuda.start()
    step, words = cuda.kernel("emu_checksum_step"), 512
    results = []
    with gate_of(cuda) as gate:
        for disturbed in (False, True):
            state = cuda.alloc(8 * (words + 2))
            cuda.cuMemsetD8_v2(state, 0, 8 * (words + 2))
            if disturbed:
                gate.close()
            for _ in range(6):
                cuda.launch(step, state, words, 8, 2000)
            if disturbed:
                gate.open()
            while disturbed and cuda.call("cuStreamQuery", 0) == NOT_READY:
                gate.close()
                gate.open()
            cuda.cuCtxSynchronize()
            results.append(cuda.read(state, 16))

    assert results[0] == results[1]
    assert int.from_bytes(results[0][:8], "little") == 6
    assert len(cuda.emulator.state().gates) >= 2


@on_gpu()
def test_time_off_the_gpu_is_not_counted_as_run(cuda: Cuda) -> None:
    """Given a kernel that is gated for 50 ms, when it is done, then its channel was busy for no part of that time."""
    cuda.start()
    page = cuda.pinned(4096)
    begin_ns = time.monotonic_ns()
    with gate_of(cuda) as gate:
        cuda.launch(cuda.kernel("emu_heartbeat"), page, 200, 0)  # until it is told to stop
        wait_until(lambda: word(page) > 3, "the first beats")
        gate.close()
        time.sleep(SETTLE_S)
        after = word(page)
        gate.open()
        wait_until(lambda: word(page) > after + 3, "beats after the gate opened")
        ctypes.c_uint64.from_address(page + 16).value = 1
        cuda.cuCtxSynchronize()
        state = gate.wait("the channel is idle again", active=0, pending=0)
    lived_ns = time.monotonic_ns() - begin_ns
    busy_ns = sum(c.busy_ns for c in state.channels if c.is_compute)
    close, open_ = state.gates
    off_ns = open_.entry_ns - close.stopped_ns

    assert off_ns >= SETTLE_S * 1e9
    assert 6 * 200_000 <= busy_ns <= lived_ns - off_ns


@on_gpu()
def test_copies_between_host_and_device_go_on_while_compute_is_gated(cuda: Cuda) -> None:
    cuda.start()
    address = cuda.alloc(1 << 20)
    with gate_of(cuda) as gate:
        cuda.launch(cuda.kernel("emu_heartbeat"), cuda.pinned(4096), 500, 0, stream=cuda.stream())
        gate.close()
        own, data = cuda.stream(), ctypes.create_string_buffer(b"valve" * 100)
        cuda.cuMemcpyHtoDAsync_v2(address, data, 500, own)
        cuda.cuStreamSynchronize(own)

        assert cuda.read(address, 500) == data.raw[:500]


@on_gpu()
def test_an_event_waits_as_long_as_its_channel_is_off(cuda: Cuda) -> None:
    cuda.start()
    event = cuda.event()
    cuda.launch(cuda.kernel("emu_spin"), 100)
    cuda.cuCtxSynchronize()
    with gate_of(cuda) as gate:
        gate.close()
        cuda.cuEventRecord(event, 0)
        time.sleep(SETTLE_S)
        gated = cuda.call("cuEventQuery", event)
        gate.open()
        cuda.cuEventSynchronize(event)

    assert gated == NOT_READY


@on_gpu(knobs={"gpfifo_depth": "8"})
def test_a_launch_blocks_when_the_queue_of_a_disabled_channel_is_full(cuda: Cuda) -> None:
    """Given a gated channel of depth 8, when nine kernels are launched, then the ninth call returns only after wake."""
    cuda.start()
    spin = cuda.kernel("emu_spin")
    launched: list[int] = []

    def launch_all() -> None:
        cuda.cuCtxSetCurrent(cuda.context)
        for number in range(9):
            cuda.launch(spin, 10)
            launched.append(number)

    with gate_of(cuda) as gate:
        gate.close()
        thread = threading.Thread(target=launch_all)
        thread.start()
        gate.wait("eight queued", pending=8)
        wait_until(lambda: len(launched) >= 8, "the eighth call is back")
        time.sleep(SETTLE_S)
        while_gated = len(launched)
        gate.open()
        thread.join()
    cuda.cuCtxSynchronize()

    assert while_gated == 8
    assert len(launched) == 9


@on_gpu()
def test_destroying_a_context_waits_for_its_gated_work(cuda: Cuda) -> None:
    """As on the card: an offline process that exits while it is gated hangs until somebody enables its channels."""
    cuda.start()
    with gate_of(cuda) as gate:
        gate.close()
        cuda.launch(cuda.kernel("emu_spin"), 100)
        thread = threading.Thread(target=lambda: cuda.cuDevicePrimaryCtxRelease_v2(0))
        thread.start()
        thread.join(SETTLE_S)
        waited = thread.is_alive()
        gate.open()
        thread.join()

    assert waited
    assert cuda.channels() == ()


@on_gpu()
def test_two_processes_share_the_card_by_time_slices(cuda: Cuda) -> None:
    """Given an endless kernel of another process, when we launch, then our kernel is done all the same."""
    with tempfile.NamedTemporaryFile() as page:
        page.truncate(4096)
        program = node_workload.__file__
        with subprocess.Popen(
            [sys.executable, program, "offline", page.name], stdout=subprocess.PIPE, env=dict(os.environ)
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            cuda.start()
            cuda.launch(cuda.kernel("emu_spin"), 5000)
            cuda.cuCtxSynchronize()
            other.kill()

    assert [channel.launches for channel in cuda.channels() if channel.launches] == [1]


EXITING = """
import sys
sys.path.insert(0, {support!r})
from cuda_driver import Cuda
cuda = Cuda().start()
spin = cuda.kernel("emu_spin")
print("ready", flush=True)
sys.stdin.readline()
cuda.launch(spin, 1000)
"""


@on_gpu(cuda="exit_waits=1")
def test_a_process_that_waits_in_exit_hangs_there_while_it_is_gated(cuda: Cuda) -> None:

    program = EXITING.format(support=str(Path(node_workload.__file__).parent))
    with (
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        gate_of(cuda) as gate,
    ):
        assert other.stdout is not None
        other.stdout.readline()
        pairs = [(c.h_client, c.h_channel) for c in cuda.emulator.state().of(other.pid) if c.is_compute]
        gate.tree.gate(pairs, on=False)
        assert other.stdin is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        cuda.emulator.wait(lambda s: sum(c.pending for c in s.of(other.pid)) == 1, "the kernel is queued")
        time.sleep(SETTLE_S)
        while_gated = other.poll()
        gate.tree.gate(pairs, on=True)
        other.wait()

    assert while_gated is None
