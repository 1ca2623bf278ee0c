"""One launch through every room: shim, region, doorbell, native gate, driver, and back (ARCHITECTURE.md)."""

from __future__ import annotations

import pytest
from node_rig import Offline, Online, nothing_left_off, service, settled


def test_an_online_launch_stops_offline_work_and_idleness_wakes_it(node):
    """Given a beating offline job, when an online kernel is launched, then it stands still, and beats again later."""
    offline, online = settled(node)
    before = service(node, "chat").preemptions

    launched_ns, _, done_ns = online.launch(us=200)
    offline.wait_stopped()

    assert launched_ns < done_ns
    offline.wait_running()
    gates = [gate for gate in node.emulator.state().gates if not gate.on and gate.entry_ns > launched_ns]
    assert len(gates) == 1
    assert gates[0].status == 0
    assert gates[0].entry_ns <= gates[0].stopped_ns <= gates[0].done_ns
    node.wait_for(lambda: service(node, "chat").preemptions == before + 1, "the preemption is counted once")


def test_after_both_have_left_nothing_is_off_and_the_books_are_empty(node):
    offline, online = Offline(node, "batch"), Online(node, "chat")
    online.wait_ready()
    online.launch()
    offline.wait_running()

    for process in (online.process, offline.process):
        process.kill()
        process.wait()

    node.wait_for(lambda: not node.status().clients, "both clients are forgotten")
    node.wait_for(lambda: nothing_left_off(node), "no channel is off")
    assert [gpu.channels for gpu in node.status().gpus] == [0]


@pytest.mark.parametrize("driver", ["535.98", "570.211.01", "590.48.01"])
def test_the_journey_is_the_same_on_every_driver_branch(make_node, driver):
    """Layouts differ between branches (proto/abi/nvrm.h): 2 or 3 byte schedule calls, UVM calls without a UUID."""
    node = make_node(driver=driver)
    offline, online = Offline(node, "batch"), Online(node, "chat")
    online.wait_ready()
    offline.wait_running()

    online.launch(us=100)
    offline.wait_stopped()
    offline.wait_running()

    online.quit()
    node.wait_for(lambda: service(node, "chat") is None, "the service is gone")
    assert node.emulator.state().unknown("uvm") == {}
