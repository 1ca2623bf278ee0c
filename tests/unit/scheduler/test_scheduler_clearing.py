"""Which offline pods must go, whatever became of their SLA."""

from __future__ import annotations

import pytest
from controller_world import World
from reports import harvest_node, pod, uuids
from valve_kube import names
from valve_scheduler.controller.clearing import leavers


def told(spec, **status):
    node = harvest_node("n1")
    node["spec"] = spec
    node["status"] |= status
    here = pod("p1", node="n1", held=uuids("n1")[0], phase="Running")
    return [leaver.reason.value for leaver in leavers([here], {"n1": node})]


@pytest.mark.parametrize("mode", ["off", "observe"])
@pytest.mark.parametrize(
    "where",
    [
        lambda mode: told({"mode": mode}),
        lambda mode: told({"resolved": {"mode": mode}}, mode="harvest", phase="Harvesting"),
        lambda mode: told({}, mode=mode),  # a policy that was deleted: what the chart says is in force
    ],
)
def test_no_offline_pod_stays_on_a_node_whose_mode_in_force_is_not_harvest(where, mode):
    assert where(mode) == ["NodeNotHarvesting"]


def test_no_offline_pod_stays_on_a_node_that_was_drained_by_hand():
    assert told({}, mode="harvest", phase="Draining") == ["NodeNotHarvesting"]


def test_a_pod_that_nothing_can_stop_is_evicted_and_its_neighbour_is_not():
    node = harvest_node("n1", ungated=[{"podUID": "uid-p1", "seconds": 5.0}])
    bare, other = (pod(name, node="n1", held=uuids("n1")[0], phase="Running") for name in ("p1", "p2"))
    bare["metadata"]["uid"], other["metadata"]["uid"] = "uid-p1", "uid-p2"

    found = [(leaver.pod["metadata"]["name"], leaver.reason.value) for leaver in leavers([bare, other], {"n1": node})]

    assert found == [("p1", "OfflineUngated")]


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({}, {"mode": "harvest", "phase": "Paused"}),
        ({"paused": True}, {"mode": "harvest"}),
        ({"mode": "harvest"}, {"mode": "observe", "phase": "Observing"}),  # the daemon has not read it yet
        ({}, {}),
    ],
)
def test_a_pause_or_a_word_that_is_on_its_way_evicts_nobody(spec, status):
    assert told(spec, **status) == []


def by_annotation(name, role):
    """A pod that says what it is by an annotation alone; no watch of Valve shows it."""
    found = pod(name, annotations={names.ROLE: role}, node="n1", phase="Running")
    del found["metadata"]["labels"]
    return found


def test_an_ungated_pod_that_no_watch_shows_is_never_left_where_it_is():
    world = World()
    world.on_node["n1"] = [by_annotation("p1", "offline"), by_annotation("p2", "offline")]
    world.report(ungated=[{"podUID": "uid-p1", "seconds": 5.0}])

    asked = [path for method, path in world.clear() if method == "POST" and path.endswith("/eviction")]

    assert asked == ["/api/v1/namespaces/default/pods/p1/eviction"]
    assert world.events()[0][0] == "OfflineUngated"


def test_a_node_s_word_never_evicts_what_is_not_offline_or_runs_elsewhere():
    world = World()
    world.on_node["n1"] = [by_annotation("p1", "online")]
    world.on_node["n2"] = [by_annotation("p3", "offline")]
    world.report(ungated=[{"podUID": "uid-p1"}, {"podUID": "uid-p3"}])

    assert [method for method, _ in world.clear()] == ["GET"]


def test_a_node_is_not_read_for_ungated_pods_that_the_watch_shows():
    world = World()
    world.pods.sink.put(pod("p1", node="n1", held=uuids("n1")[0], phase="Running"))
    world.report(ungated=[{"podUID": "uid-p1"}])

    assert [method for method, _ in world.clear()] == ["POST", "POST"]
