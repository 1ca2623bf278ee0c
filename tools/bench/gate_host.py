"""The gate of a benchmark, as a process on an emulated node: `gate_host JSON` runs edges, prints its stamps as JSON.

The online process and the workload are processes of their own; only the stamps are used, so what this Python does
between edges costs nothing that is measured.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

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


def _one_edge(gate: NativeGate, online: subprocess.Popen[bytes], gpus: int) -> list[Stamp]:
    """Wake, let the online process launch, and wait until every GPU is closed."""
    while gate.wake(SERVICE) is not WakeOutcome.WOKEN:
        time.sleep(0.0002)
    _wait_until_running(gate, gpus)
    gate.drain_stamps()
    assert online.stdin is not None
    online.stdin.write(b".")
    online.stdin.flush()
    closed: list[Stamp] = []
    poll = select.poll()
    poll.register(gate.stamps_fd(), select.POLLIN)
    while len(closed) < gpus:
        if not poll.poll(PATIENCE_S * 1000):
            raise TimeoutError(f"{len(closed)} of {gpus} GPUs were closed")
        closed += [stamp for stamp in gate.drain_stamps() if stamp.kind is StampKind.GATE]
    return closed


def measure(run: GateRun) -> list[list[Stamp]]:
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
    passed = (fds.control, fds.region, fds.doorbell)
    numbers = [str(number) for number in (*passed, run.seed)]
    online = subprocess.Popen([*peers, "launcher", *numbers], pass_fds=passed, stdin=subprocess.PIPE)
    edges = [_one_edge(gate, online, run.gpus) for _ in range(run.edges)]
    online.communicate()
    gate.close()
    workload.communicate()
    return edges


def run_on(directory: Path, run: GateRun) -> list[list[Stamp]]:
    """`measure` in a process that has the emulated driver under it."""
    done = subprocess.run(
        [sys.executable, "-m", "valve_tools.bench.gate_host", json.dumps(asdict(run))],
        env=environment(directory, os.environ),
        cwd=directory,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [[Stamp(**stamp) for stamp in edge] for edge in json.loads(done.stdout)]


def main(arguments: list[str]) -> None:
    edges = measure(GateRun(**json.loads(arguments[0])))
    json.dump([[stamp._asdict() for stamp in edge] for edge in edges], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
