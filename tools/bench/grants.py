"""What one pause of granted time costs, on each rung: `grant-gate` and `grant-slice`.

The gate rung pays a wake and a stop. Its own cost is counted from the hook's word to the driver's answer: what of a
pause is not offline work's. Each pause is compared with its own two driver calls, so a busy machine weighs on both
alike. The timeslice rung makes no call: what is left is what the hook does (its own classes) and valved's threads
meanwhile, in processor time.

Not counted: the watcher's quiet time before work is proven done, and what the card itself loses at a switch.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from valve_abi import GRANT, GRANT_OFFSET, PAGE, GrantAnswer
from valve_hook.grant_page import GrantPage
from valve_hook.shared import Bell
from valve_hook.sharing import Sharing
from valve_tools.bench import gate_host, region_pages
from valve_tools.bench.row import Row, row_of
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import Options, environment, node

from valved.gate.adapter import NativeGate, NativeSettings
from valved.machine.ports import WakeRule
from valved.model.ids import ClientId, GpuIndex, Role, ServiceId
from valved.policy.wake import WakeSettings

CYCLES, CHANNELS = 300, 8
PAUSE_S, STEP_S = 0.004, 0.004
MARK_CALLS, MARK_MS = 1.5, 0.1
FAR_NS, GAP_NS, STEP_NS = 3_600_000_000_000, 100_000_000, 4_000_000
MS, PATIENCE_S = 1e6, 60.0
HOOK = ClientId(3)
GPU = GpuIndex(0)


class Pauses:
    """A gate with one service that consents, its hook, and offline work; on the emulated card of this process."""

    def __init__(self) -> None:
        self.gate = NativeGate(NativeSettings(hang_ns=gate_host.HANG_NS))
        peers = [sys.executable, "-m", "valve_tools.bench.gate_peers", "channels", "1", str(CHANNELS)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._workload = subprocess.Popen(peers, text=True, **pipes)  # type: ignore[call-overload]
        self.gate.create_client(gate_host.WORKLOAD, Role.OFFLINE, ServiceId(0))
        gate_host.add_channels(self.gate, self._workload)
        self.gate.put_service(gate_host.SERVICE, frozenset({GPU}))
        online = region_pages.region_page(
            self.gate.create_client(gate_host.ONLINE, Role.ONLINE, gate_host.SERVICE).region
        )
        region_pages.fill_region(online)
        online["idle_ns"] = online["watcher_ns"] = time.monotonic_ns()
        fds = self.gate.create_client(HOOK, Role.HOOK, gate_host.SERVICE)
        self._bell, self._control = fds.doorbell, region_pages.control_page(fds.control)
        self.hook = region_pages.region_page(fds.region)
        region_pages.fill_region(self.hook)
        self.page = GrantPage(fds.control, mmap.mmap(fds.region, PAGE), Bell(fds.doorbell))
        self._seq = 0
        self.gate.permit(gate_host.SERVICE, never_by_itself())
        self.gate.granting.set_grantable(frozenset({GPU}))
        self.gate.granting.consent(gate_host.SERVICE, FAR_NS, 0)
        self.wait(lambda: self.gate.is_stopped(GPU), "the service holds")

    def say(self, until_ns: int) -> int:
        """The hook's word, and when it was said."""
        self._seq += 1
        self.hook["grant_until_ns"] = until_ns
        self.hook["grant_seq"] = self._seq
        said_ns = time.monotonic_ns()
        os.eventfd_write(self._bell, 1)
        return said_ns

    def answer(self) -> GrantAnswer:
        self.wait(lambda: self._word("answer_seq") == self._seq, "an answer")
        return GrantAnswer(self._word("answer"))

    def _word(self, name: str) -> int:
        at = GRANT_OFFSET + GRANT.fields[name].offset
        return int.from_bytes(self._control.memory[at : at + 4], "little")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.0002)

    def close(self) -> None:
        self.gate.close()
        self._workload.communicate()


def never_by_itself() -> WakeRule:
    settings = WakeSettings(watcher_lease_ns=FAR_NS)
    names = WakeSettings.__dataclass_fields__
    return WakeRule(
        cooldown_ns=FAR_NS,
        learn_ns=1 << 62,
        watch_since_ns=1,
        looking_since_ns=1,
        **{name: getattr(settings, name) for name in names},
    )


def by_gate(emulator: Emulator) -> dict[str, list[float]]:
    """Of each pause: own cost and its two driver calls, in ms."""
    pauses = Pauses()
    said: list[tuple[int, int]] = []
    for _ in range(CYCLES):
        opened_ns = pauses.say(time.monotonic_ns() + FAR_NS)
        if pauses.answer() is not GrantAnswer.GIVEN:
            raise RuntimeError(f"refused: {pauses.gate.granting.grants(gate_host.SERVICE).refused}")
        pauses.wait(lambda: not pauses.gate.is_gated(GPU), "offline work runs")
        time.sleep(PAUSE_S)
        said.append((opened_ns, pauses.say(0)))
        pauses.wait(lambda: pauses.gate.is_stopped(GPU), "offline work is stopped")
        time.sleep(STEP_S)
    pauses.close()
    calls = [call for call in emulator.state().gates if call.entry_ns >= said[0][0]]
    costs: dict[str, list[float]] = {"own": [], "calls": [], "open": [], "close": []}
    for opened_ns, closed_ns in said:
        on = next(call for call in calls if call.on and call.entry_ns >= opened_ns)
        off = next(call for call in calls if not call.on and call.entry_ns >= closed_ns)
        costs["open"].append((on.done_ns - opened_ns) / MS)
        costs["close"].append((off.done_ns - closed_ns) / MS)
        costs["own"].append(costs["open"][-1] + costs["close"][-1])
        costs["calls"].append((on.done_ns - on.entry_ns + off.done_ns - off.entry_ns) / MS)
    return costs


def by_slices(emulator: Emulator) -> dict[str, list[float]]:
    """Processor time of a pause, in ms: the hook's store, and all other threads of this process, which are valved's."""
    pauses = Pauses()
    pauses.gate.granting.set_sliceable(True, frozenset({GPU}))
    pauses.gate.granting.consent(gate_host.SERVICE, GAP_NS, 0)
    pauses.gate.granting.offer(HOOK, GAP_NS, GAP_NS)
    pauses.say(time.monotonic_ns() + FAR_NS)
    if pauses.answer() is not GrantAnswer.GIVEN:
        raise RuntimeError(f"refused: {pauses.gate.granting.grants(gate_host.SERVICE).refused}")
    pauses.wait(lambda: not pauses.gate.is_gated(GPU), "offline work runs")
    before = len(emulator.state().gates)
    costs: dict[str, list[float]] = {"own": [], "hook": []}
    sharing, rings, waits = Sharing(), pauses.hook["grant_seq"], 0
    for _ in range(CYCLES):
        whole_ns, mine_ns = time.process_time_ns(), time.thread_time_ns()
        now_ns = time.monotonic_ns()
        pauses.page.stepped(now_ns - STEP_NS, now_ns)
        sharing.begin(pauses.page, now_ns)
        sharing.move_on(now_ns + GAP_NS)
        waits += sharing.stands(pauses.page, now_ns)
        hook_ns = time.thread_time_ns() - mine_ns
        time.sleep(PAUSE_S + STEP_S)
        mine_ns, whole_ns = time.thread_time_ns() - mine_ns, time.process_time_ns() - whole_ns
        costs["hook"].append(hook_ns / MS)
        costs["own"].append((hook_ns + max(0, whole_ns - mine_ns)) / MS)
    grants = pauses.gate.granting.grants(gate_host.SERVICE)
    costs["calls"] = [float(len(emulator.state().gates) - before)]
    costs["grants"] = [float(grants.grants)]
    costs["rings"], costs["waits"] = [float(pauses.hook["grant_seq"] - rings)], [float(waits)]
    pauses.close()
    return costs


RUNGS = {"gate": by_gate, "slices": by_slices}


def run_on(directory: Path, rung: str) -> dict[str, list[float]]:
    """In a process that has the emulated driver under it."""
    command = [sys.executable, "-m", "valve_tools.bench.grants", rung]
    env = environment(directory, os.environ)
    done = subprocess.run(command, env=env, cwd=directory, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def bench_gate() -> Iterator[Row]:
    with node(Options()) as emulator:
        found = run_on(emulator.directory, "gate")
    ratios = [own / calls for own, calls in zip(found["own"], found["calls"], strict=True)]
    note = "from the hook's word to the driver's answer, over the two calls of the same pause"
    yield row_of("grant-gate", "own cost over stop + wake", "x", ratios, MARK_CALLS, judged="p50", note=note)
    yield row_of("grant-gate", "own cost", "ms", found["own"], None)
    yield row_of("grant-gate", "stop + wake", "ms", found["calls"], None, note="the emulated driver's two calls")
    yield row_of("grant-gate", "hook's word to running", "ms", found["open"], None)
    yield row_of("grant-gate", "hook's word to stopped", "ms", found["close"], None)


def bench_slices() -> Iterator[Row]:
    with node(Options()) as emulator:
        found = run_on(emulator.directory, "slices")
    calls, grants, rings, waits = (round(found[name][0]) for name in ("calls", "grants", "rings", "waits"))
    note = f"processor time; {calls} driver calls and {rings} rings in {waits} of {CYCLES} pauses, {grants} beginnings"
    yield row_of("grant-slice", "own cost", "ms", found["own"], MARK_MS, note=note)
    yield row_of("grant-slice", "of it the hook's", "ms", found["hook"], None)


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"grant-gate": bench_gate, "grant-slice": bench_slices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rung", choices=list(RUNGS), help="The way of giving pauses to measure.")
    rung = RUNGS[parser.parse_args().rung]
    print(json.dumps(rung(Emulator(Path(os.environ["VALVE_EMU_DIR"])))))


if __name__ == "__main__":
    main()
