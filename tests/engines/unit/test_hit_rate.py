"""The order in which columns are handed out leaves the prefix cache what vLLM's own order leaves it."""

from __future__ import annotations

import random
from collections import deque

import pytest
from kv_node import KvNode
from toy_engine import Pool, Queue, ToyScheduler
from toy_world import close, hooked, prompts, run
from valve_hook.vllm.free_blocks import ColumnQueue

MOST_RUNNING = 24
DECODED = 12  # blocks that an answer grows by, one in each round


def system_prompts(chance):
    """Eight long beginnings, each asked for again and again."""
    heads = [[(head, place) for place in range(100)] for head in range(8)]
    for number in range(900):
        yield [*chance.choice(heads), *((number, place) for place in range(chance.randrange(4, 40)))]


def chats(chance, count, turns=6):
    """Each turn sends the whole conversation again."""
    said = [[(chat, place) for place in range(chance.randrange(8, 40))] for chat in range(count)]
    for turn in range(turns * count):
        chat = chance.randrange(count)
        yield list(said[chat])
        said[chat] += [(chat, turn, place) for place in range(chance.randrange(10, 30))]
        said[chat] = said[chat] if len(said[chat]) < 240 else said[chat][:20]


def documents(chance):
    """A few questions about each of many documents, soon after one another."""
    recent = deque(maxlen=12)
    for number in range(900):
        if not recent or chance.random() < 0.3:
            recent.append([(number, "document", place) for place in range(chance.randrange(60, 200))])
        yield [*chance.choice(recent), *((number, place) for place in range(6))]


WORKLOADS = {
    "system prompts": (1600, system_prompts),
    "chats": (4000, lambda chance: chats(chance, 100)),
    "chats with more room": (8000, lambda chance: chats(chance, 100)),
    "documents": (3000, documents),
}


class Manager:
    """The pool as vLLM's cache manager uses it; a block stands for what it holds."""

    def __init__(self, blocks, column):
        self.block_pool, self.req_to_blocks = Pool(blocks), {}
        if column:
            columns = [block // column for block in range(blocks)]
            self.block_pool.free_block_queue = ColumnQueue(
                columns, self.block_pool.free_block_queue.get_all_free_blocks()
            )
        self.asked = self.found = 0

    def allocate_new_blocks(self, request_id, count):
        blocks = self.block_pool.get_new_blocks(count)
        self.req_to_blocks[request_id] += blocks
        return blocks

    def start(self, name, prompt):
        pool, hits, keys, key = self.block_pool, [], [], 0
        for token in prompt:
            key = hash((key, token))
            keys.append(key)
            block = pool.cache.get(key)
            if block is not None and len(hits) == len(keys) - 1:
                hits.append(block)
        free = pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits)
        if free < len(prompt) - len(hits) + DECODED * MOST_RUNNING:
            return False
        self.asked, self.found = self.asked + len(prompt), self.found + len(hits)
        pool.touch(hits)
        self.req_to_blocks[name] = list(hits)
        for block, key in zip(self.allocate_new_blocks(name, len(prompt) - len(hits)), keys[len(hits) :], strict=True):
            if key not in pool.cache:
                block.block_hash, pool.cache[key] = key, block
        return True

    def end(self, name):
        self.block_pool.free_blocks(list(reversed(self.req_to_blocks.pop(name))))


def hit_rate(workload, column, seed=1):
    blocks, make = WORKLOADS[workload]
    manager, running = Manager(blocks, column), deque()
    for name, prompt in enumerate(make(random.Random(seed))):
        while len(running) >= MOST_RUNNING or not manager.start(name, prompt):
            for each in running:
                manager.allocate_new_blocks(each[0], 1)
                each[1] -= 1
            while running and running[0][1] <= 0:
                manager.end(running.popleft()[0])
        running.append([name, DECODED])
    return manager.found / manager.asked


@pytest.mark.parametrize("column", [8, 64, 256])
def test_no_workload_loses_its_prefix_cache_to_the_columns(column):
    share = {}
    for workload in WORKLOADS:
        stock = hit_rate(workload, 0)
        assert stock > 0.2, workload
        share[workload] = hit_rate(workload, column) / stock
    print(
        f"\nhit rate, of the stock order's, columns of {column}:", {name: f"{each:.3f}" for name, each in share.items()}
    )

    assert min(share.values()) >= 0.93, share
    assert sum(share.values()) / len(share) >= 0.95, share


def test_an_online_engines_prefix_cache_is_never_reordered_and_it_gives_back_columns_all_the_same(tmp_path):
    """Its blocks go out in vLLM's own order. Columns that happen to be free are offered when valved asks."""
    node = KvNode(tmp_path, columns=10)
    scheduler = hooked(node, is_offline=False, blocks=60)
    scheduler.add("a", range(12), 8)
    scheduler.launch()
    held = {block.block_id for block in scheduler.req_to_blocks["a"]}
    node.aim(20)
    for _ in range(3):
        scheduler.believe()
        scheduler.launch()
    offered = node.offered()

    assert type(scheduler.pool.free_block_queue) is Queue
    assert 20 >= 60 - len(offered) > 8
    assert not held & set(offered)
    assert {block for block in range(60) if node.column_of[block] in node.column_of[offered]} == set(offered)
    node.take(offered)
    assert run(scheduler, prompts(1, 6), depth=2).items() >= run(ToyScheduler(), prompts(1, 6), depth=2).items()
    close(scheduler)
    node.stop()
