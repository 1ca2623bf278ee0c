"""vLLM's free queue by column: a request fills one before it takes another; nothing is lost or handed out twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from toy_engine import Block, Pool
from valve_hook.vllm.free_blocks import ColumnQueue


def queue_of(blocks=32, columns=4):
    pool = Pool(blocks)
    size = blocks // columns
    pool.free_block_queue = ColumnQueue([number // size for number in range(blocks)], pool.blocks[1:])
    return pool


class Manager:
    """What stands between a request and the pool."""

    def __init__(self, pool):
        self.block_pool, self.req_to_blocks = pool, {}

    def allocate_new_blocks(self, request_id, count):
        blocks = self.block_pool.get_new_blocks(count)
        self.req_to_blocks.setdefault(request_id, []).extend(blocks)
        return [block.block_id // 8 for block in blocks]


def test_requests_that_grow_in_turn_each_stay_in_their_column():
    manager = Manager(queue_of())
    columns = {name: set() for name in "abc"}
    for _ in range(7):
        for name in columns:
            columns[name] |= set(manager.allocate_new_blocks(name, 1))

    assert all(len(mine) == 1 for mine in columns.values())
    assert len(set.union(*columns.values())) == 3
    assert manager.block_pool.free_block_queue.found_owner == 18


def test_a_caller_that_is_not_known_costs_affinity_and_nothing_else():
    pool = queue_of()

    assert {block.block_id // 8 for block in pool.get_new_blocks(8)} == {1}
    assert len({block.block_id for block in pool.get_new_blocks(20)}) == 20


def test_blocks_with_content_go_last_and_the_longest_unused_first():
    pool = queue_of(blocks=8, columns=1)
    taken = pool.get_new_blocks(7)
    for number, block in enumerate(taken):
        if number % 2:
            block.block_hash = number
    pool.free_blocks(taken)

    handed = [block.block_id for block in pool.free_block_queue.popleft_n(7)]

    assert handed[:4] == [taken[number].block_id for number in (0, 2, 4, 6)]
    assert handed[4:] == [taken[number].block_id for number in (1, 3, 5)]


def test_more_than_there_is_is_an_error():
    pool = queue_of(blocks=4, columns=1)
    pool.free_block_queue.popleft_n(3)
    with pytest.raises(ValueError, match="No free blocks"):
        pool.free_block_queue.popleft()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_calls_keeps_the_books(seed):
    chance, pool = random.Random(seed), queue_of(64, 8)
    held: list[Block] = []
    kept: list[list[Block]] = []
    for _ in range(2000):
        if chance.random() < 0.3:
            kept.append(chance.sample(pool.blocks[1:], 5))
            pool.free_block_queue.keep(kept[-1])
        elif kept and chance.random() < 0.4:
            pool.free_block_queue.let_go(kept.pop(chance.randrange(len(kept))))
        if held and chance.random() < 0.5:
            back = chance.sample(held, chance.randrange(1, len(held) + 1))
            for block in back:
                block.block_hash = chance.choice([None, object()])
            pool.free_blocks(back)
            held = [block for block in held if block not in back]
        elif pool.get_num_free_blocks():
            held += pool.get_new_blocks(chance.randrange(1, min(9, pool.get_num_free_blocks() + 1)))
        free = pool.free_block_queue.get_all_free_blocks()
        if free and chance.random() < 0.2:
            block = chance.choice(free)
            pool.touch([block])
            held.append(block)
        free = pool.free_block_queue.get_all_free_blocks()

        assert sorted(block.block_id for block in [*free, *held]) == list(range(1, 64))
        assert len(free) == pool.get_num_free_blocks()
        kept_free = pool.free_block_queue._kept_free
        whole = Counter(block.block_id // 8 for block in free if block.block_id not in kept_free)
        expected = {column for column, count in whole.items() if count == 8}
        assert pool.free_block_queue.whole == expected
        assert pool.free_block_queue.last_whole(8 * 8) == sorted(expected, reverse=True)


def test_what_is_kept_for_somebody_is_given_up_last_and_counts_as_free():
    pool = queue_of(blocks=32, columns=4)
    taken = pool.get_new_blocks(31)
    for number, block in enumerate(taken):
        block.block_hash = number
    pool.free_blocks(taken)
    kept = taken[:5]
    pool.free_block_queue.keep(kept)

    assert pool.get_num_free_blocks() == 31
    assert not set(pool.free_block_queue.popleft_n(26)) & set(kept)
    assert pool.free_block_queue.popleft_n(5) == kept


def test_what_is_kept_by_two_stays_until_both_let_go():
    pool = queue_of(blocks=32, columns=4)
    taken = pool.get_new_blocks(31)
    for number, block in enumerate(taken):
        block.block_hash = number
    pool.free_blocks(taken)
    pool.free_block_queue.keep(taken[:5])
    pool.free_block_queue.keep(taken[:5])
    pool.free_block_queue.let_go(taken[:5])

    assert not set(pool.free_block_queue.popleft_n(26)) & set(taken[:5])
    pool.free_block_queue.let_go(taken[:5])
    assert len(pool.free_block_queue.popleft_n(5)) == 5


def test_no_cached_block_is_given_up_while_a_fresh_one_is_left():
    pool = queue_of(blocks=32, columns=4)
    taken = pool.get_new_blocks(31)
    for number, block in enumerate(taken[:24]):
        block.block_hash = number
    pool.free_blocks(taken)

    assert all(block.block_hash is None for block in pool.free_block_queue.popleft_n(7))
    assert all(block.block_hash is not None for block in pool.free_block_queue.popleft_n(24))
