"""What valved does for each service, again and again."""

from __future__ import annotations

import sys
from dataclasses import replace

from node_world import SECOND

from valved.gate.permits import rule_of
from valved.model.events import EventKind


def test_a_permission_never_costs_more_calls_than_its_own(world):
    """It is made for each service four times a second, and dataclasses.asdict copies each number by a call."""
    online = world.gating.online[world.service_of(world.online())]
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    rule_of(online, world.gating.settings.wake)
    sys.setprofile(None)

    assert calls == ["rule_of", "__init__"]


def test_who_passes_through_short_holds_is_not_looked_at_each_time_but_never_forgotten(world, monkeypatch):
    """A node of a hundred such services would look at ten of them four times a second, and learn nothing."""
    world.offline()
    online = world.online()
    world.run(1000)
    looks, view = [], world.gate.view

    def look(client, *, with_gaps=False):
        looks.append(client)
        return view(client, with_gaps=with_gaps)

    monkeypatch.setattr(world.gate, "view", look)
    began_ns = world.clock.now_ns()
    while world.clock.now_ns() < began_ns + 20 * SECOND:
        world.work(online, ms=2)  # and holds for its cooldown, far below a quarter of a tick
        world.run(60)

    held = [event for event in world.events(EventKind.HOLD, EventKind.GATE) if event.t_ns >= began_ns]
    assert len(held) > 100
    assert 2 <= len(looks) <= 8


def test_a_node_where_nothing_happens_is_not_read_four_times_a_second_and_what_happens_there_is_read_at_once(
    world, monkeypatch
):
    world.offline()
    online = world.online()
    reads, drain = [], world.gate.drain_stamps
    monkeypatch.setattr(world.gate, "drain_stamps", lambda: reads.append(1) or drain())
    world.run(5000)
    assert world.gate.is_prompt  # the next stamp rings
    reads.clear()
    world.run(8000)
    assert len(reads) <= 4

    world.gate.launch(online)
    world.run(1)
    assert world.gating.online[world.service_of(online)].holding
    assert not world.gate.is_prompt
    reads.clear()
    world.run(1000)
    assert len(reads) >= 4


def test_a_new_setting_never_waits_for_the_end_of_a_rest(world):
    world.offline()
    online = world.online()
    world.run(5000)
    assert world.gate.is_prompt
    world.gating.settings.cooldown = replace(world.gating.settings.cooldown, start_ns=SECOND // 5, floor_ns=SECOND // 5)
    world.run(2100)

    assert world.gating.online[world.service_of(online)].rule.cooldown_ns >= SECOND // 5
