"""A real SGLang asks for pauses: `sglang_granted.py MODEL FOLDER '{"overlap": ...}'`.

The same requests before its owner consents and after. In the scheduler's process a thread plays valved: it gives each
pause that is asked for. Prints JSON: whether the answers are the same, what was given, what was in flight then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sglang_campaign import SCHEDULER_INIT, prompts, start_engine

COUNT, TOKENS = 6, 10
ROUNDS = 40  # how often the requests are served again, where nothing was given yet


class Giver:
    """In the scheduler's process."""

    def __init__(self, scheduler: Any) -> None:
        from grant_valved import Valved
        from kv_node import KvNode

        self.folder = Path(os.environ["VALVE_RUN_DIR"])
        self.node, self.valved, self.scheduler = KvNode(self.folder, columns=16), Valved(), scheduler
        self.flown: list[int] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from valve_abi import GrantAnswer
        from valve_hook.policy.granting import GrantSettings
        from valve_hook.policy.misses import MissSettings

        while not (self.folder / "consent").exists() or "_valve_pauses" not in self.scheduler.__dict__:
            time.sleep(0.01)
        pauses = self.scheduler.__dict__["_valve_pauses"]
        pauses.asking._settings = GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=MissSettings(trial=0))
        self.valved.consent(300.0, 300.0)
        pauses.hook.link.grant = self.valved.grant
        seq = 0
        while True:
            if self.valved.seq != seq:
                seq = self.valved.seq
                if self.valved.until_ns:
                    self.flown.append(len(getattr(self.scheduler, "result_queue", ())))
                    self.valved.answer(GrantAnswer.GIVEN)
            sums = pauses.asking.sums
            seen = {"given": sums.given, "flown": max(self.flown, default=0), "why_not": pauses.asking.refused}
            (self.folder / "seen.draft").write_text(json.dumps(seen))
            (self.folder / "seen.draft").replace(self.folder / "seen.json")
            time.sleep(0.001)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        scheduler._giver = Giver(scheduler)

    def without_nccl(original: Any, *arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, "use_pynccl": False})

    HookRegistry.register(SCHEDULER_INIT, after_init, HookType.AFTER)
    group = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    HookRegistry.register(group, without_nccl, HookType.AROUND)


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    engine = start_engine(
        model,
        folder,
        max_total_tokens=8000,
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan["overlap"],
    )
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

    def answers() -> list[Any]:
        told = engine.generate(input_ids=prompts(3, COUNT), sampling_params=sampling)
        return [each["output_ids"] for each in told]

    before = answers()
    (folder / "consent").touch()
    while not (folder / "seen.json").exists():
        answers()
    after = [answers() for _ in range(2)]
    seen = lambda: json.loads((folder / "seen.json").read_text())  # noqa: E731
    while not seen()["given"] and len(after) < ROUNDS:  # a busy machine answers too late for most of what is asked
        after.append(answers())
    print(json.dumps({"is_same": all(each == before for each in after), **seen()}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
