"""Token hit rate of vLLM's own scheduler with the hook's order of blocks, as shares of the stock order's.

`vllm_hit_rate.py MODEL COLUMN... [--reclaim]`, inside the engines' environment: one JSON line, {column: {workload:
share}}. With --reclaim a column is taken every few steps, from both in the same steps, and given back some steps later;
the stock scheduler, which cannot lose what it uses, loses what of it is free.
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque

from scheduler_rig import RiggedScheduler, make_scheduler

BLOCK, ANSWER, RUNNING = 16, 48, 24
OUT_FOR, EVERY = 20, 30  # steps


def tokens(chance, blocks):
    return [chance.randrange(1000) for _ in range(BLOCK * blocks)]


def system_prompts(chance):
    """Eight long beginnings, each asked for again and again."""
    heads = [tokens(chance, 40) for _ in range(8)]
    for _ in range(260):
        yield [*chance.choice(heads), *tokens(chance, chance.randrange(2, 16))]


def chats(chance, count):
    """Each turn sends the whole conversation again."""
    said = [tokens(chance, chance.randrange(4, 16)) for _ in range(count)]
    for _ in range(6 * count):
        chat = chance.randrange(count)
        yield list(said[chat])
        said[chat] += tokens(chance, chance.randrange(4, 12))
        said[chat] = said[chat] if len(said[chat]) < 90 * BLOCK else said[chat][: 8 * BLOCK]


def documents(chance):
    """A few questions about each of many documents, soon after one another."""
    recent = deque(maxlen=12)
    for _ in range(260):
        if not recent or chance.random() < 0.3:
            recent.append(tokens(chance, chance.randrange(24, 80)))
        yield [*chance.choice(recent), *tokens(chance, 3)]


WORKLOADS = {
    "system prompts": (900, system_prompts),
    "chats": (1500, lambda chance: chats(chance, 45)),
    "chats with more room": (2400, lambda chance: chats(chance, 45)),
    "documents": (1700, documents),
}


class Thief:
    """Takes blocks and gives them back: by the table, or where there is none by a reference of its own."""

    def __init__(self, engine, size):
        self.engine, self.size, self.chance, self.out = engine, max(size, 8), random.Random(5), []
        self.held = []

    def step(self, number):
        engine, blocks = self.engine, self.engine.pool.num_gpu_blocks
        if self.out and number % EVERY == OUT_FOR:
            if engine.desk is not None:
                engine.desk.give(self.out)
            else:
                engine.pool.free_blocks(self.held)
            self.out, self.held = [], []
        elif number % EVERY == 0:
            first = self.chance.randrange(1, blocks // self.size) * self.size
            self.out = list(range(first, min(first + self.size, blocks)))
            if engine.desk is not None:
                engine.desk.take(self.out)
            else:  # who has no hook loses what is free, and lends no more than that
                free = [engine.pool.blocks[block] for block in self.out if not engine.pool.blocks[block].ref_cnt]
                engine.pool.evict_blocks({block.block_id for block in free})
                engine.pool.touch(free)
                self.held = free


def hit_rate(model, workload, column, *, reclaim, size):
    blocks, make = WORKLOADS[workload]
    scheduler = make_scheduler(model, blocks=blocks, seqs=RUNNING, budget=2048, length=4096, block_tokens=BLOCK)
    engine = RiggedScheduler(scheduler, column=column)
    thief = Thief(engine, size)
    for name, prompt in enumerate(make(random.Random(1))):
        engine.add(str(name), prompt, ANSWER)
    step = 0
    while scheduler.has_unfinished_requests():
        step += 1
        if reclaim:
            thief.step(step)
        engine.step()
    assert engine.hook is None or engine.hook.reconciler.receipts.failures == 0
    return engine.found / engine.asked


def main():
    model, columns = sys.argv[1], [int(each) for each in sys.argv[2:] if each.isdigit()]
    reclaim = "--reclaim" in sys.argv
    shares = {}
    for column in columns:
        for workload in WORKLOADS:
            stock = hit_rate(model, workload, 0, reclaim=reclaim, size=column)
            ours = hit_rate(model, workload, column, reclaim=reclaim, size=column)
            shares.setdefault(column, {})[workload] = round(ours / stock, 3)
            print(f"columns of {column}, {workload}: {ours:.3f}, stock {stock:.3f}", file=sys.stderr, flush=True)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
