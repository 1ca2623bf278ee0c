"""What the tables of engines may cost valved: in memory, and in time of its loop."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import ExitStack, closing, contextmanager

import pytest
from memory_world import Hook, kv_world
from msgspec.structs import replace
from scarce import opened

from valved.abi.kv_link import KvAttach, KvMode
from valved.abi.link import LinkType
from valved.clients import attaching
from valved.clients.accounts import AccountKind, LinkAccount
from valved.config import Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import Remap

LARGEST, MILLION = 1 << 22, 1 << 20  # blocks: of any engine, of one on a large GPU with one token each
world = kv_world(Config(memory=MemoryTable(handle_mib=2, remap=Remap.HELPER)))
ASKED = KvAttach(
    **{"abi_min": 1, "abi_max": 1, "mode": KvMode.FULL, "blocks": 8, "block_tokens": 16},
    **{"rows": 1, "row_blocks": 1, "ranks": 1, "engine": "fake 1"},
)


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


class Keeper:
    """Keeps all files that it was ever given."""

    def __init__(self, hook, bring):
        self.hook, self.kept, self.own = hook, [], 0
        hook.bring = lambda kind, answer, _, fds: self.bring(bring, fds[0]) if kind is LinkType.KV_TABLE else None

    def bring(self, bring, fd):
        bring(fd)
        self.own += os.fstat(fd).st_blocks * 512
        self.kept.append(os.dup(fd))

    def attach(self):
        status = self.hook.attach()
        if not status:
            self.kept += map(os.dup, self.hook.connection.sent[-1][3])
        return status

    def attach_until_refused(self):
        while not (status := self.attach()):
            assert self.bytes_of_valved <= attaching.KEPT_OF_ALL * 8 // 2
        return status

    @property
    def bytes_of_valved(self):
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.kept) - self.own

    def close(self):
        for fd in self.kept:
            os.close(fd)


def older(fd):
    raise AssertionError("it was never asked to bring anything")


def brings_nothing(fd):
    pass


def brings_all_but_a_page(fd):
    with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ) as pages:
        pages[mmap.PAGESIZE :: mmap.PAGESIZE]


@contextmanager
def keeping(world, bring, uid=1000, blocks=MILLION):
    hook = hook_of(world, "offline", uid, blocks)
    hook.brings_table = bring is not older
    with closing(Keeper(hook, bring)) as keeper:
        yield keeper


@pytest.mark.parametrize("bring", [older, brings_nothing, brings_all_but_a_page], ids=lambda way: way.__name__)
def test_no_tenant_that_keeps_every_table_it_was_given_makes_valved_pay_for_more_than_a_bound(world, bring):
    """128 MiB at once and as many in each hour: valved was killed for its memory limit after some hours."""
    with keeping(world, bring) as keeper:
        for _ in range(4):
            refused = keeper.attach_until_refused()
            world.run(3600_000)

        assert keeper.bytes_of_valved
        assert refused == errno.EDQUOT
        assert any("valve_hook of this version" in event.reason for event in world.events(EventKind.NOTED))
        assert hook_of(world, "offline", 1000, MILLION).attach() == 0, "it brings its memory"
        assert hook_of(world, "offline", 1001, MILLION).attach() == 0
        assert hook_of(world, "online", 1000, MILLION).attach() == 0


def test_no_number_of_accounts_makes_valved_pay_for_more_tables_than_a_bound(world):
    with ExitStack() as stack:
        keepers = [stack.enter_context(keeping(world, older, 1000 + number, 1 << 16)) for number in range(12)]
        for keeper in keepers:
            keeper.attach_until_refused()
            assert sum(one.bytes_of_valved for one in keepers) <= attaching.KEPT_OF_ALL * 8

        assert all(keeper.kept for keeper in keepers[:6]), "each leaves something to the next one"


def test_a_hook_that_brings_the_memory_of_its_tables_never_makes_valved_pay_for_them(world):
    """Ten of 32 MiB: five times what an account may keep of valved's memory."""
    hook = hook_of(world, "offline", 1000, LARGEST)
    for _ in range(10):
        assert hook.attach() == 0
        table = hook.connection.sent[-1][3][0]
        assert os.fstat(table).st_blocks * 512 >= 8 * LARGEST
        assert hook.entries.all()
        world.run(1000)


@pytest.mark.parametrize(("blocks", "tokens"), [(MILLION, 16), (8, 32)])
def test_a_table_that_was_made_for_another_engine_is_never_handed_out(world, blocks, tokens):
    hook = hook_of(world, "offline", 1000, 8)
    hook.say(LinkType.KV_MAKE, replace(ASKED, blocks=blocks, block_tokens=tokens))
    hook.bring(*hook.connection.sent[-1])
    hook.brings_table = False

    assert hook.attach() == 0
    assert (hook.table["blocks"][0], hook.table["block_tokens"][0]) == (8, 16)
    assert hook.entries.tolist() == [1] * 8


@pytest.mark.parametrize("body", [{"blocks": 0}, {"blocks": LARGEST + 1}, {"abi_min": 2, "abi_max": 2}, {"ranks": 0}])
def test_a_table_that_cannot_be_is_never_made(world, body):
    hook, before = hook_of(world, "offline", 1000, 8), opened()
    hook.say(LinkType.KV_MAKE, replace(ASKED, **body))

    assert hook.connection.sent[-1][1].status
    assert opened() == before


def test_a_hook_that_left_before_it_attached_never_leaves_its_table_open(world):
    hook = hook_of(world, "offline", 1000, 8)
    before = opened()
    for _ in range(3):
        hook.say(LinkType.KV_MAKE, ASKED)
    assert len(opened() - before) == 1, "the last one"

    world.register.leave(hook.client, "link closed")

    assert not opened() - before


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


def test_short_jobs_one_after_another_are_never_refused_for_what_their_attachments_may_keep():
    """2,300 a day, each a pod and so an account of its own: as many as eight GPUs run of five minutes each."""
    kept = attaching.KeptTables(attaching.DAY_NS, 0, "")
    for job in range(10_000):
        account = LinkAccount(AccountKind.HOME, f"/kubepods/pod{job}")
        for blocks in (attaching.FILE, attaching.BOOK):
            kept.check(account, blocks, job * attaching.DAY_NS // 2300)
            kept.took(account, blocks)


def test_no_account_that_keeps_nothing_is_ever_remembered():
    """Each pod is an account: valved grew by an entry for each whose hook brings its memory, as long as it ran."""
    kept = attaching.KeptTables(attaching.DAY_NS, 0, "")
    for job in range(100):
        kept.took(LinkAccount(AccountKind.HOME, f"/kubepods/pod{job}"), 0)
    told = LinkAccount(AccountKind.HOME, "/kubepods/told")
    kept.took(told, attaching.BOOK)
    kept.took(told, -attaching.BOOK)

    assert not kept.of
    assert kept.total == 0
