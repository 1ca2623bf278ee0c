"""A real SGLang whose memory is short: `sglang_room.py MODEL FOLDER '{"overlap": ...}'`, 900 tokens, pages of one.

First 600 of them have no memory, and the rest is full of what is cached: a prompt comes. Then all have memory, two
requests run, and in the middle of a long prompt's chunks all is taken that is free or cached, but for a few. Prints
JSON: what valved was asked for, and whether the answers are as undisturbed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from sglang_campaign import register as register_injector
from sglang_campaign import start_engine
from sglang_faults import begin
from sglang_waiting import TAKEN, TOKENS, Taker

LEFT = 20
RUNS, LONG = (440, 100), (300, 20)  # tokens of prompt and answer: the present memory would hold the long one


class Shrinker(Taker):
    """In the scheduler's process: takes what nothing runs in, too, and says what was asked for."""

    def _begin_step(self) -> None:
        super()._begin_step()
        is_time = self.scheduler.chunked_req is not None and self.scheduler.running_batch.reqs and not self.taken
        if self.plan.get("do") == "take a chunk's" and is_time:
            self._take(self._starving()[LEFT:])
            self._tell(needs=self.node.needs, has_taken=True)

    def read_plan(self) -> None:
        seen = self.seen
        super().read_plan()
        if self.seen == seen:
            return
        if self.plan.get("do") == "take":
            self._take(list(TAKEN))
        elif self.plan.get("do") == "give":
            self._give([pages for pages, _ in self.taken])
        self._tell(needs=self.node.needs, has_taken=False)


def register() -> None:
    register_injector(Shrinker)


def has_taken(folder: Path) -> None:
    deadline = time.monotonic() + 100
    while not json.loads((folder / "trial.json").read_text())["has_taken"]:
        assert time.monotonic() < deadline, "no prompt went in chunk by chunk"
        time.sleep(0.02)


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    engine = start_engine(
        model,
        folder,
        max_total_tokens=TOKENS,
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan["overlap"],
    )

    async def ask(first: int, length: int, most: int) -> list[int]:
        prompt = [3 + (first + at) % 1000 for at in range(length)]
        sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
        return list((await engine.async_generate(input_ids=prompt, sampling_params=sampling))["output_ids"])

    async def tell(number: int, do: str) -> dict[str, Any]:
        return await asyncio.to_thread(begin, folder, {"seed": 0, "events": 0, "do": do, "number": number})

    async def story() -> dict[str, Any]:
        alone = [await ask(0, *RUNS), await ask(500, *LONG)]
        await tell(1, "take")
        for number in range(7):
            await ask(100 * number, 40, 8)
        await ask(777, 100, 8)
        needs = (await tell(2, "give"))["needs"]
        await tell(3, "take a chunk's")
        runs = asyncio.ensure_future(ask(0, *RUNS))
        long = asyncio.ensure_future(ask(500, *LONG))
        await asyncio.to_thread(has_taken, folder)
        await tell(4, "give")
        both = await asyncio.wait_for(asyncio.gather(runs, long), 300)
        return {"needs": needs, "is_same": both == alone}

    print(json.dumps(engine.loop.run_until_complete(story())), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
