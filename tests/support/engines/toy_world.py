"""A toy engine hooked to a fake node, and the campaign that both campaigns of random reclaims share."""

from __future__ import annotations

import random

from kv_node import KvNode
from toy_engine import ToyScheduler
from valve_hook.link import Link
from valve_hook.vllm import calls
from valve_hook.wire import Mode
from valve_tools.engines.block_manager import let_follow

let_follow()


def hooked(node: KvNode, mode: Mode = Mode.FULL, *, is_offline: bool = True, **knobs) -> ToyScheduler:
    scheduler = ToyScheduler(hooks=calls, **knobs)
    link = Link(build="test", path=node.path, retry_s=0.02, gone_s=60.0 if node.is_up else 0.0, is_offline=is_offline)
    link.start()
    scheduler._valve = calls.VllmHook(scheduler, link, mode, "toy 1.0")
    scheduler._valve.settle()
    return scheduler


def close(scheduler: ToyScheduler) -> None:
    scheduler._valve.link.close()


def prompts(seed: int, count: int) -> list[tuple[str, list[int], int]]:
    """Requests of which two in three share one of three beginnings."""
    chance = random.Random(seed)
    heads = [[chance.randrange(1000) for _ in range(14)] for _ in range(3)]
    return [
        (
            f"r{number}",
            (heads[number % 3] if number % 9 < 6 else [])
            + [chance.randrange(1000) for _ in range(chance.randrange(2, 18))],
            chance.randrange(6, 20),
        )
        for number in range(count)
    ]


def run(scheduler: ToyScheduler, work, *, depth: int, reclaim=None, between=None, max_steps=20_000) -> dict:
    """All requests to their end, `depth` steps in flight; `reclaim(step)` half way a step, `between(step)` after it."""
    for name, prompt, tokens in work:
        scheduler.add(name, prompt, tokens)
    for step in range(max_steps):
        if not scheduler.requests and not scheduler.in_flight:
            return dict(scheduler.done)
        scheduler.launch(None if reclaim is None else lambda step=step: reclaim(step))
        while len(scheduler.in_flight) >= depth or (scheduler.in_flight and not scheduler.requests):
            scheduler.believe()
        if between is not None:
            between(step)
    raise AssertionError(f"not done after {max_steps} steps: {sorted(scheduler.requests)}")


class Reclaimer:
    """Takes and gives random blocks, in memory and in the table; what a node does, less the policy."""

    def __init__(self, node: KvNode, scheduler: ToyScheduler, seed: int, *, every: int = 4, most: int = 12) -> None:
        self.node, self.scheduler = node, scheduler
        self.chance = random.Random(seed)
        self.every, self.most = every, most
        self.events = 0
        self.taken: list[int] = []

    def __call__(self, step: int) -> None:
        if self.chance.randrange(self.every) or not self.node.attached:
            return
        self.events += 1
        blocks = self.scheduler.pool.num_gpu_blocks
        free = [block for block in range(1, blocks) if block not in self.taken]
        if self.taken and (self.chance.random() < 0.5 or len(free) < blocks // 2):
            back = self.chance.sample(self.taken, self.chance.randrange(1, len(self.taken) + 1))
            self.scheduler.back(back)
            self.node.give(back)
            self.taken = [block for block in self.taken if block not in back]
            return
        blocks_lost = self.chance.sample(free, self.chance.randrange(1, self.most))
        self.scheduler.poison(blocks_lost)
        if self.chance.random() < 0.3:
            self.node.take(blocks_lost)
            self.scheduler.back(blocks_lost)
            self.node.give(blocks_lost)
        else:
            self.node.take(blocks_lost)
            self.taken += blocks_lost

    def give_all(self) -> None:
        self.scheduler.back(self.taken)
        self.node.give(self.taken)
        self.taken = []
