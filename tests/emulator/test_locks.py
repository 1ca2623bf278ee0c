"""Which callers wait for each other: the driver's lock scopes, shown by standing still inside a call.

A `hold` fault stops a call where the driver would spin for the firmware, its locks held. Whoever can then finish was
not behind one of those locks; whoever could not, entered after the held call had returned.
"""

from __future__ import annotations

import struct
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any

import pytest
from rm_process import RmProcess, Tree, grow_tree, use_uvm
from valve_tools.emulator.client import Emulator, GateCall
from valve_tools.emulator.node import NO_LATENCY, Options

MIB = 1 << 20

pytestmark = [
    pytest.mark.parametrize("emulator", [Options(gpus=8, knobs=NO_LATENCY)], indirect=True),
]


def daemons(stack: ExitStack, emulator: Emulator, gpus: int) -> list[Tree]:
    """One process, one client and one thread per card: how a daemon has to issue calls that shall run in parallel."""
    process = stack.enter_context(RmProcess(emulator.directory))
    return [grow_tree(process, gpu=gpu, channels=1) for gpu in range(gpus)]


def gate_all(emulator: Emulator, trees: list[Tree], held: int) -> list[Future[Any]]:
    """Gate card 0, wait until that call stands at its hold, then gate the others. The first `held` cards hold."""
    emulator.fault(*[f"on disable gpu {gpu}: hold" for gpu in range(held)])
    calls = [trees[0].start_gate(trees[0].pairs, on=False)]
    emulator.wait_held(1)
    calls += [tree.start_gate(tree.pairs, on=False) for tree in trees[1:]]
    return calls


def overlap(first: GateCall, second: GateCall) -> bool:
    return first.locked_ns < second.done_ns and second.locked_ns < first.done_ns


@pytest.mark.parametrize("lock", ["device-only", "route-to-physical"])
def test_with_the_driver_patch_eight_cards_are_gated_at_the_same_time(emulator: Emulator, lock: str) -> None:
    emulator.set(lock=lock)
    with ExitStack() as stack:
        trees = daemons(stack, emulator, 8)

        calls = gate_all(emulator, trees, held=8)
        emulator.wait_held(8)  # all eight stand inside the driver at once
        emulator.release()
        wait(calls, timeout=200)
        gates = emulator.state().gates

    assert len(gates) == 8
    assert all(overlap(first, second) for first in gates for second in gates)


def test_with_the_stock_driver_eight_cards_are_gated_one_after_another(emulator: Emulator) -> None:
    with ExitStack() as stack:
        trees = daemons(stack, emulator, 8)

        calls = gate_all(emulator, trees, held=1)
        waiting = sum(not call.done() for call in calls)
        emulator.release()
        wait(calls, timeout=200)
        gates = sorted(emulator.state().gates, key=lambda gate: gate.locked_ns)

    assert (waiting, len(gates)) == (8, 8)
    assert not any(overlap(first, second) for first in gates for second in gates if first is not second)


def test_one_client_serialises_its_calls_even_with_the_patch(emulator: Emulator) -> None:
    """Each client has a write lock for the length of a control: one root client per card, or nothing is gained."""
    emulator.set(lock="device-only")
    with ExitStack() as stack:
        process = stack.enter_context(RmProcess(emulator.directory))
        tree = grow_tree(process, channels=1)

        calls = gate_all(emulator, [tree, tree], held=1)
        emulator.release()
        emulator.wait_held(1)  # the second one stands only now
        emulator.release()
        wait(calls, timeout=200)
        first, second = emulator.state().gates

    assert not overlap(first, second)


def test_an_allocation_waits_for_a_gate_and_a_later_gate_waits_for_it(emulator: Emulator) -> None:
    """Allocations take the API lock to write; gates share it. A waiting writer keeps later readers out."""
    emulator.set(lock="device-only")
    with ExitStack() as stack:
        trees = daemons(stack, emulator, 2)
        calls = gate_all(emulator, trees[:1], held=1)

        allocation = trees[1].process.start(
            "ioctl", fd=trees[1].ctl, request=0xC020462B, arg=(b"\0" * 12 + b"\x41" + b"\0" * 19).hex()
        )
        was_done = allocation.done()
        emulator.release()
        wait([*calls, allocation], timeout=200)

    assert not was_done
    assert allocation.result()[0] == 0


def test_a_gate_waits_for_the_mapping_that_came_before_it(emulator: Emulator) -> None:
    """Mapping holds the API lock to write, whatever the card: done between two gates it delays the second one."""
    with ExitStack() as stack:
        gating, mapping = daemons(stack, emulator, 2)
        use_uvm(mapping)
        base = int(mapping.process.call("reserve", length=MIB))
        mapping.process.ioctl(mapping.uvm, 73, struct.pack("<QQII", base, MIB, 0, 0))
        memory = mapping.allocate_memory(MIB).handle
        arg = struct.pack("<QQQ", base, MIB, 0) + bytes(256 * 36)
        arg += struct.pack("<QiIII", 1, mapping.ctl, mapping.client, memory, 0)
        emulator.set(map_us=500_000, map_locked_us=500_000)

        mapped = mapping.process.start("ioctl", fd=mapping.uvm, request=33, arg=arg.hex())
        emulator.wait(lambda state: state.raw["api_lock"]["writer"] or mapped.done(), "the mapping holds the lock")
        gate = gating.start_gate(gating.pairs, on=False)
        wait([mapped, gate], timeout=200)
        page = emulator.process(mapping.process.pid)
        (call,) = [call for call in page.intervals() if call.kind == "map ioctl"]
        spent = page.spent()["map ioctl"]

    assert call.begin_ns < emulator.state().gates[0].entry_ns
    assert emulator.state().gates[0].locked_ns - call.begin_ns >= 500_000_000
    assert (spent.count, spent.model_ns >= 500_000_000, spent.wall_ns >= spent.model_ns) == (1, True, True)
