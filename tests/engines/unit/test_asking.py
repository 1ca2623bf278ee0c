"""Who asks for a block is told to the queue, and what vLLM would answer never changes by it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from toy_engine import Pool
from valve_hook.vllm.asking import tell
from valve_hook.vllm.free_blocks import ColumnQueue


def cdiv(a, b):
    return -(a // -b)


class Manager:
    """vLLM 0.32's `allocate_new_blocks`, without copies on write."""

    block_size = 16

    def __init__(self, blocks=256, column=32):
        self.block_pool, self.req_to_blocks = Pool(blocks), defaultdict(list)
        self._partial_hit_reqs = {}
        free = self.block_pool.blocks[1:]
        self.queue = self.block_pool.free_block_queue = ColumnQueue([each // column for each in range(blocks)], free)

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        if request_id in self._partial_hit_reqs:
            self._partial_hit_reqs.pop(request_id)
        req_blocks = self.req_to_blocks[request_id]
        num_new_blocks = cdiv(num_tokens, self.block_size) - len(req_blocks)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        req_blocks.extend(new_blocks)
        return new_blocks


class Another(Manager):
    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        self.asked = request_id
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)


@pytest.mark.parametrize("seed", range(3))
def test_who_is_told_of_never_gets_other_blocks_than_by_the_frame(seed):
    told, framed, grown = Manager(), Manager(), {}
    assert tell(told, lambda: told.queue, grown)
    told.queue.is_told = True
    chance, tokens = random.Random(seed), dict.fromkeys("abcd", 0)
    while True:
        name = chance.choice("abcd")
        tokens[name] += chance.choice([0, 1, 5, 16, 40])
        if sum(cdiv(each, 16) for each in tokens.values()) > 255:
            break
        answers = [each.allocate_new_blocks(name, tokens[name], tokens[name]) for each in (told, framed)]

        assert [block.block_id for block in answers[0]] == [block.block_id for block in answers[1]]
        assert told.queue.asker is None
    assert told.queue.found_owner == 0 < framed.queue.found_owner
    assert all(block in {each.block_id for each in told.req_to_blocks[name]} for block, name in grown.items())
    later = {block.block_id for blocks in told.req_to_blocks.values() for block in blocks}
    assert len(later) - 4 * 3 <= len(grown) <= len(later)


def test_a_partial_hit_is_never_answered_here():
    manager = Manager()
    assert tell(manager, lambda: manager.queue, {})
    manager.allocate_new_blocks("a", 16, 16)
    manager._partial_hit_reqs["a"] = (0, None)

    manager.allocate_new_blocks("a", 16, 16)
    assert manager._partial_hit_reqs == {}


def test_a_function_that_is_not_known_is_never_replaced():
    manager = Another()

    assert not tell(manager, lambda: manager.queue, {})
    assert "allocate_new_blocks" not in vars(manager)
