"""The timeslice rung on a node: valved and shim as they ship, on the emulated card."""

from __future__ import annotations

import pytest
from node_rig import Offline, Online, service

DRIVER = "580.159.04"
RUNG = '[granted]\nslo = "tpot=40ms"\ngrant = "true"\nrung = "timeslice"\nslice_us = 300\n'


def slices(node, pid):
    return {channel.slice_us for channel in node.emulator.state().of(pid) if channel.is_compute}


@pytest.mark.parametrize("foreign", ["allow", "deny"])
def test_offline_work_has_its_short_slice_before_it_runs_by_whatever_rung_it_is_stopped(make_node, foreign):
    node = make_node(config=f'{RUNG}probed_driver = "{DRIVER}"\n', gsp_foreign=foreign)
    online = Online(node, "chat")
    online.wait_ready()
    offline = Offline(node, "batch")
    offline.wait_running()

    assert slices(node, offline.process.pid) == {300}
    assert slices(node, online.process.pid) <= {0}  # the service's own is left alone
    assert service(node, "chat").granted.rung == "timeslice"
    assert "slice" not in service(node, "chat").granted.words
    offline.wait_running()
    online.launch(us=200)
    offline.wait_stopped()


def test_with_a_driver_that_nobody_has_probed_no_slice_is_touched_and_status_says_so(make_node):
    node = make_node(config=RUNG)
    online = Online(node, "chat")
    online.wait_ready()
    offline = Offline(node, "batch")
    offline.wait_running()

    assert slices(node, offline.process.pid) == {0}
    assert service(node, "chat").granted.rung == "gate"
    assert f"granted.probed_driver names no driver, this is {DRIVER}" in service(node, "chat").granted.words
