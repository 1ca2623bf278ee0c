"""Settings of HarvestPolicies on a node: in force while the policy says so, and never after it is gone."""

from __future__ import annotations

import pytest
from kube_node import kube_node, registered, scenario, until
from memory_world import KvWorld
from node_world import World

from valved.config import Config, GrantedTable, MemoryTable
from valved.kube.follower import Follower
from valved.model.consent import Said
from valved.model.events import EventKind
from valved.model.ids import Remap

MEMORY = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, keep_s=1.0)
MS = 1_000_000


def resolved(**settings):
    return {"mode": "harvest", "resolved": settings}


@pytest.fixture
def memory(tmp_path):
    world = KvWorld(tmp_path, config=Config(memory=MEMORY), handles=20)
    yield world, Follower(world.brake, world.gating, world.kv)
    world.check()


def test_a_cooldown_is_never_in_force_after_its_policy_is_gone(tmp_path):
    world = World(tmp_path)
    own = world.gating.settings.cooldown
    follower = Follower(world.brake, world.gating)

    follower.obey(resolved(cooldown={"startMilliseconds": 15, "maxMilliseconds": 20}))
    assert world.gating.settings.cooldown.ceiling_ns == 20 * MS
    follower.obey(resolved(cooldown={"startMilliseconds": 30}))
    assert world.gating.settings.cooldown.ceiling_ns == own.ceiling_ns
    assert world.gating.settings.cooldown.start_ns == 30 * MS
    follower.obey(resolved())
    assert world.gating.settings.cooldown == own


def test_what_a_person_set_on_the_node_is_never_lost_to_a_policy_that_comes_and_goes(tmp_path):
    world = World(tmp_path)
    follower = Follower(world.brake, world.gating)
    follower.obey(resolved())
    world.node.set_policy(None, {"ceiling_ns": 90 * MS}, 0)

    follower.obey(resolved(cooldown={"maxMilliseconds": 50}))
    follower.obey(resolved())

    assert world.gating.settings.cooldown.ceiling_ns == 90 * MS


def test_a_rate_of_reclaims_is_never_left_unread_or_in_force_for_longer_than_its_policy(memory):
    world, follower = memory
    world.engine("online", columns=4, name="before")
    world.run(200)

    follower.obey(resolved(reclaimsPerHour=7))
    world.engine("online", columns=4, name="after")
    world.run(200)

    assert [one.settings.target_per_hour for one in world.kv.reserve.online.values()] == [7, 7]
    assert world.kv.report.state(MEMORY).target_per_hour == 7
    follower.obey(resolved())
    assert [one.settings.target_per_hour for one in world.kv.reserve.online.values()] == [30, 30]
    assert world.kv.report.state(MEMORY).target_per_hour == 30


@pytest.mark.parametrize(("accepted", "keeps"), [(None, False), (1, True)])
def test_memory_is_never_given_back_once_the_rate_of_a_policy_is_spent(memory, accepted, keeps):
    """The next give could only lead to a reclaim above what the policy accepts."""
    world, follower = memory
    world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=16)
    world.run(500)
    follower.obey(resolved(**({} if accepted is None else {"reclaimsPerHour": accepted})))
    online.want(used=32, wanted=32)
    world.run(500)
    assert world.events(EventKind.RECLAIMED)

    online.want(used=4, wanted=4)
    world.run(20_000)
    online.obey_target()
    world.run(1_000)

    assert (len(online.backed()) >= 32) is keeps


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"cooldown": {"maxMilliseconds": 3}}, "cooldown: "), ({"reclaimsPerHour": 0}, "reclaimsPerHour: ")],
)
def test_what_a_node_cannot_obey_is_never_obeyed_in_part(memory, settings, word):
    world, follower = memory
    own = world.gating.settings.cooldown

    follower.obey(resolved(**settings))

    (refused,) = follower.refused
    assert refused.startswith(word)
    assert world.gating.settings.cooldown == own
    assert world.kv.reserve.target_per_hour == 30
    follower.obey(resolved())
    assert follower.refused == ()


@scenario
async def test_a_refused_setting_is_never_silent(tmp_path):
    def condition(node):
        (found,) = (one for one in node.api.reports[-1]["conditions"] if one["type"] == "PolicyRefused")
        return found["status"], found["message"]

    async with kube_node(tmp_path) as node:
        await registered(node)
        await until(lambda: node.api.reports, 60)
        assert condition(node)[0] == "False"

        node.room._own_object({"spec": resolved(cooldown={"maxMilliseconds": 3}, reclaimsPerHour=7)})

        await until(lambda: condition(node)[0] == "True", 60)
        assert "cooldown needs" in condition(node)[1]
        assert node.world.kv.reserve.target_per_hour == 7


# What services offer that say nothing themselves

OFFER = {"slo": "tpot=40ms", "grant": True}


def consent(world):
    client = world.online(700, gpus=(0,))
    return world.books.clients[client].service


def test_granted_defaults_are_never_in_force_after_their_policy_is_gone(tmp_path):
    world = World(tmp_path)
    service = consent(world)
    follower = Follower(world.brake, world.gating, None, world.consents)

    follower.obey(resolved(granted=OFFER))
    assert world.consents.of(service).grant
    assert world.gate.granting.consents[service][0] > 0  # told at once

    follower.obey(resolved())
    assert not world.consents.of(service).grant
    assert world.gate.granting.consents[service] == (0, 0)


def test_a_policy_never_speaks_for_who_speaks_itself(tmp_path):
    world = World(tmp_path)
    service = consent(world)
    follower = Follower(world.brake, world.gating, None, world.consents)
    world.consents.say(service, Said(grant="false"))

    follower.obey(resolved(granted=OFFER))

    assert not world.consents.of(service).grant


def test_a_policy_comes_before_the_nodes_own_configuration_and_can_take_it_back(tmp_path):
    world = World(tmp_path, config=Config(granted=GrantedTable(slo="tpot=50ms", grant="true")))
    service = consent(world)
    follower = Follower(world.brake, world.gating, None, world.consents)

    follower.obey(resolved(granted={"grant": False}))
    assert not world.consents.of(service).grant

    follower.obey(resolved(granted=OFFER))
    assert world.consents.of(service).slo.tpot_ms == 40


@pytest.mark.parametrize("granted", [{"slo": "40", "grant": True}, {"grant": True}, {"slo": "gap=3ms"}])
def test_words_of_a_policy_without_sense_grant_nothing_whatever_the_node_says_and_are_named(tmp_path, granted):
    world = World(tmp_path, config=Config(granted=GrantedTable(slo="tpot=50ms", grant="true")))
    service = consent(world)
    follower = Follower(world.brake, world.gating, None, world.consents)

    follower.obey(resolved(granted=granted))

    assert not world.consents.of(service).grant
    assert follower.refused[0].startswith("granted: ")
