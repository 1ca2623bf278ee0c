"""A valved at rest: what did not change is not told anew, and what changes without a word is told all the same."""

from __future__ import annotations

import json

import pytest
from node_world import World, successor

from valved.abi.link import Feature
from valved.model.consent import Said
from valved.model.ids import Role
from valved.paths import WEIGHTS_FILE

CHAT, MS = 700, 1_000_000


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.shim_features |= Feature.GRANT  # else nothing is grantable, whatever changes
    made.sharing.begin()
    made.processes.add(CHAT)
    made.node.launch(CHAT, made.processes.start_time(CHAT), Role.ONLINE, "chat", Said(share_weights="true"))
    return made


@pytest.fixture
def bare(tmp_path):
    return World(tmp_path)


def rest(world):
    """Two looks: the first is for what was told just before."""
    for _ in range(2):
        world.gating.listener.time_passed()


def told(world):
    return json.loads((world.folder / WEIGHTS_FILE).read_text()), world.gate.granting.grantable


def client_leaves(world, clients):
    world.register.leave(clients["online"], "link closed")


def client_without_channels_leaves(world, clients):
    world.register.leave(clients["bare"], "link closed")


def hook_leaves(world, clients):
    world.register.leave(clients["hook"], "link closed")


def service_ends(world, clients):
    world.processes.end(CHAT)
    world.run(10)


def offline_ends(world, clients):
    world.processes.end(world.books.clients[clients["offline"]].process.pid)
    world.run(10)


def another_service_is_claimed(world, clients):
    world.processes.add(710)
    world.node.launch(710, world.processes.start_time(710), Role.ONLINE, "more")


def process_says_that_it_uses_mps(world, clients):
    world.books.note_mps(world.books.clients[clients["offline"]])


def leftover_ends(world, clients):
    world.register.leave(clients["offline"], "link closed")
    rest(world)
    world.register.channels.leftovers.take_where(lambda left: True)


@pytest.mark.parametrize(
    "change",
    [
        client_leaves,
        client_without_channels_leaves,
        hook_leaves,
        service_ends,
        offline_ends,
        another_service_is_claimed,
        process_says_that_it_uses_mps,
        leftover_ends,
    ],
)
def test_what_changed_is_never_told_later_than_at_the_next_look(world, change):
    online = world.online(pid=701, parent=CHAT)
    clients = {"online": online, "hook": world.hook(online), "offline": world.offline(gpus=(0,))}
    clients["bare"] = world.online(pid=702, parent=CHAT, gpus=())
    world.run(100)
    world.gate.launch(online)
    world.run(10)
    rest(world)
    change(world, clients)

    world.gating.listener.time_passed()

    seen = told(world)
    world.gating.listener.clients_changed()
    assert seen == told(world)


def test_nothing_is_made_anew_while_nothing_changes(world, monkeypatch):
    world.online(pid=701, parent=CHAT)
    world.offline()
    world.run(1000)
    rest(world)
    monkeypatch.setattr(world.gating.listener, "clients_changed", lambda: pytest.fail("nothing has changed"))

    rest(world)


def test_a_telling_that_failed_is_never_the_last(world, monkeypatch):
    rest(world)
    entry = world.sharing._entry
    monkeypatch.setattr(world.sharing, "_entry", lambda service: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.online(pid=701, parent=CHAT)
    monkeypatch.setattr(world.sharing, "_entry", entry)

    world.gating.listener.time_passed()

    seen = told(world)
    world.gating.listener.clients_changed()
    assert seen == told(world)


def test_a_file_that_could_not_be_written_is_tried_again_although_nothing_changed(world, monkeypatch):
    rest(world)
    file = world.folder / WEIGHTS_FILE
    before = file.read_text()
    blocked = file.with_name(f".{file.name}.new")
    blocked.mkdir()
    world.online(pid=701, parent=CHAT)
    assert not file.exists()  # withdrawn
    rest(world)
    blocked.rmdir()

    world.gating.listener.time_passed()

    assert file.read_text() != before


def test_held_time_in_which_nobody_looked_never_counts_as_busy(bare):
    """The mode was harvest for long, without offline work. Observing, the idle share was of all that time."""
    online = bare.online()
    bare.run(1_000_000)
    assert bare.state(online).busy_ns(bare.clock.now_ns()) == 0

    bare.gating.permits.ask_idleness("observe", True)
    bare.run(10_000)

    state, now_ns = bare.state(online), bare.clock.now_ns()
    assert state.busy_ns(now_ns) + state.idle_ns(now_ns) == pytest.approx(10_000 * MS, rel=0.01)
    assert state.busy_ns(now_ns) < 100 * MS  # until it was found idle
    assert state.hold_ns(now_ns) >= 1_000_000 * MS


def test_held_time_that_was_looked_at_is_busy_before_during_and_after_one_that_was_not(bare):
    bare.gating.permits.ask_idleness("observe", True)
    online = bare.online()
    bare.run(1)
    for _ in range(3):
        bare.gate.launch(online)  # busy until it is said to be done
        bare.run(1000)
        bare.gating.permits.ask_idleness("observe", False)
        bare.run(5000)
        bare.gating.permits.ask_idleness("observe", True)
        bare.run(1000)

    assert bare.state(online).busy_ns(bare.clock.now_ns()) == pytest.approx(6000 * MS, rel=0.01)


@pytest.fixture
def held_unseen(bare):
    """An online service at work whose stamp was lost: the books have it as idle."""
    bare.offline()
    online = bare.online()
    bare.run(100)
    bare.gate.launch(online)
    bare.gate.stamps.clear()
    assert not bare.state(online).holding
    return bare.state(online)


def test_no_lost_stamp_waits_for_the_thorough_look_of_each_minute(bare, held_unseen):
    bare.gate.lost += 1

    bare.gating.resync(is_thorough=False)

    assert held_unseen.holding


@pytest.mark.parametrize("thorough", [True, False])
def test_a_look_that_fails_is_never_the_last_at_a_lost_stamp(bare, held_unseen, monkeypatch, thorough):
    bare.gate.lost += not thorough
    with monkeypatch.context() as patch:
        patch.setattr(bare.gate, "is_gated", lambda gpu: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            bare.gating.resync(is_thorough=thorough)

    bare.gating.resync(is_thorough=False)

    assert held_unseen.holding


def test_no_service_is_looked_at_while_no_stamp_is_missing(bare):
    bare.offline()
    bare.online()
    bare.run(1000)
    bare.gate.look = lambda service: pytest.fail("nothing is missing")

    bare.gating.resync(is_thorough=False)


def test_held_time_is_never_lost_or_turned_into_busy_time_by_a_restart(bare):
    """The hold under way counts, and so does the part of it in which nobody looked."""
    online = bare.online()
    bare.run(1_000_000)
    bare.gating.permits.ask_idleness("observe", True)
    for _ in range(20):
        bare.gate.launch(online)
        bare.run(1000)
    state, now_ns = bare.state(online), bare.clock.now_ns()
    before = state.hold_ns(now_ns), state.busy_ns(now_ns), state.idle_ns(now_ns)
    assert before[1] > 19_000 * MS

    second = successor(bare)

    restored = second.gating.online[state.id]
    now_ns = second.clock.now_ns()
    assert (restored.hold_ns(now_ns), restored.busy_ns(now_ns), restored.idle_ns(now_ns)) == before


def test_the_breaker_never_takes_what_a_predecessor_held_for_time_of_its_own_window(bare):
    bare.offline()
    online = bare.online()
    for _ in range(3):
        bare.work(online, ms=5)
        bare.run(10_000)

    second = successor(bare)

    restored = second.gating.online[bare.state(online).id]
    assert restored.book.held_ns
    assert restored.unjudged(second.clock.now_ns(), restored.book.held_ns).held_ns == 0


def test_a_service_never_stays_stopped_for_a_process_that_ended_while_it_was_waited_for(bare):
    """Its last look was before that, and nothing else may ever make anybody look at it again."""
    bare.offline(pid=300)
    bare.online(pid=200)
    bare.online(pid=201, parent=200)
    second = successor(bare)
    second.offline(pid=300)
    second.online(pid=200)
    second.run(60_000)
    while_alive = bool(second.gate.off)

    second.processes.end(201)
    second.handover.settle(patience_over=True)
    second.run(60_000)

    assert while_alive
    assert not second.gate.off
    second.check()


def test_a_look_that_fails_is_never_the_last(bare, monkeypatch):
    """A service without a permission is looked at for what changed alone: this may be the only one for hours."""
    bare.online()
    bare.run(1000)
    bare.offline()
    drain, looks = bare.gate.drain_stamps, []

    def fails_once():
        looks.append(bare.clock.now_ns())
        if len(looks) == 1:
            raise RuntimeError("a stamp that makes no sense")
        return drain()

    monkeypatch.setattr(bare.gate, "drain_stamps", fails_once)
    while_owed = bool(bare.gate.off)
    with pytest.raises(RuntimeError, match="no sense"):
        bare.clock.advance(1000 * MS)
    bare.clock.advance(60_000 * MS)

    assert while_owed
    assert not bare.gate.off
