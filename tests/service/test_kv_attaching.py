"""What the tables of engines may cost valved: in memory, and in time of its loop."""

from __future__ import annotations

import errno

import pytest
from memory_world import Hook, kv_world

from valved.clients import attaching
from valved.config import Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import Remap

LARGEST, MILLION = 1 << 22, 1 << 20  # blocks: of any engine, of one on a large GPU with one token each
world = kv_world(Config(memory=MemoryTable(handle_mib=2, remap=Remap.HELPER)))


@pytest.fixture(autouse=True)
def not_young(world):
    world.run(11_000)  # shims of a predecessor come no more: without ranges, an engine gets its table at once


def hook_of(world, role, uid, blocks=1):
    return Hook(world.shim(role, uid=uid), blocks, rows=1, row_blocks=1)


def attach_until_refused(hook):
    """How often it got a table, and why it gets none."""
    count = 0
    while count < 2000 and not (status := hook.attach()):
        count += 1
    return count, status


def test_who_attaches_engines_without_end_never_has_more_than_its_share_of_the_loop(world):
    """Three processes that attached engines of four million blocks had half of it: a HELLO waited for 0.4 s."""
    mine, sibling = (hook_of(world, "offline", 1000, LARGEST) for _ in range(2))
    count, status = attach_until_refused(mine)

    assert status == errno.EAGAIN, "it comes back"
    assert count <= 20
    assert sibling.attach() == errno.EAGAIN
    assert hook_of(world, "offline", 1001).attach() == 0
    assert hook_of(world, "online", 1000).attach() == 0
    made_in_10_s = 0
    for _ in range(100):
        world.run(100)
        made_in_10_s += attach_until_refused(mine)[0]
    assert 0 < made_in_10_s <= 20


def test_no_process_that_keeps_the_tables_it_gave_up_makes_valved_pay_for_them_without_end(world):
    """Its control group pays for their pages as long as anybody maps them: 256 MiB after a second, its whole limit."""
    mine, kept = hook_of(world, "offline", 1000, LARGEST), 0
    for _ in range(100):
        kept += attach_until_refused(mine)[0]
        world.run(100)

    assert 0 < kept * LARGEST <= attaching.BLOCKS_OF_ALL + LARGEST
    assert hook_of(world, "offline", 1001).attach() == 0
    world.run(3600_000)
    assert mine.attach() == 0


def test_no_account_is_refused_for_tables_that_nobody_ever_got(world):
    """An engine whose ranks are late asks every few seconds. It had to wait for minutes once they were here."""
    late = hook_of(world, "offline", 1000, MILLION)
    late.shim.reserve(0, 4)  # it has memory of valved's, and no layout says where
    for _ in range(100):
        late.ask_table()
        world.run(6000)
        assert late.take_table() == errno.EAGAIN

    assert hook_of(world, "offline", 1000, MILLION).attach() == 0


def test_small_engines_never_have_more_of_the_loop_than_large_ones(world):
    assert attach_until_refused(hook_of(world, "offline", 1000))[0] <= 1000


def test_the_engines_of_one_account_never_take_more_of_valveds_memory_than_an_account_may(world):
    most = attaching.BLOCKS_OF_ALL // 2 // LARGEST
    hooks = [hook_of(world, "offline", 1000, LARGEST) for _ in range(most + 1)]

    assert [hook.attach() for hook in hooks] == [0] * most + [errno.EDQUOT]
    assert hooks[0].attach() == 0, "its new table is instead of its old one"
    assert any("are possible" in event.reason for event in world.events(EventKind.NOTED))
    world.register.leave(hooks[0].client, "link closed")
    assert hooks[-1].attach() == 0


def test_offline_engines_together_never_take_the_memory_for_the_tables_of_services(world):
    count = attaching.BLOCKS_OF_ALL // LARGEST
    taken = [hook_of(world, "offline", 1000 + number, LARGEST).attach() for number in range(count)]
    assert set(taken) == {0, errno.EDQUOT}

    assert [hook_of(world, "online", 1000, LARGEST).attach() for _ in range(3)] == [0] * 3


def test_the_accounts_of_one_tenant_never_leave_no_table_to_the_engine_of_another(world):
    """Two pods had all blocks, and no other offline engine got a table for as long as they ran."""
    for account in (1000, 1001):
        taken = [hook_of(world, "offline", account, LARGEST).attach() for _ in range(3)]
        assert taken[-1] == errno.EDQUOT

    assert hook_of(world, "offline", 1002, MILLION).attach() == 0
