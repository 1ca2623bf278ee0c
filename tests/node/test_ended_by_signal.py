"""A stopped job that is told to end by a signal that it does not handle: no online call waits for its channels. On the
emulator's word: it says when the driver waited for channels that were off."""

from __future__ import annotations

import signal

import pytest
from node_rig import nothing_left_off, settled

WAITED = "disabled channels of pid"  # tools/emulator/server/uvm.c


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_driver_call_waits_for_a_stopped_job_that_a_signal_ends(node, number):
    offline, online = settled(node)
    online.hint(1)
    online.launch(us=100)
    offline.wait_off()

    offline.process.send_signal(number)
    ended = offline.process.wait(200)

    assert WAITED not in node.emulator.kernel_log()
    assert ended in (-number, -signal.SIGKILL), "by the latter where the machine was slow to let it end by itself"
    node.wait_for(lambda: node.status().gpus[0].channels == 0, "its channels leave the books")
    online.launch(us=100)
    online.hint(0)
    online.quit()
    node.wait_for(lambda: nothing_left_off(node), "no channel is off")
