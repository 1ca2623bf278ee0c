"""One order for several ranges: carried out as one order for each would be, and answered once."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_daemon import KV_RUNS, OFFLINE, until
from kv_pool import (
    AT_STEP,
    BACK,
    CREATE,
    EEXIST,
    ELASTIC,
    ESTALE,
    MIB,
    OUTSIDE,
    QUARANTINE,
    TRY,
    UNBACK,
    ZERO,
    Run,
    runs_body,
)

H = 2 * MIB


class Ranges:
    """An engine with three ranges of four backed slots, tagged 1, 2 and 3."""

    def __init__(self, made):
        self.pool = made.begin()
        self.engine, self.client = made.engine()
        self.addresses, self.numbers = [], []
        for value in (1, 2, 3):
            address = self.engine.alloc(4 * H, ELASTIC)
            self.engine.tag(address, 4 * H, value)
            self.addresses.append(address)
            self.numbers.append(made.range_of(self.pool).range)
        self.names = list(self.pool.fds)  # four of each range, in turn

    def tagged(self, index):
        address = self.addresses[index]
        return [slot for slot in range(4) if self.engine.wrong_pages(address + slot * H, H, index + 1) == 0]

    def order(self, op, runs, **more):
        return self.pool.order_runs(self.client, op, [Run(self.numbers[index], *rest) for index, *rest in runs], **more)

    def give(self, runs, names):
        """BACK of handles that exist."""
        return self.order(BACK, runs, fds=[self.pool.fds[name] for name in names])


@pytest.fixture
def three(kv_world):
    return Ranges(kv_world(OFFLINE))


def test_slots_of_all_ranges_go_and_come_back_by_one_order_each(three):
    gone = three.order(QUARANTINE, [(0, 1, 2), (1, 0, 1), (2, 3, 1)])

    assert (gone.done, gone.status) == (4, 0)
    assert [three.tagged(index) for index in range(3)] == [[0, 3], [1, 2, 3], [0, 1, 2]]

    names = [three.names[at] for at in (1, 2, 4, 11)]
    runs = [(0, 1, 1, names[0]), (0, 2, 1, names[1]), (1, 0, 1, names[2]), (2, 3, 1, names[3])]
    back = three.give(runs, names)

    assert (back.done, back.status) == (4, 0)
    assert [three.tagged(index) for index in range(3)] == [[0, 1, 2, 3]] * 3


def test_handles_are_made_in_several_ranges_and_their_descriptors_come_in_order(three):
    three.order(QUARANTINE, [(0, 0, 2), (2, 0, 1)])
    first = three.pool.number() + 1000

    made = three.order(BACK, [(0, 0, 2, first, CREATE | ZERO), (2, 0, 1, first + 2, CREATE | ZERO)])
    fds = made.take_fds()

    assert (made.done, made.status, len(fds)) == (3, 0, 3)
    three.pool.fds.update(zip(range(first, first + 3), fds, strict=True))
    assert three.engine.read(three.addresses[0], 64) == "00" * 64
    three.engine.tag(three.addresses[2], H, 9)
    three.order(QUARANTINE, [(2, 0, 1)])
    three.order(QUARANTINE, [(0, 3, 1)])
    three.give([(0, 3, 1, first + 2)], [first + 2])
    assert three.engine.wrong_pages(three.addresses[0] + 3 * H, H, 9) == 0  # the third one was of range 2


def test_none_behind_the_first_that_was_not_is_carried_out(three):
    three.engine.free(three.addresses[1])

    done = three.order(QUARANTINE, [(0, 0, 1), (1, 0, 1), (2, 0, 1)])

    assert (done.done, done.status) == (1, ESTALE)
    assert (three.tagged(0), three.tagged(2)) == ([1, 2, 3], [0, 1, 2, 3])


def test_what_valved_makes_sparse_is_heard_even_behind_a_range_that_is_gone(three):
    """Nobody in the process may believe that it is still there."""
    three.engine.free(three.addresses[1])

    three.order(QUARANTINE, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], how=OUTSIDE)

    back = three.give([(2, 0, 1, three.names[8])], [three.names[8]])
    assert (back.done, back.status) == (1, 0)  # EEXIST: it thought its handle there


def test_a_slot_that_is_backed_already_ends_the_order_there(three):
    three.order(QUARANTINE, [(0, 0, 1), (2, 0, 1)])
    names = [three.names[at] for at in (0, 4, 8)]

    done = three.give([(index, 0, 1, name) for index, name in enumerate(names)], names)

    assert (done.done, done.status) == (1, EEXIST)
    assert (three.tagged(0), three.tagged(2)) == ([0, 1, 2, 3], [1, 2, 3])


def test_an_order_between_two_steps_waits_for_one_and_is_done_whole(three):
    number = three.pool.number()
    runs = [Run(three.numbers[0], 0), Run(three.numbers[2], 0)]
    three.client.send(KV_RUNS, 0, runs_body(number, QUARANTINE, runs, AT_STEP))
    until(lambda: (three.engine.step(), not three.pool.done.empty())[1], "carried out")

    answer = three.pool.answer()

    assert (answer.order, answer.done, answer.status) == (number, 2, 0)
    assert (three.tagged(0), three.tagged(2)) == ([1, 2, 3], [1, 2, 3])


def test_no_range_of_an_order_has_an_event_of_its_own_for_its_zeroing(three, emulated_gpus):
    """The stream is one: what stands behind the last memset stands behind all. Each event delays the next range."""
    page = emulated_gpus.process(three.engine.process.pid)
    three.order(QUARANTINE, [(0, 0, 2), (1, 0, 1), (2, 0, 1)])
    first = three.pool.number() + 1000

    made = three.order(BACK, [(0, 0, 2, first, CREATE | ZERO), (1, 0, 1, first + 2, CREATE | ZERO)])
    (mapping,) = {call.thread for call in page.intervals() if call.kind == "access" and call.thread != page.pid}
    events = [call for call in page.intervals() if call.kind == "record" and call.thread == mapping]

    made.close()
    assert (made.done, made.status, len(events)) == (3, 0, 1)
    assert three.engine.read(three.addresses[1], 64) == "00" * 64


class Cards:
    """An engine with a range on each of two GPUs, of which the second one takes long to be zeroed."""

    SLOTS = (1, 40)

    def __init__(self, made):
        self.pool = made.begin()
        self.engine, self.client = made.engine()
        self.addresses, self.numbers, self.names = [], [], []
        for device, slots in enumerate(self.SLOTS):
            self.engine.start(device)
            known = set(self.pool.fds)
            self.addresses.append(self.engine.alloc(slots * H, ELASTIC))
            self.engine.tag(self.addresses[-1], slots * H, 7)
            self.numbers.append(made.range_of(self.pool).range)
            self.names.append([name for name in self.pool.fds if name not in known])


@pytest.mark.parametrize("first", [0, 1])
def test_an_order_on_two_cards_is_never_done_before_both_are_zero(kv_world, emulated_gpus, first):
    cards = Cards(kv_world(OFFLINE))
    pool, engine = cards.pool, cards.engine
    pool.order_runs(cards.client, QUARANTINE, [Run(cards.numbers[at], 0, cards.SLOTS[at]) for at in (0, 1)])
    order = [first, 1 - first]
    runs = [Run(cards.numbers[at], 0, cards.SLOTS[at], cards.names[at][0], ZERO) for at in order]
    fds = [pool.fds[name] for at in order for name in cards.names[at]]

    with emulated_gpus.setting(fill_gbps=1):
        done = pool.order_runs(cards.client, BACK, runs, fds=fds)
        last = engine.read(cards.addresses[1] + cards.SLOTS[1] * H - 64, 64)

    assert (done.done, done.status, last) == (sum(cards.SLOTS), 0, "00" * 64)


def test_orders_that_are_done_leave_no_pages_of_the_queue_behind(three):
    """Each would cost the next one a page fault while memory is waited for."""

    def faults() -> int:
        return int(Path(f"/proc/{three.engine.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[7])

    three.order(QUARANTINE, [(0, 0, 1)])
    before = faults()
    for _ in range(400):
        three.order(QUARANTINE, [(0, 0, 1)])

    assert faults() - before < 100


BAD = {
    "nothing": lambda number: runs_body(1, QUARANTINE, []),
    "a trial": lambda number: runs_body(1, TRY, [Run(number, 0)]),
    "an empty run": lambda number: runs_body(1, QUARANTINE, [Run(number, 0, 0)]),
    "too many slots": lambda number: runs_body(1, BACK, [Run(number, 0, 65, 1, CREATE)]),
    "a slot twice": lambda number: runs_body(1, BACK, [Run(number, 0, 2, 1, CREATE), Run(number, 1, 1, 9, CREATE)]),
    "a flag": lambda number: runs_body(1, QUARANTINE, [Run(number, 0, 1, 0, ZERO)]),
    "unmapped from outside": lambda number: runs_body(1, UNBACK, [Run(number, 0)], OUTSIDE),
    "no descriptor": lambda number: runs_body(1, BACK, [Run(number, 0, 1, 1)]),
}


@pytest.mark.parametrize("what", BAD)
def test_what_no_valved_would_send_ends_the_link_and_nothing_else(three, what):
    three.client.send(KV_RUNS, 0, BAD[what](three.numbers[0]))

    assert three.pool.daemon.client() is not three.client
    for _ in three.numbers:
        three.pool.held.get(timeout=200).close()
    assert [three.tagged(index) for index in range(3)] == [[0, 1, 2, 3]] * 3
