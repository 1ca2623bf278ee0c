"""Who holds a block, from the block: never somebody else than a walk over all requests finds."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from valve_hook.holders import MOST_NOTED, Held, HolderIndex
from valve_hook.ledger import MOST_WAITING, TENDED, Facts, Ledger


@pytest.mark.parametrize("seed", range(8))
def test_the_index_never_names_others_than_a_walk_over_all(seed):
    chance, index, held, told = random.Random(seed), HolderIndex(), [], set()
    for number in range(600):
        if held and chance.random() < 0.3:
            index.end(held.pop(chance.randrange(len(held))))
        elif held and chance.random() < 0.5:
            each = chance.choice(held)
            each.blocks.extend(set(chance.sample(range(400), 2)) - set(each.blocks))
            index.note(each)
        else:
            held.append(Held(request=str(number), blocks=array("I", chance.sample(range(400), 6)), row=-1))
            index.begin(held[-1])
        if chance.random() < 0.3:
            index.settle(chance.randrange(4))
        wanted = chance.sample(range(420), 5)
        found = index.of(np.array(wanted, dtype=np.uint32))
        holders = [each.request for each in held if not set(wanted).isdisjoint(each.blocks)]
        is_shared = any(sum(block in each.blocks for each in held) > 1 for block in wanted)

        assert found is None if is_shared else [each.request for each in found] == holders
        told.add(found is None)
    assert told == {False, True}


def test_what_nobody_counts_never_grows_without_bound():
    index = HolderIndex()
    for _ in range(2 * MOST_NOTED):
        held = Held(request="a", blocks=array("I", [1]), row=-1)
        index.begin(held)
        index.end(held)

    assert len(index._noted) <= MOST_NOTED + 1
    assert index.of(np.array([1], dtype=np.uint32)) == []


class Book:
    """The rows, as valved reads them."""

    rows = 4

    def __init__(self):
        self.told = {}

    def open_row(self, row, name, blocks):
        self.told[row] = list(blocks)

    def extend_row(self, row, start, blocks):
        self.told[row][start:] = blocks

    def close_row(self, row):
        del self.told[row]


def test_who_left_before_a_new_session_never_writes_into_a_row_of_its_book():
    """Its row was one of the old book; a loss still asks for the block that it took for its last step."""
    ledger = Ledger(block_tokens=1, read=lambda _: Facts(requests={"a": 1}, first_tokens=[(["a"], [0])], copies=()))
    ledger.open_book(Book())
    blocks = [SimpleNamespace(block_id=3)]
    ledger.note((), (), [("a", blocks)])
    ledger.turn_rows()
    ledger.launch(object())
    blocks.append(SimpleNamespace(block_id=4))
    ledger.dismiss("a")
    ledger.admit("b", [20, 21, 22])
    new = Book()
    ledger.open_book(new)
    ledger.judge(np.array([3], dtype=np.uint32), 64)

    assert list(new.told.values()) == [[20, 21, 22]]


@pytest.mark.parametrize("most", [1, 9], ids=["one by one", "in groups"])
def test_no_step_ever_does_the_work_of_many_while_nobody_tends(monkeypatch, most):
    """With valved away the engine's thread takes in all that comes and goes: a little with each step."""
    ledger = Ledger(block_tokens=16)
    ledger.open_book(Book())
    done, waiting, tables = Counter(), [], {}

    def counted(owner, name, of=lambda *_: 1):
        was = getattr(owner, name)

        def call(*args):
            done[name] += of(*args)
            return was(*args)

        monkeypatch.setattr(owner, name, call)

    counted(Ledger, "_begin")
    counted(Ledger, "_turn_row")
    counted(HolderIndex, "_change", lambda _, places, *__: len(places))
    for step in range(6000 // most):
        come = [(f"{step}-{place}", [SimpleNamespace(block_id=place)] * 5) for place in range(most)]
        gone = {name for name, _ in tables.get(step - 20, ())}
        tables[step] = come
        done.clear()
        ledger.note(gone, (), come)

        assert done["_begin"] <= 2 * most + 2
        assert done["_turn_row"] <= 5 * (2 * most + 2)
        assert done["_change"] <= 5 * 5 * (2 * most + 2)
        waiting.append(len(ledger.noted) + len(ledger._turned) + len(ledger._index._noted))
    assert max(waiting) <= 2 * MOST_WAITING + MOST_NOTED + 60 * most
    assert set(ledger.held) <= {name for come in tables.values() for name, _ in come}


def test_whoever_takes_a_step_never_waits_for_more_than_a_few_requests_of_a_large_one():
    """A thousand come with one step: the link's thread takes them in by eights, each with the blocks he came with."""
    ledger = Ledger(block_tokens=16)
    come = [(f"r{number}", [SimpleNamespace(block_id=number)]) for number in range(1000)]
    ledger.note((), (), come)
    known, has_more = 0, True
    while has_more:
        has_more = ledger.tend()
        assert len(ledger.held) - known <= TENDED
        known = len(ledger.held)

    assert {name: list(held.blocks) for name, held in ledger.held.items()} == {
        name: [blocks[0].block_id] for name, blocks in come
    }
