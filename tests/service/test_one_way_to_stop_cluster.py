"""Every word of a cluster about a node, in every state of offline work, with daemons that end and come back in between:
at no moment does an offline channel run beside a busy online service.

On a Kubernetes node valved ends nobody's process: the controller evicts pods, and a disruption budget may refuse that.
The cluster's word outlives a daemon: it is in the GPUHarvestNode that the next one reads.
"""

from __future__ import annotations

import itertools

import pytest
from stop_machine import OFFLINE, RESTARTS, STATES, machine_with

from valved.config import Config, KubeTable
from valved.kube.follower import Follower
from valved.model.ids import GpuIndex, Mode
from valved.policy.stopping import Work
from valved.state.registry import GUARD_SERVICE

CONFIG = Config(mode=Mode.OBSERVE, kube=KubeTable(node="n1"))
HARVEST = {"mode": "harvest"}


class Cluster:
    """What the API server holds about this node, and the follower of the daemon of the moment."""

    def __init__(self):
        self.spec, self.is_fleet_paused, self.is_guarded, self.is_away = dict(HARVEST), False, False, False
        self.follower = None

    def begin(self, world):
        """A daemon starts. Without an API server it knows only what it is configured for, and the pause file."""
        self.follower = Follower(world.brake, world.gating)
        world.gating.set_standing(GUARD_SERVICE, frozenset({GpuIndex(0)} if self.is_guarded else ()))
        self.tell()

    def tell(self):
        if not self.is_away:
            self.follower.obey(self.spec)
            self.follower.obey_brake(self.is_fleet_paused)

    def say(self, machine, *, spec=None, is_fleet_paused=False, is_guarded=False, is_away=False):
        self.spec, self.is_fleet_paused, self.is_guarded = dict(spec or HARVEST), is_fleet_paused, is_guarded
        self.is_away = is_away
        machine.world.gating.set_standing(GUARD_SERVICE, frozenset({GpuIndex(0)} if is_guarded else ()))
        self.tell()


# What is said, the state of offline work that follows, and whether the controller evicts.
WORDS = {
    "fleet paused": ({"is_fleet_paused": True}, Work.HELD, False),
    "node paused": ({"spec": {**HARVEST, "paused": True}}, Work.HELD, False),
    "node observes": ({"spec": {"mode": "observe"}}, Work.LEAVING, True),
    "node off": ({"spec": {"mode": "off"}}, Work.LEAVING, True),
    "policy observes": ({"spec": {"resolved": {"mode": "observe"}}}, Work.LEAVING, True),
    "policy deleted": ({"spec": {"resolved": {}}}, Work.LEAVING, True),
    "policy drains": ({"spec": {**HARVEST, "resolved": {"mode": "off", "drain": "policy x"}}}, Work.LEAVING, True),
    "driver upgrade": ({"spec": {"resolved": {"mode": "harvest", "drain": "GPU Operator"}}}, Work.LEAVING, True),
    "guard": ({"is_guarded": True}, Work.RUNNING, False),
    "API server away": ({"is_away": True}, Work.RUNNING, False),
    "harvest": ({}, Work.RUNNING, False),
}


def node_of(folder, state, cluster):
    return machine_with(folder, state, obeys=True, config=CONFIG, started=cluster.begin)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("word", WORDS)
def test_offline_never_runs_beside_a_busy_service_whatever_the_cluster_says(tmp_path, word, state, restart):
    for number, (second, again) in enumerate(zip(WORDS, itertools.cycle(RESTARTS), strict=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        cluster = Cluster()
        machine = node_of(folder, state, cluster)

        cluster.say(machine, **WORDS[word][0])
        machine.check()
        machine.serve()
        machine.connect(OFFLINE)
        machine.restart(restart)
        machine.serve()
        cluster.say(machine, **WORDS[second][0])
        machine.serve()
        if number % 2 and WORDS[second][2]:
            machine.end(OFFLINE)  # evicted
        machine.restart(again)
        machine.serve()

        assert not machine.signals, "pods are the kubelet's to end"
        cluster.say(machine)
        machine.connect(OFFLINE)
        machine.run(3000, step=50)
        machine.world.check()
        lives = machine.world.processes.start_time(OFFLINE) is not None
        assert machine.is_running() is lives, f"{second}, {again}: who was not evicted goes on"


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_cluster_ends_in_the_state_that_it_names(tmp_path, word):
    said, expected, is_evicted = WORDS[word]
    cluster = Cluster()
    machine = node_of(tmp_path, "running", cluster)

    cluster.say(machine, **said)
    machine.run(200)
    assert machine.world.brake.work is expected
    machine.launch()
    machine.run(100_000, step=1000)  # its disruption budget refuses the eviction, and the service stays busy
    machine.finish()
    machine.run(500)
    assert bool(machine.off) is (word not in ("harvest", "API server away")), "held also while online is idle"
    if is_evicted:
        assert machine.world.leaving.since_s() > 90, "the report says how long it has been leaving"
        machine.end(OFFLINE)
        machine.run(500)
        assert machine.world.brake.work is Work.EMPTY


@pytest.mark.parametrize("how", ["SIGTERM", "crash"])
def test_without_an_api_server_a_new_daemon_keeps_a_pause_of_the_fleet(tmp_path, how):
    cluster = Cluster()
    machine = node_of(tmp_path, "running", cluster)
    cluster.say(machine, is_fleet_paused=True)
    cluster.is_away = True

    machine.restart(how)
    machine.run(1000)

    assert machine.off
    assert machine.world.brake.is_paused
