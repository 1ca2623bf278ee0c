"""An engine that says how many requests it has open: at most one preemption per request, exactly."""

from __future__ import annotations

import pytest
from node_rig import Offline, Online, service

EITHER = pytest.mark.parametrize("by", ["hint", "tell"])


def hinted(node, by="hint"):
    offline = Offline(node, "batch")
    offline.wait_running()
    online = Online(node, "chat")
    online.wait_ready()
    online.hint(0, by)
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
    offline.wait_running()
    return offline, online


def test_offline_work_stays_stopped_while_a_request_is_open_however_quiet_it_is(node):
    """Given an open request, when the service is quiet for many cooldowns, then offline work waits for its end."""
    offline, online = hinted(node)

    online.hint(1)
    online.launch(us=100)
    offline.wait_stopped()
    node.wait_for(lambda: "open" in service(node, "chat").state, "valved says that a request is open")
    beats = offline.beats
    online.launch(us=100)

    assert beats == offline.beats
    assert service(node, "chat").hinted
    assert service(node, "chat").open_requests == 1

    online.hint(0)
    offline.wait_running()


@EITHER
def test_a_request_stops_offline_work_before_its_first_launch(node, by):
    """The engine takes the request in while its host still plans; a request that never launches lets offline go on."""
    offline, online = hinted(node, by)

    online.hint(1, by)
    offline.wait_stopped()
    online.hint(0, by)
    offline.wait_running()


@EITHER
def test_each_request_is_preempted_for_at_most_once(node, by):
    offline, online = hinted(node, by)
    before = service(node, "chat").preemptions

    for number in range(1, 11):
        online.hint(1, by)
        offline.wait_stopped()
        for _ in range(3):
            online.launch(us=50)
        online.hint(0, by)
        offline.wait_running()
        node.wait_for(lambda ended=number: ended == service(node, "chat").requests, "the request is counted as ended")

    answer = service(node, "chat")
    assert before + 10 == answer.preemptions
    assert answer.max_preemptions_per_request == 1
    assert list(answer.preemptions_per_request)[:2] == [0, 10]
