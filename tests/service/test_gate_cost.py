"""What valved does for each service, again and again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from instructions import calls_of
from node_world import SECOND
from valved.native._gate import ffi

from valved.gate.permits import rule_of
from valved.machine.stamps import Stamp, StampKind, Stamps
from valved.model.events import Event, EventKind
from valved.model.ids import GpuIndex
from valved.state.journal import QUIET


def test_a_permission_never_costs_more_calls_than_its_own(world):
    """It is made for each service four times a second, and dataclasses.asdict copies each number by a call."""
    online = world.gating.online[world.service_of(world.online())]

    assert calls_of(partial(rule_of, online, world.gating.settings.wake)) == ["rule_of", "__init__"]


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


def stamp_of(world, online, code, after):
    """Of a hold or a wake, `after` epochs behind the last."""
    service, at_ns = world.service_of(online), world.clock.now_ns() + 1000 * after
    epoch = world.gate.services[service].epoch + after
    return Stamp(service, online, at_ns, at_ns, 0, at_ns, int(code), GpuIndex(0), epoch, 0, 0)


EDGE_CALLS = {
    StampKind.HOLD: ["take", "_held", "hold", "advance", "begin_hold", "put_unmade"],
    StampKind.WAKE: ["take", "_woken", "release", "advance", "end_hold", "put_unmade"],
}


def test_an_ordinary_edge_never_costs_more_calls_than_its_own(world):
    """There may be a thousand a second, and nobody reads most of what is noted of them."""
    world.offline()
    online = world.online()
    world.work(online, ms=2)
    world.run(100)
    stamps = [stamp_of(world, online, kind, 1 + number) for number, kind in enumerate(EDGE_CALLS)]

    assert [calls_of(partial(world.gating.edges.take, stamp)) for stamp in stamps] == list(EDGE_CALLS.values())


def test_a_hold_beside_another_never_settles_the_account_of_its_gpu(world):
    world.offline()
    online, other = world.online(), world.online()
    world.run(100)
    take = world.gating.edges.take
    take(stamp_of(world, other, StampKind.HOLD, 1))
    stamps = [stamp_of(world, online, kind, 1 + number) for number, kind in enumerate(EDGE_CALLS)]

    assert not any("advance" in calls_of(partial(take, stamp)) for stamp in stamps)

    take(stamp_of(world, other, StampKind.WAKE, 2))


def test_reading_stamps_never_costs_a_call_for_each():
    stamps = Stamps(bytes(ffi.buffer(ffi.new("struct valve_stamp[]", 100))))

    assert calls_of(lambda: list(stamps))[1:] == ["__iter__", "__len__"]


def test_an_edge_that_was_noted_unread_is_no_other_event_than_one_that_was_watched(world):
    world.offline()
    online = world.online()
    world.run(100)
    watcher = world.journal.watch((), 100, lambda: None)
    world.work(online, ms=2)
    world.run(100)
    watched = [event for event, _ in watcher.take() if event.kind in QUIET]
    world.journal.unwatch(watcher)
    world.work(online, ms=2)
    world.run(100)

    def shape(event):
        return event.kind, event.service, event.client, event.gpus, event.reason, set(event.detail)

    unread = world.events(*QUIET)[-len(watched) :]
    assert {EventKind.GATE, EventKind.WAKE} <= {event.kind for event in unread}
    assert [*map(shape, unread)] == [*map(shape, watched)]


def test_what_was_noted_unread_is_never_made_an_event_twice(world):
    """Who asks for what is not there goes through all that is kept, while the loop waits."""
    made = []

    def make(seq, *_):
        made.append(seq)
        return Event(seq, 1, EventKind.HOLD)

    for _ in range(3):
        world.journal.put_unmade(make, None, None)

    assert world.events(EventKind.HOLD)[-3:] == world.events(EventKind.HOLD)[-3:]
    assert sorted(made) == sorted(set(made))
    assert len(made) == 3
