"""A real SGLang with less memory than a request needs: `sglang_waiting.py MODEL FOLDER '{"overlap": ...}'`.

900 tokens of pages, 600 of them without memory: first a request that needs 650, then nine short ones, then one that
no memory could hold. Prints JSON: who had ended how when all that could go on had, and after memory has come.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sglang_campaign import Injector, start_engine
from sglang_campaign import register as register_injector
from sglang_faults import begin

TOKENS, TAKEN = 900, range(300, 900)


class Taker(Injector):
    """In the scheduler's process: takes and gives as the plan says, while nothing runs or between two steps."""

    def _begin_step(self) -> None:
        self.read_plan()

    def _before_layer(self, _module: Any, _arguments: Any) -> None:
        layer = self.calls % self.layers
        self.calls += 1
        if layer == 0:
            self._begin_step()
        for pages, _ in self.taken:
            self._fill(pages, garbage=True)

    def _idle(self) -> None:
        self.read_plan()
        self.on_idle()

    def read_plan(self) -> None:
        seen = self.seen
        super().read_plan()
        if self.seen == seen or "has" not in self.plan:
            return
        if self.plan["has"]:
            self._give([pages for pages, _ in self.taken])
        else:
            self._take(list(TAKEN))
        self._tell()

    def _tell(self, **told: Any) -> None:
        draft = self.report.with_suffix(".draft")
        draft.write_text(json.dumps({"plan": self.plan["number"], **told}))
        draft.replace(self.report.with_name("trial.json"))


def register() -> None:
    register_injector(Taker)


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    engine = start_engine(
        model,
        folder,
        max_total_tokens=TOKENS,
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan["overlap"],
    )
    ended: dict[str, Any] = {}

    async def ask(name: str, length: int) -> None:
        prompt = [3 + at % 1000 for at in range(length)]
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        try:
            ended[name] = (await engine.async_generate(input_ids=prompt, sampling_params=sampling))["output_ids"]
        except Exception as error:
            ended[name] = f"{type(error).__name__}: {getattr(error, 'detail', error)}"

    async def story() -> dict[str, Any]:
        await ask("alone", 640)
        await asyncio.to_thread(begin, folder, {"seed": 0, "events": 0, "has": False, "number": 1})
        waits = asyncio.ensure_future(ask("long", 640))
        await asyncio.sleep(0)
        behind = [ask(f"short{number}", 40 + number) for number in range(9)]
        await asyncio.wait_for(asyncio.gather(*behind, ask("huge", 950)), 300)
        before = sorted(ended)
        await asyncio.to_thread(begin, folder, {"seed": 0, "events": 0, "has": True, "number": 2})
        await asyncio.wait_for(waits, 300)
        return {"before": before, "is_same": ended["long"] == ended["alone"], "huge": ended["huge"]}

    print(json.dumps(engine.loop.run_until_complete(story())), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
