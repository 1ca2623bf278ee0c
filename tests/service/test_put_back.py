"""A valved that follows one of another version, or one that was killed: what it must not lose."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_gate import FakeGate
from node_world import World, successor
from prometheus_client.parser import text_string_to_metric_families

from valved.model.ids import Mode, Role
from valved.scraping import Scraped
from valved.state import saved as state


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def test_a_service_never_loses_its_claim_because_an_upgrade_is_taken_back(first):
    """It would be refused as a stranger until somebody starts it anew, and its GPU guarded."""
    online = first.online(pid=200, name="chat")
    first.offline()
    service = first.service_of(online)
    first.node.set_policy(Mode.OBSERVE, {}, 0)
    path = first.folder / "state.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "version": state.VERSION + 1}))

    saved, problem = state.load(path)
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    second.handover.restore(saved, come_back_s=2.0)

    assert "version" in problem
    assert second.handover.policy.mode is Mode.OBSERVE
    assert (second.books.services[service].name, second.books.services[service].role) == ("chat", Role.ONLINE)
    assert len(second.register.channels.leftovers) == 0
    second.run(10_000)  # no shim of it has come back: it may stand still
    assert second.books.services[service].gpus == {0}


def test_what_was_scraped_is_never_taken_back_by_a_kill(first):
    """To Prometheus a counter that falls began anew: all that the service was ever delayed would be one more delay."""

    def page(world):
        text = asyncio.run(Scraped(world.node.status, save=world.node.save).body()).decode()
        return {
            (sample.name, *sample.labels.items()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.type in ("counter", "histogram") and not sample.name.endswith("_created")
        }

    _, online = first.offline(), first.online()
    first.run(200)
    first.handover.save()
    for _ in range(5):
        first.work(online, ms=5)
        first.run(200)
    before = page(first)

    after = page(successor(first, was_killed=True))

    assert before["valve_gates_total",] > 0
    assert {name for name, value in after.items() if 0 < value < before.get(name, 0)} == set()
    assert after["valve_gates_total",] >= before["valve_gates_total",]
