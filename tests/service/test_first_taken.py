"""What a look has prepared is taken in the turn of the need or not at all, and it is a part of the reclaim then."""

from __future__ import annotations

import pytest
from memory_world import KvWorld
from valve_abi import KvMode

from valved.abi.kv_link import KvNeed, KvSpan
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv import reserve
from valved.kv.engines import STALE_NS
from valved.kv.first import SIZES
from valved.machine.cards import CardUse
from valved.model.events import EventKind
from valved.model.ids import Remap, Role
from valved.model.memory import ReservationAction
from valved.state.registry import MEMORY_SERVICE

COLUMNS = 48
WANTED = 150  # blocks, four in a column


class Beside:
    """All memory is lent, and the card stands already: the service is at work when it needs more."""

    def __init__(
        self, folder, *, remap=Remap.HELPER, is_at_work=True, has_others=False, sizes=SIZES, room=0, **settings
    ):
        memory = MemoryTable(
            handle_mib=2,
            remap=remap,
            headroom_min_mib=2,
            headroom_max_mib=2,
            pool_mib=2 * (COLUMNS + 1 + has_others + room),
            order_s=0.05,
            **settings,
        )
        self.world = KvWorld(folder, config=Config(memory=memory), handles=COLUMNS + 1 + has_others + room)
        self.firsts.sizes = sizes
        columns = COLUMNS // (1 + has_others)
        self.offline, *_ = [self.lends(columns) for _ in range(1 + has_others)]
        self.online = self.world.engine("online", columns=COLUMNS)
        self.world.run(3000)
        if is_at_work:
            self.world.gate.launch(self.online.shim.client)
            self.world.run(50)

    def lends(self, columns):
        hook = self.world.engine("offline", columns=columns, name=f"lends{len(self.world.shims)}")
        self.world.run(500)
        for row in range(columns // 6):
            hook.hold(row, list(range(4 + 20 * row, 20 + 20 * row)), tokens=100 * (row + 1))
        return hook

    @property
    def firsts(self):
        return self.world.kv.reserve._firsts

    @property
    def foreseen(self):
        return self.world.kv.reserve.online[self.online.shim.entry.service].foreseen

    def rings(self, wanted=WANTED):
        """What was sent for it in this turn as it was prepared: orders."""
        seen = self.foreseen
        self.online.want(used=4, wanted=wanted)
        return [order for first in seen.firsts for order in first.orders] if seen is not None else []

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


@pytest.mark.parametrize("has_others", [False, True], ids=["one engine", "two engines"])
@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.SPARSE])
def test_what_is_taken_first_is_never_other_than_what_the_reclaim_would_take(tmp_path, remap, has_others):
    told = []
    for name, sizes in ("first", SIZES), ("small", (8,)), ("none", ()):
        beside = Beside(tmp_path / name, remap=remap, sizes=sizes, has_others=has_others)
        assert bool(beside.rings()) == (name != "none")
        beside.world.run(100)
        assert len(beside.online.backed()) >= WANTED
        _, event = beside.world.events(EventKind.RECLAIMED)  # the service took its headroom by the first one
        what = ("missing", "freed", "columns", "cost", "from", "late")
        which = "" if has_others else (event.reason, sorted(beside.offline.backed()))  # of equals it may take others
        told.append((which, {key: event.detail[key] for key in what}))
        beside.ends_well()
    assert told[0] == told[1] == told[2]


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
    assert beside.foreseen.firsts

    CHANGES[change](beside)

    assert not beside.rings()
    beside.ends_well()


def test_a_need_of_less_is_never_given_more(tmp_path):
    beside = Beside(tmp_path)
    *_, least = beside.foreseen.firsts

    assert not beside.rings(least.above_blocks)
    beside.ends_well()


def test_nothing_is_ever_taken_for_a_wish_that_the_book_does_not_have(tmp_path):
    """What is decided goes by the book. Such a ring took up to 32 handles each time, and no reclaim was counted."""
    beside = Beside(tmp_path)
    firsts = beside.foreseen.firsts
    assert any(one.above_blocks < WANTED for one in firsts)
    reclaims = beside.world.kv.log.counters.reclaims

    for _ in range(5):
        beside.online.book["used_blocks"] = beside.online.book["wanted_blocks"] = 0
        beside.online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=WANTED))
        beside.world.run(5)

    assert not any(one.orders for one in firsts)
    assert beside.world.kv.log.counters.reclaims == reclaims
    assert len(beside.offline.backed()) == 4 * COLUMNS
    beside.ends_well()


def test_nothing_is_ever_taken_from_work_that_runs(tmp_path):
    beside = Beside(tmp_path, is_at_work=False)
    assert beside.foreseen.firsts

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


def test_a_stop_for_memory_that_moves_never_fails_unheeded(tmp_path):
    """No service holds the GPU: the ladder goes by the books, and those hear of this hold late."""
    beside = Beside(tmp_path, is_at_work=False)
    gate = beside.world.gate

    beside.rings()
    gate.fail(0, MEMORY_SERVICE)
    beside.world.clock.advance(2_000_000)

    assert beside.world.events(EventKind.FROZEN)
    gate.come_back(0, MEMORY_SERVICE)
    beside.ends_well()


def card(has_left):
    """Handles."""
    used = (1 << 40) - MemoryTable().spare_mib * MIB - 2 * MIB * has_left
    return {bytes([1]) * 16: CardUse(total_bytes=1 << 40, used_bytes=used, by_pid={}, is_mig=False)}


def test_a_card_that_has_room_again_since_a_look_never_costs_offline_work_anything(tmp_path):
    """What the driver said of it counts for a second. Nobody has looked since, and the need can be met without."""
    beside = Beside(tmp_path, room=COLUMNS)
    kv, service = beside.world.kv, beside.online.shim.entry.service
    kv.books.pool.trim(0, kv.books.pool.free_handles(0))  # what is needed next must be made
    kv.service.see_cards(card(0))
    beside.world.run(1025)  # between two ticks
    kv.supply.full.hear(0, service, is_short=True)
    kv.service.see_cards(card(COLUMNS))
    while kv.supply.full.is_full_for(0, service):
        beside.world.clock.advance(1_000_000)
    assert beside.foreseen.firsts

    assert not beside.rings()

    beside.world.run(100)
    assert len(beside.offline.backed()) == 4 * COLUMNS
    assert len(beside.online.backed()) >= WANTED
    beside.ends_well()


def test_what_stood_in_a_range_that_was_deleted_is_never_planned_with(tmp_path):
    """The driver stops one GPU after the other. Something is taken from the first one already, and its process deletes
    its range before the second one stands: nothing, as a number, was the last handle of a pool without a gap."""
    count = 64  # handles of each GPU: twice as many fill the arrays of the pool
    memory = MemoryTable(
        handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=2, pool_mib=2 * count, order_s=0.05
    )
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=count, gpus=2)
    world.kv.reserve._firsts.sizes = (24,)
    world.engine("offline", columns=count - 17, gpus=(1,), name="stays").hold(0, [4])
    world.run(3000)
    goes = world.engine("offline", columns=count - 1, name="goes")
    world.run(3000)
    goes.hold(0, [4])
    online = world.engine("online", columns=count - 2, gpus=(0, 1))
    world.run(5000)
    books, shim = world.kv.books, goes.shim
    [book] = books.pool.of_client(shim.client)
    assert {books.pool.total, len(books.pool._place), int(book.at.max()) + 1} == {2 * count}

    world.gate.launch(online.shim.client)
    world.gate.stops[1] += 100_000
    world.clock.advance(450_000)
    online.want(used=4, wanted=120)
    [order] = books.orders.under_way(shim.client)
    shim.free_range(book.key.number)
    [need] = world.kv.supply._needs
    assert not need.coming
    for _ in range(300):
        world.run(0.1)
        world.kv.check_integrity()

    assert order in need.coming[0]
    assert len(online.backed()) >= 120
    world.check()
