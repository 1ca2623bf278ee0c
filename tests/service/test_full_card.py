"""A card that has less memory than NVML says: counted, told once, and never believed for others."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from memory_world import KvWorld

from valved.config import MIB, Config, MemoryTable
from valved.machine.cards import CardUse
from valved.model.ids import Remap

CARD = CardUse(total_bytes=1 << 40, used_bytes=100 * MIB, by_pid={}, is_mig=False)  # all but full, says NVML


@pytest.fixture
def world(tmp_path):
    memory = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=24)
    world.kv.service.see_cards({bytes([1]) * 16: CARD})
    yield world
    world.check()


def told(world):
    return world.journal.recent(lambda event: "card is full" in event.reason, 20)


def test_a_growth_that_finds_the_card_full_is_never_without_a_trace(world):
    first, online = (world.engine("online", columns=16, name=name) for name in ("first", "chat"))
    world.run(500)
    first.want(used=60)
    world.run(500)

    for _ in range(4):
        online.want(used=4, wanted=60)
        world.run(1500)

    assert world.kv.state().full > 0
    assert len(told(world)) == 1, "a service that waits asks each second, and the journal is for all"

    world.card.limit = 40
    online.want(used=4, wanted=60)
    world.run(3000)
    assert len(online.backed()) >= 60


def forget_free_handles(world):
    """What is needed next must be made."""
    pool = world.kv.books.pool
    pool.trim(0, pool.free_handles(0))


def liar_of(world, role):
    """It has nothing, and says that the card is full whenever it is to make a handle."""
    world.card.limit = 24 if role == "online" else 0
    liar = world.engine(role, columns=4, name="liar")
    world.run(500)
    world.card.limit = 24
    liar.shim.fails.extend([(0, errno.ENOMEM)] * 1000)
    return liar


@pytest.mark.parametrize("role", ["offline", "online"])
def test_a_process_that_says_the_card_is_full_never_keeps_another_ones_memory_from_it(world, role):
    liar = liar_of(world, role)
    online = world.engine("online", columns=16, name="chat")
    world.run(500)
    has_lied = len(liar.shim.fails)
    for _ in range(400):
        forget_free_handles(world)
        if role == "online":
            liar.want(used=4, wanted=16)
        world.run(10)
        if len(liar.shim.fails) < has_lied:
            break
    assert len(liar.shim.fails) < has_lied

    online.want(used=4, wanted=30)
    world.run(30)

    assert len(online.backed()) >= 30


def ask_for_what_is_not_made(world, engine, wanted):
    """How many handles its process is to make, and does not."""
    world.run(500)
    forget_free_handles(world)
    engine.shim.answers = False
    engine.want(used=4, wanted=wanted)
    world.run(1)
    return world.kv.books.orders.creating(0)


def test_a_process_that_ends_in_the_middle_never_makes_the_card_seem_full(world):
    going = world.engine("online", columns=8, name="going")
    online = world.engine("online", columns=16, name="chat")
    assert ask_for_what_is_not_made(world, going, wanted=30)
    going.shim.die()
    forget_free_handles(world)
    online.want(used=4, wanted=40)
    world.run(30)

    assert world.kv.state().full == 0
    assert len(online.backed()) >= 40


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_handles_that_were_not_made_never_make_room_that_the_card_has_not(world, how):
    """Somebody else took it while they were asked for: offline work would get what is left for online services."""
    online = world.engine("online", columns=16, name="chat")
    asked = ask_for_what_is_not_made(world, online, wanted=60)
    left = replace(CARD, used_bytes=CARD.total_bytes - 1024 * MIB - 3 * 2 * MIB)
    world.kv.service.see_cards({bytes([1]) * 16: left})

    if how == "ends":
        online.shim.die()
    else:
        online.shim.fails.extend([(0, errno.EIO)] * asked)
        online.shim.catch_up()
    while world.kv.books.orders.creating(0):
        world.run(1)
    forget_free_handles(world)

    assert asked > 3
    assert world.kv.supply.affordable(0) <= 3
