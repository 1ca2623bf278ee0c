"""A real vLLM on CPU that trains beside its requests, in this process: `vllm_training.py MODEL '{"lane": {...}, ...}'`.

One JSON line on standard output: the tokens of every request, how the job ended, and what its tiles did. Requests come
at steps that the seed names, so that an undisturbed run (no `lane`) has the same batches. `fault` names what goes
wrong in the job or in its lane.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
WORKER = "valve_tune.engine.vllm_worker.TrainingWorker"
END_S = 300.0


def requests(seed: int, count: int) -> list[tuple[int, list[int], dict[str, Any]]]:
    """(the step it comes at, prompt, sampling): greedy, drawn with a seed, and drawn from the engine's own chance."""
    chance, step, found = random.Random(seed), 0, []
    for number in range(count):
        step += chance.choice([0, 0, 1, 2, 5, 9])
        prompt = [chance.randrange(3, 1024) for _ in range(chance.randint(4, 60))]
        how: dict[str, Any] = {"temperature": 0.0}
        if number % 3:
            how = {"temperature": 0.8, **({"seed": number} if number % 3 == 1 else {})}
        found.append((step, prompt, {**how, "max_tokens": chance.randint(4, 24), "ignore_eos": True}))
    return found


def serve(llm: Any, seed: int, count: int) -> tuple[dict[str, list[int]], list[float]]:
    """(tokens by request, ms for each token after the first by request)"""
    from vllm import SamplingParams

    engine, due, answers, step = llm.llm_engine, requests(seed, count), {}, 0
    first: dict[str, float] = {}
    paces = []
    due.reverse()
    while due or engine.has_unfinished_requests():
        while due and (due[-1][0] <= step or not engine.has_unfinished_requests()):
            at, prompt, how = due.pop()
            name = f"{count - len(due) - 1}"
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**how, detokenize=False))
            step = max(step, at)
        for output in engine.step():
            first.setdefault(output.request_id, time.monotonic())
            if output.finished:
                tokens = answers[output.request_id] = list(output.outputs[0].token_ids)
                paces.append((time.monotonic() - first[output.request_id]) * 1e3 / (len(tokens) - 1))
        step += 1
    return answers, paces


class Faults:
    """Each is put into the job or its lane when its time has come."""

    def __init__(self, lane: Any, name: str) -> None:
        self.lane, self.name, self.tiles = lane, name, 0
        if name:
            getattr(self, name)()

    def _in_tile(self, act: Any, at: int = 20) -> None:
        from valve_tune.engine.watched import WatchedPass

        run = WatchedPass.run

        def faulty(work: Any, tile: Any, *more: Any) -> None:
            self.tiles += 1
            if self.tiles >= at:
                inner, work._work = work._work, self
                self.act, self.inner = act, inner
            run(work, tile, *more)

        WatchedPass.run = faulty  # type: ignore[method-assign]

    def run(self, *_: Any) -> None:
        self.act()

    def close(self) -> None:
        self.inner.close()

    def border(self) -> None:
        return

    def error(self) -> None:
        def act() -> None:
            raise RuntimeError("a tile failed")

        self._in_tile(act)

    def exit(self) -> None:
        self._in_tile(lambda: sys.exit(3))

    def memory(self) -> None:
        import torch

        self._in_tile(lambda: torch.empty(1 << 50).fill_(1.0))

    def hangs(self) -> None:
        self._in_tile(lambda: time.sleep(10_000))

    def planner(self) -> None:
        def plan(state: Any) -> Any:
            raise ZeroDivisionError("the planner failed")

        self.lane.planner.plan = plan

    def strange_lane(self) -> None:
        from valve_hook.cotrain.interface import Lane, Plan

        self.lane.planner.plan = lambda state: Plan(Lane.FUSED, layers=1, tokens=1)


def main(model: str, plan: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    more = {"worker_cls": WORKER, "additional_config": {"valve_tune": plan["lane"]}} if plan.get("lane") else {}
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=plan.get("eager", True),
        skip_tokenizer_init=True,
        block_size=32,
        num_gpu_blocks_override=512,
        max_num_seqs=16,
        disable_log_stats=True,
        **more,
        **plan.get("engine", {}),
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    lane = getattr(worker, "valve_lane", None)
    found: dict[str, Any] = {"trains": lane is not None}
    if lane is not None:
        Faults(lane, plan.get("fault", ""))
        deadline = time.monotonic() + END_S
        while lane.tenant.progress.tokens == 0 and not lane.tenant.is_over and time.monotonic() < deadline:
            time.sleep(0.01)  # until its first micro-batch, so that the whole of the requests is beside it
    began = time.monotonic()
    found["tokens"], found["tpot_ms"] = serve(llm, plan.get("seed", 0), plan["requests"])
    found["seconds"] = time.monotonic() - began
    if lane is not None:
        count = lane.tenant.turns.count
        found["beside_requests"] = {name: getattr(count, name) for name in count.__slots__}
        deadline = time.monotonic() + END_S
        while not lane.tenant.is_over and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that hangs never ends
        found["parked"], found["over"] = lane.tenant.parked, lane.tenant.is_over
        found["tiles"] = count.tiles
    print(json.dumps(found), file=answers, flush=True)
    worker.shutdown()
    os._exit(0)  # a thread that hangs would keep the process


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
