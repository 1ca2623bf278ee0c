"""What valved does for each service, again and again."""

from __future__ import annotations

import sys

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
