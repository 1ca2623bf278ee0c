"""What a look has prepared is taken in the turn of the need, or not at all, and is a part of the reclaim that follows."""

from __future__ import annotations

import pytest
from memory_world import KvWorld
from valve_abi import KvMode

from valved.abi.kv_link import KvSpan
from valved.abi.link import LinkType
from valved.config import Config, MemoryTable
from valved.kv import reserve
from valved.kv.engines import STALE_NS
from valved.model.events import EventKind
from valved.model.ids import Remap, Role
from valved.model.memory import ReservationAction
from valved.state.registry import MEMORY_SERVICE

COLUMNS = 32
WANTED = 100  # blocks, four in a column


class Beside:
    """All memory is lent, and the card stands already: the service is at work when it needs more."""

    def __init__(self, folder, *, remap=Remap.HELPER, is_at_work=True, handles=16, **settings):
        memory = MemoryTable(
            handle_mib=2,
            remap=remap,
            headroom_min_mib=2,
            headroom_max_mib=2,
            pool_mib=2 * (COLUMNS + 1),
            order_s=0.05,
            **settings,
        )
        self.world = KvWorld(folder, config=Config(memory=memory), handles=COLUMNS + 1)
        self.firsts.handles = handles
        self.offline = self.world.engine("offline", columns=COLUMNS)
        self.world.run(500)
        for row in range(6):
            self.offline.hold(row, list(range(4 + 20 * row, 20 + 20 * row)), tokens=100 * (row + 1))
        self.online = self.world.engine("online", columns=COLUMNS)
        self.world.run(3000)
        if is_at_work:
            self.world.gate.launch(self.online.shim.client)
            self.world.run(50)

    @property
    def firsts(self):
        return self.world.kv.reserve._firsts

    @property
    def first(self):
        return self.world.kv.reserve.online[self.online.shim.entry.service].first

    def rings(self):
        """What was sent for it in this turn as it was prepared."""
        first = self.first
        self.online.want(used=4, wanted=WANTED)
        return first.orders if first is not None else []

    @property
    def handle_bytes(self):
        return self.world.kv.books.pool.handle_bytes

    def steps_long_ago(self):
        self.offline.hold(7, [124])  # a step since the index
        [engine] = self.world.kv.books.engines_with(Role.OFFLINE)
        engine.indexed_ns -= 2 * STALE_NS

    def cannot_lose(self):
        self.offline.book["mode"] = KvMode.NONE

    @property
    def is_held(self):
        self.world.gating.drain()
        return any(MEMORY_SERVICE in account.holders for account in self.world.gating.gpus.values())

    def ends_well(self):
        self.world.run(3000)
        assert not self.is_held
        self.world.check()


@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.SPARSE])
def test_what_is_taken_first_is_never_other_than_what_the_reclaim_would_take(tmp_path, remap):
    told = []
    for name, handles in ("first", 16), ("none", 10_000):
        beside = Beside(tmp_path / name, remap=remap, handles=handles)
        assert bool(beside.rings()) == (name == "first")
        beside.world.run(100)
        assert len(beside.online.backed()) >= WANTED
        _, event = beside.world.events(EventKind.RECLAIMED)  # the service took its headroom by the first one
        what = ("missing", "freed", "columns", "cost", "from", "late")
        told.append((event.reason, {key: event.detail[key] for key in what}, sorted(beside.offline.backed())))
        beside.ends_well()
    assert told[0] == told[1]


def pin(beside):
    number = next(iter(beside.offline.shim.ranges))
    beside.offline.shim.say(LinkType.KV_PIN, KvSpan(range=number, offset=0, bytes=20 * beside.handle_bytes))


CHANGES = {
    "columns are pinned": pin,
    "its hook has left": lambda beside: beside.world.register.leave(beside.offline.client, "link closed"),
    "an order was late": lambda beside: beside.world.kv.ways.unsafe.add(beside.offline.shim.client),
    "a brake is on": lambda beside: beside.world.kv.allow(False),
    "its process has ended": lambda beside: beside.offline.shim.die(),
    "its table of requests is old": lambda beside: beside.steps_long_ago(),
    "it can lose nothing any more": lambda beside: beside.cannot_lose(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_a_look_is_never_sent_as_it_was(tmp_path, change):
    """Nothing has looked since."""
    beside = Beside(tmp_path)
    assert beside.first.victims

    CHANGES[change](beside)

    assert not beside.rings()
    beside.ends_well()


def test_a_need_of_less_is_never_given_more(tmp_path):
    beside = Beside(tmp_path)
    first = beside.first

    beside.online.want(used=4, wanted=first.above_blocks)

    assert not first.orders
    beside.ends_well()


def test_nothing_is_ever_taken_from_work_that_runs(tmp_path):
    beside = Beside(tmp_path, is_at_work=False)
    assert beside.first.victims

    assert not beside.rings()

    beside.world.run(100)
    assert len(beside.online.backed()) >= WANTED
    beside.ends_well()


def test_the_gpu_is_never_open_while_what_was_taken_first_is_under_way(tmp_path):
    beside = Beside(tmp_path)
    offline = beside.offline.shim
    assert beside.rings()
    while beside.world.kv.books.orders.leaving(frozenset({offline.client})):
        assert beside.world.gate.is_gated(0)
        beside.world.clock.advance(10_000)
    beside.ends_well()


@pytest.mark.parametrize("fails", ["no reclaim is decided", "the decision fails", "the rest of the order fails"])
def test_what_was_taken_first_is_never_lost_where_no_reclaim_follows(tmp_path, monkeypatch, fails):
    beside = Beside(tmp_path)
    decide, take = reserve.decide, beside.firsts._moves.take

    def hold(*arguments):
        if fails == "the decision fails":
            raise RuntimeError(fails)
        state, decision = decide(*arguments)
        return state, reserve.replace(decision, action=ReservationAction.HOLD)

    def takes_half(*arguments):
        take(*arguments)
        raise RuntimeError(fails)

    with monkeypatch.context() as patched:
        if fails == "the rest of the order fails":
            patched.setattr(beside.firsts._moves, "take", takes_half)
        else:
            patched.setattr(reserve, "decide", hold)
        if fails == "no reclaim is decided":
            assert beside.rings()
        else:
            with pytest.raises(RuntimeError):
                beside.rings()
    assert beside.is_held
    assert beside.world.kv.books.orders.leaving(frozenset({beside.offline.shim.client}))

    while beside.world.kv.books.orders.leaving(frozenset({beside.offline.shim.client})):
        assert beside.world.gate.is_gated(0)
        beside.world.clock.advance(10_000)
    beside.ends_well()
    assert len(beside.online.backed()) >= WANTED  # asked for again, by the tick at the latest


def test_an_answer_that_never_comes_is_never_waited_for_longer_than_any(tmp_path):
    beside = Beside(tmp_path)
    beside.offline.shim.answers = False

    assert beside.rings()
    beside.world.run(1000)

    event = beside.world.events(EventKind.RECLAIMED)[1]
    assert event.detail["late"]
    assert not beside.is_held
    beside.offline.shim.catch_up()
    beside.ends_well()


def test_a_process_that_dies_over_what_was_taken_first_never_keeps_it(tmp_path):
    beside = Beside(tmp_path)
    assert beside.rings()

    beside.offline.shim.die()

    beside.ends_well()
    assert len(beside.online.backed()) >= WANTED
