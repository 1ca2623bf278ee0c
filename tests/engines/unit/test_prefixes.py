"""What a request had computed soundly is kept until it comes back, within a bound; what it computes again is told."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from kv_node import KvNode, wait_for
from toy_engine import Pool, ToyScheduler
from toy_world import close, hooked, run
from valve_hook.sglang.steps import Launched, computed_again, note_computed
from valve_hook.vllm.free_blocks import ColumnQueue
from valve_hook.vllm.prefixes import Prefixes


def blocks_of(scheduler, name):
    return [block.block_id for block in scheduler.req_to_blocks[name]]


def sent_back(node, **knobs):
    """Request a has ten blocks and loses the eighth; it waits, because nobody may run."""
    scheduler = hooked(node, blocks=60, budget=100, **knobs)
    scheduler.add("a", range(40), 30)
    scheduler.launch()
    scheduler.believe()
    held = blocks_of(scheduler, "a")
    scheduler.poison(held[7:8])
    node.take(held[7:8])
    scheduler.max_num_running_reqs = 0
    scheduler.launch()
    scheduler.believe()
    return scheduler, held


def test_the_sound_beginning_of_a_request_that_waits_is_never_given_to_others_while_anything_else_is_free(node):
    scheduler, held = sent_back(node)
    others = scheduler.pool.get_new_blocks(scheduler.pool.get_num_free_blocks() - 7)

    assert not {block.block_id for block in others} & set(held[:7])

    scheduler.pool.free_blocks(others)
    scheduler.max_num_running_reqs = 8
    scheduler.launch()

    assert blocks_of(scheduler, "a")[:7] == held[:7]
    close(scheduler)


def test_the_book_never_calls_a_kept_beginning_free(node):
    """Else valved would take it first, as costing nobody anything."""
    scheduler, held = sent_back(node)

    assert list(node.rows().values()) == [held[:7]]

    scheduler.abort("a")
    scheduler.launch()

    wait_for(lambda: node.rows() == {}, "its row is closed")
    assert scheduler._valve.engine.prefixes.computed == {}
    close(scheduler)


def test_columns_with_a_kept_beginning_are_never_offered(node):
    scheduler, held = sent_back(node)
    node.aim(1)
    for _ in range(20):
        scheduler.launch()
        scheduler.believe()

    assert not set(node.offered()) & set(held[:7])
    assert len(node.offered()) > 30
    close(scheduler)


def prefixes_of(blocks=81, backed=80):
    pool = Pool(blocks)
    pool.free_block_queue = ColumnQueue([number // 8 for number in range(blocks)], pool.blocks[1:])
    prefixes = Prefixes(backed=lambda: backed)
    prefixes.use(pool.free_block_queue)
    return pool, prefixes


def cached(pool, count):
    blocks = pool.get_new_blocks(count)
    for block in blocks:
        block.block_hash = block.block_id
    pool.free_blocks(blocks)
    return blocks


def test_never_more_than_a_quarter_is_kept_and_the_oldest_goes_first():
    pool, prefixes = prefixes_of()
    blocks = cached(pool, 40)
    kept = [prefixes.keep(name, blocks[start : start + 8], 100) for start, name in ((0, "a"), (8, "b"), (16, "c"))]
    free = pool.free_block_queue

    assert [len(each) for each in kept] == [8, 8, 8]
    assert set(free._kept) == {block.block_id for block in blocks[8:24]}
    assert len(prefixes.keep("d", blocks, 100)) == 20
    assert set(free._kept) == {block.block_id for block in blocks[:20]}


def test_nothing_is_kept_that_no_prompt_could_find():
    """A beginning ends where the cache does not know a block."""
    pool, prefixes = prefixes_of()
    blocks = cached(pool, 10)
    blocks[4].block_hash = None

    assert prefixes.keep("a", blocks, 160) == blocks[:4]


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no caching"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_computed_again_is_never_told_wrong(tmp_path, caching, depth):
    """Prompts of their own and room for all: every token beyond the undisturbed run's is one computed again."""
    work = [(f"r{number}", list(range(100 * number, 100 * number + 20)), 40) for number in range(8)]

    def computed(scheduler, reclaim=None):
        sums, schedule = [], scheduler.schedule

        def counted():
            output = schedule()
            sums.append(sum(output.num_scheduled_tokens.values()))
            return output

        scheduler.schedule = counted
        return run(scheduler, work, depth=depth, reclaim=reclaim), sum(sums)

    expected, alone = computed(ToyScheduler(blocks=200, caching=caching))
    node = KvNode(tmp_path, columns=20)
    scheduler = hooked(node, blocks=200, caching=caching)
    chance = random.Random(3)

    def reclaim(step):
        held = [block for table in scheduler.req_to_blocks.values() for block in table]
        if step % 3 == 0 and step < 80 and held:
            lost = [chance.choice(held).block_id]
            scheduler.poison(lost)
            node.take(lost)
            scheduler.back(lost)
            node.give(lost)

    got, together = computed(scheduler, reclaim)
    close(scheduler)
    node.stop()

    assert got == expected
    assert node.book()["hit_requests"] > 8
    assert node.book()["lost_tokens"] == together - alone


def test_sglang_never_tells_what_its_cache_still_held_as_computed_again():
    """Ten tokens of a were in the cache when it came back, none of b; c was never sent back."""
    kv = {"a": 30, "b": 20, "c": 50}
    requests = [SimpleNamespace(rid=name, kv=SimpleNamespace(kv_committed_len=tokens)) for name, tokens in kv.items()]
    note_computed(requests[:2])
    step = Launched(requests=requests, rows=np.arange(3), lengths=np.arange(3), starts=[10, 0, 0])

    assert computed_again(step) == 20 + 20
    assert computed_again(step) == 0
