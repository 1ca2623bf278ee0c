"""A service that nobody started with Valve, beside offline work: the card is its own while it lives."""

from __future__ import annotations

from node_rig import Offline, Online


def test_offline_work_never_goes_on_beside_a_service_that_was_started_without_valve(node):
    offline = Offline(node, "batch")
    offline.wait_running()
    alone = Online(node, "plain", role="")
    alone.wait_ready()

    offline.wait_stopped()
    (gpu,) = node.status().gpus
    assert gpu.guarded_because.startswith(f"process {alone.process.pid} (")
    beats = offline.beats
    for _ in range(20):
        alone.launch(us=1000)
    assert offline.beats == beats

    alone.quit()
    offline.wait_running()
    node.wait_for(lambda: not node.status().gpus[0].guarded_because, "the guard lets go")


def test_the_guard_can_be_switched_off(make_node):
    node = make_node(config="guard_bystanders = false")
    offline = Offline(node, "batch")
    offline.wait_running()
    alone = Online(node, "plain", role="")
    alone.wait_ready()
    alone.launch(us=1000)
    offline.wait_running()
    assert not node.status().gpus[0].guarded_because
