"""A real SGLang on the emulated card, under the valved that runs there: `sglang_node.py MODEL RUN_DIR PLAN`.

A step of its scheduler is a kernel; PLAN is JSON and says whether steps overlap. Clients come when they
will; the answer to each is printed as JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
from typing import Any

from sglang_campaign import start_engine

STEP_US = 20_000
REQUESTS, RATE, TOKENS, PROMPTS = 110, 8.0, 12, 11
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cards: list[Any] = []

    def as_kernel(original: Any, *arguments: Any, **options: Any) -> Any:
        if not cards:  # in the scheduler's process, where the first step is
            cards.append(importlib.import_module("valve_emulated.device").Device())
        with cards[0].step(STEP_US):
            return original(*arguments, **options)

    def without_nccl(original: Any, *arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, "use_pynccl": False})

    HookRegistry.register(RUN_BATCH, as_kernel, HookType.AROUND)
    group = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    HookRegistry.register(group, without_nccl, HookType.AROUND)


async def serve(engine: Any) -> list[list[int]]:
    chance = random.Random(5)
    prompts = [[chance.randrange(10, 900) for _ in range(24)] for _ in range(PROMPTS)]
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    tasks = []
    for number in range(REQUESTS):
        await asyncio.sleep(chance.expovariate(RATE))
        prompt = prompts[number % PROMPTS]
        tasks.append(asyncio.create_task(engine.async_generate(input_ids=prompt, sampling_params=sampling)))
    return [each["output_ids"] for each in await asyncio.gather(*tasks)]


def main() -> None:
    model, run_dir, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = start_engine(
        model, run_dir, max_total_tokens=8000, chunked_prefill_size=128, disable_overlap_schedule=not plan["overlap"]
    )
    print(json.dumps(engine.loop.run_until_complete(serve(engine))), flush=True)
    sys.stdin.read()  # the service is looked at while it lives
    engine.shutdown()


if __name__ == "__main__":
    main()
