"""A neighbour of the same user for which the kernel passes no descriptors: valved fetches them, from the real shim."""

from __future__ import annotations

import pytest
from node_rig import Offline, Online, nothing_left_off
from under_way import BOUNDED, neighbour

from valved.clients.fetching import fetched

pytestmark = pytest.mark.skipif(not fetched(), reason="this kernel has no SO_PEERPIDFD")


def test_offline_work_never_runs_beside_a_service_for_what_a_neighbour_has_under_way(node):
    """Channels count, and are stopped, only once their process has shown the file that owns them."""
    with neighbour():
        offline = Offline(node, "batch", prefix=BOUNDED)
        offline.wait_running()
        online = Online(node, "chat", prefix=BOUNDED)
        online.wait_ready()
        state = node.emulator.state()
        told = {pid: len(state.of(pid)) for pid in (offline.process.pid, online.process.pid)}
        node.wait_for(lambda: [gpu.channels for gpu in node.status().gpus] != [0], "they count")

        online.launch(us=1_000)
        offline.wait_stopped()

    assert all(told.values())
    node.wait_for(lambda: nothing_left_off(node), "it is woken")
    offline.wait_running()
    assert "Traceback" not in (node.folder / "valved.log").read_text(errors="replace")
