"""What the hook adds to a step of vLLM's own scheduler: `scheduler_cost.py MODEL`, one JSON object on standard output.

Two schedulers take the same steps in turn, one with the hook and one without. Every request decodes; in the second part
all of them cross a block's boundary in the same steps, in the third there is surplus that cannot be given back, and
in the fourth a request ends and another comes with each step. Then memory is taken, 1,000 blocks at a time. All in this
thread's own time.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import Any

from scheduler_rig import RiggedScheduler, make_scheduler

REQUESTS, BLOCKS_EACH, COLUMN = 1024, 100, 64
STEPS, EVENTS, LOST = 160, 12, 1000


def engines(model: str, *, is_aligned: bool) -> list[RiggedScheduler]:
    """Both with all their requests decoding."""
    found = []
    for column in (COLUMN, 0):
        scheduler = make_scheduler(
            model, blocks=REQUESTS * (BLOCKS_EACH + 30), seqs=REQUESTS, budget=1 << 17, length=4096
        )
        engine, chance = RiggedScheduler(scheduler, column=column, depth=2), random.Random(3)
        for number in range(REQUESTS):
            length = 16 * BLOCKS_EACH - (0 if is_aligned else number % 16)
            engine.add(f"request-{number}", [chance.randrange(1000) for _ in range(length)], 400)
        while len(scheduler.running) < REQUESTS or any(each.num_output_tokens < 2 for each in scheduler.running):
            engine.step()
        found.append(engine)
    return found


def nothing(engine: RiggedScheduler, number: int) -> None: ...


def one_goes_one_comes(engine: RiggedScheduler, number: int) -> None:
    engine.abort(f"request-{number}")
    engine.add(f"another-{number}", [(number + at) % 1000 for at in range(40)], 400)


def steps(
    hooked: RiggedScheduler, stock: RiggedScheduler, between: Callable[[RiggedScheduler, int], None] = nothing
) -> dict[str, list[float]]:
    own, clock, pairs, beside = [], [], [], []
    for number in range(STEPS):
        for engine in (hooked, stock) if number % 2 else (stock, hooked):
            between(engine, number)
            engine.step()
        own.append(hooked.hook_ns / 1e3)
        clock.append(stock.hook_ns / 1e3)
        hooked.hook.progress.tell_tokens()  # the link's thread does
        began = thread_time_ns()
        hooked.hook.ledger.tend()  # so does it
        beside.append((thread_time_ns() - began) / 1e3)
        pairs.append((hooked.step_ns - stock.step_ns) / 1e3)
    reading = median(clock)  # of the clock, around nothing, at the same places beside the scheduler without the hook
    return {
        "own_us": [each - reading for each in own],
        "clock_us": [reading],
        "added_us": pairs,
        "beside_us": beside,
        "stock_us": [stock.step_ns / 1e3],
    }


def events(engine: RiggedScheduler) -> list[float]:
    """Milliseconds of the look that acts on them: whole columns, which a few requests hold."""
    took, desk = [], engine.desk
    assert desk is not None
    for number in range(EVENTS):
        first = 64 + number * 2 * LOST
        lost = list(range(first, first + LOST))
        desk.take(lost)
        began = thread_time_ns()
        engine.hook.before_schedule()
        took.append((thread_time_ns() - began) / 1e6)
        engine.step()
        desk.give(lost)
        for _ in range(3):
            engine.step()
            engine.hook.ledger.tend()  # as the link's thread does beside each step
    return took


def main() -> None:
    model, result = sys.argv[1], dict[str, Any]()
    hooked, stock = engines(model, is_aligned=False)
    result["decode"] = steps(hooked, stock)
    assert hooked.desk is not None
    hooked.desk.aim(REQUESTS)  # everything that is free is more than valved wants it to have
    while hooked.hook.reconciler.publish():
        pass
    result["surplus"] = steps(hooked, stock)
    hooked.desk.aim(hooked.pool.num_gpu_blocks)
    result["come and go"] = steps(hooked, stock, one_goes_one_comes)
    result["event_ms"] = events(hooked)
    result["failures"] = hooked.hook.reconciler.receipts.failures
    hooked, stock = engines(model, is_aligned=True)
    result["all at once"] = steps(hooked, stock)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
