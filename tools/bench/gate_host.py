"""The gate of a benchmark, as a process on an emulated node: `gate_host JSON` runs edges, prints its stamps as JSON.

The online process and the workload are processes of their own; only the stamps are used, so what this Python does
between edges costs nothing that is measured.

With `plain`, a thread of this process listens as the gate's do, without Valve. The same online process rings it once
for each edge, in turns with the gate: a wake depends on who rings, on which core, and on what ran there before.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from valve_tools.bench import gate_peers, region_pages
from valve_tools.emulator.node import environment

from valved.gate.adapter import NativeGate, NativeSettings
from valved.machine.ports import WakeOutcome
from valved.machine.stamps import Stamp, StampKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Role, ServiceId

SERVICE, WORKLOAD, ONLINE = ServiceId(1), ClientId(1), ClientId(2)
PATIENCE_S = 200  # only ends a run that hangs
HANG_NS = 10_000_000_000  # a slow host is not a driver that hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRun:
    """One measured run."""

    gpus: int
    channels: int  # on each
    edges: int
    spin_ns: int = 0
    fifo_priority: int = 0
    seed: int = 1
    plain: bool = False


class GateTimes(NamedTuple):
    edges: list[list[Stamp]]
    plain_us: list[float]  # from a launch until a plain listener ran


class PlainListener:
    """A thread that waits in epoll for a bell of its own."""

    def __init__(self, region: int, count: int) -> None:
        self.bell, self._heard = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
        self._took = (ctypes.c_uint64 * count)()
        self._page = region_pages.region_page(region)
        stamp = gate_peers.launch_stamp(self._page)
        hear = ctypes.CDLL(str(gate_peers.WAKE)).valve_bench_hear
        words = (self.bell, self._heard, stamp, self._took, count)
        self._thread = threading.Thread(target=hear, args=words, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it heard a ring."""
        _await(self._heard)
        os.eventfd_read(self._heard)

    def took_us(self) -> list[float]:
        self._thread.join()
        return [took / 1e3 for took in self._took]


def add_channels(gate: NativeGate, workload: subprocess.Popen[str]) -> None:
    assert workload.stdout is not None
    for gpu, tree in enumerate(json.loads(workload.stdout.readline())):
        for handle, cid in tree["channels"]:
            ref = ChannelRef(
                gpu=GpuIndex(gpu),
                h_client=tree["h_client"],
                h_channel=handle,
                cid=cid,
                h_tsg=tree["h_tsg"],
                engine=1,
                compute=True,
            )
            result = gate.channels.add_channel(WORKLOAD, ref)
            if result.status:
                raise RuntimeError(f"channel {handle:#x} could not be armed: {result}")


def _wait_until_running(gate: NativeGate, gpus: int) -> None:
    """Until the last enable is through: a ring during one would wait for the driver, which is not our share."""
    deadline = time.monotonic() + PATIENCE_S
    while any(gate.is_gated(GpuIndex(gpu)) for gpu in range(gpus)):
        if time.monotonic() > deadline:
            raise TimeoutError("a GPU was not enabled again")
        time.sleep(0.0002)


def _await(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(PATIENCE_S * 1000):
        raise TimeoutError("a ring was not heard, or a GPU not closed")


def _launch(online: subprocess.Popen[bytes], whose: bytes) -> None:
    assert online.stdin is not None
    online.stdin.write(whose)
    online.stdin.flush()


def _open(gate: NativeGate, gpus: int) -> None:
    while gate.wake(SERVICE) is not WakeOutcome.WOKEN:
        time.sleep(0.0002)
    _wait_until_running(gate, gpus)
    gate.drain_stamps()


def _close(gate: NativeGate, online: subprocess.Popen[bytes], gpus: int) -> list[Stamp]:
    """Let the online process launch, and wait until every GPU is closed."""
    _launch(online, gate_peers.GATED)
    closed: list[Stamp] = []
    while len(closed) < gpus:
        _await(gate.stamps_fd())
        closed += [stamp for stamp in gate.drain_stamps() if stamp.kind is StampKind.GATE]
    return closed


def _edges(gate: NativeGate, online: subprocess.Popen[bytes], run: GateRun, plain: PlainListener) -> list[list[Stamp]]:
    """The plain ring comes before the gate's in every other edge, so that neither alone follows the wake."""
    edges = []
    for number in range(run.edges):
        _open(gate, run.gpus)
        for is_plain in (number % 2 == 0, number % 2 == 1):
            if not is_plain:
                edges.append(_close(gate, online, run.gpus))
            elif run.plain:
                _launch(online, gate_peers.PLAIN)
                plain.wait()
    return edges


def measure(run: GateRun) -> GateTimes:
    gate = NativeGate(NativeSettings(spin_ns=run.spin_ns, fifo_priority=run.fifo_priority, hang_ns=HANG_NS))
    peers = [sys.executable, "-m", "valve_tools.bench.gate_peers"]
    workload = subprocess.Popen(
        [*peers, "channels", str(run.gpus), str(run.channels)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    gate.create_client(WORKLOAD, Role.OFFLINE, ServiceId(0))
    add_channels(gate, workload)
    gate.put_service(SERVICE, frozenset(map(GpuIndex, range(run.gpus))))
    fds = gate.create_client(ONLINE, Role.ONLINE, SERVICE)
    plain = PlainListener(fds.region, run.edges if run.plain else 0)
    passed = (fds.control, fds.region, fds.doorbell, plain.bell)
    numbers = [str(number) for number in (*passed, run.seed)]
    online = subprocess.Popen([*peers, "launcher", *numbers], pass_fds=passed, stdin=subprocess.PIPE)
    edges = _edges(gate, online, run, plain)
    online.communicate()
    gate.close()
    workload.communicate()
    return GateTimes(edges, plain.took_us())


def run_on(directory: Path, run: GateRun) -> GateTimes:
    """`measure` in a process that has the emulated driver under it."""
    done = subprocess.run(
        [sys.executable, "-m", "valve_tools.bench.gate_host", json.dumps(asdict(run))],
        env=environment(directory, os.environ),
        cwd=directory,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    edges, plain_us = json.loads(done.stdout)
    return GateTimes([[Stamp(**stamp) for stamp in edge] for edge in edges], plain_us)


def main(arguments: list[str]) -> None:
    edges, plain_us = measure(GateRun(**json.loads(arguments[0])))
    json.dump([[[stamp._asdict() for stamp in edge] for edge in edges], plain_us], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
