"""Random reclaims under a real SGLang on CPU: `sglang_campaign.py MODEL FOLDER '{"trials": [...]}'`.

The scheduler lives in a process of its own (each rank in one): this file installs the injector there by SGLang's own
plugin registry (entry point in the folder that the test mounts), and the fake node runs beside rank 0. One JSON line
per trial on standard output; a trial may take a protection out of the live engine first.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"
PREEMPT = "sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule"
PLACES = 6  # in a batch, where requests have priorities: a request that goes first takes the place of another one
NEAR = 1e-3  # of two log probabilities in float32
IDLE_TURNS = 200  # without memory, until a starved request gets it back


class Injector:
    """In a scheduler's process: takes pages between two layers, fills them with garbage, gives them back later.

    Every rank draws the same lots and spoils its share of the pages; the node beside rank 0 tells all of them.
    """

    def __init__(self, scheduler: Any) -> None:
        from kv_node import KvNode

        folder = Path(os.environ["VALVE_RUN_DIR"])
        self.scheduler = scheduler
        self.rank, self.ranks = scheduler.tp_group.rank_in_group, scheduler.tp_group.world_size
        self.node = KvNode(folder, columns=16) if self.rank == 0 else None
        self.plan_file, self.report = folder / "plan.json", folder / "report.json"
        self.idle_report = folder / "idle.json"
        self.runner = scheduler.tp_worker.model_runner
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.pool = self.allocator.get_kvcache()
        self.page = self.allocator.page_size
        self.pages = self.allocator.size // self.page + 1
        self.calls = self.step = self.began = self.events = self.idle_turns = self.starved = self.preempted = 0
        self.taken: list[tuple[list[int], int]] = []
        self.plan: dict[str, Any] = {}
        self.seen = 0.0
        self.is_paused = False
        layers = self.runner.model.model.layers
        self.layers = len(layers)
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer)
        self.on_idle, scheduler.on_idle = scheduler.on_idle, self._idle

    # ---- between two layers ----

    def _before_layer(self, _module: Any, _arguments: Any) -> None:
        layer = self.calls % self.layers
        self.calls += 1
        if layer == 0:
            self._begin_step()
        if layer == self.at_layer and self.events < int(self.plan.get("events", 0)) and not self.is_paused:
            self._take(self._starving() if self.plan.get("starve") else self._some())
        for pages, _ in self.taken:
            self._fill(pages, garbage=True)

    def _begin_step(self) -> None:
        self.step += 1
        self.read_plan()
        self._give([pages for pages, until in self.taken if until <= self.step])
        is_time = self.step - self.began >= self.plan.get("after", 0)
        wants = is_time and self.plan.get("events", 0) and self.chance.randrange(self.plan.get("every", 4)) == 0
        self.at_layer = self.chance.randrange(self.layers) if wants else -1
        if self.node is not None:
            receipts = self.node.book() if self.node.attached else {}
            receipts |= {"layout": self._layout_is_told()} if self.node.attached else {}
            counts = {name: getattr(self, name) for name in ("events", "starved", "preempted")}
            report = {**counts, "attached": bool(self.node.attached), **receipts}
            self.report.write_text(json.dumps(report))

    def read_plan(self) -> None:
        stamp = self.plan_file.stat().st_mtime if self.plan_file.exists() else 0.0
        if stamp != self.seen:
            self.seen, self.plan = stamp, json.loads(self.plan_file.read_text())
            self.chance, self.events, self.began = random.Random(self.plan["seed"]), 0, self.step
            self.preempted = 0
            self._remove(self.plan.get("remove"))

    def _remove(self, name: str | None) -> None:
        if name == "everything":
            self.scheduler._valve = None
        elif name:
            import sglang_ablations

            getattr(sglang_ablations, name)(self.scheduler._valve.engine)

    def _layout_is_told(self) -> bool:
        """Every buffer's first page of this rank stands where a hook said."""
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        expected = [(buffer[0].data_ptr(), buffer[: self.page].nbytes) for buffer in buffers]
        told = {struct.unpack_from("<QQ", body, 56 + 72 * run) for body in self.node.layouts for run in range(16)}
        return set(expected) <= told

    def _some(self) -> list[int]:
        out = {page for pages, _ in self.taken for page in pages}
        rest = [page for page in range(1, self.pages) if page not in out]
        most = max(1, len(rest) // self.plan.get("share", 40))
        return self.chance.sample(rest, self.chance.randrange(1, most + 1)) if rest else []

    def _starving(self) -> list[int]:
        """All but what the running request holds."""
        slots = [
            self.scheduler.req_to_token_pool.req_to_token[each.kv.req_pool_idx, : each.kv.kv_allocated_len]
            for each in (*self.scheduler.running_batch.reqs, *(self.scheduler.cur_batch_for_debug or _NOBODY).reqs)
            if each.kv.holds_kv
        ]
        held = {int(slot) // self.page for row in slots for slot in row}
        return [page for page in range(1, self.pages) if page not in held]

    def _take(self, pages: list[int]) -> None:
        if not pages:
            return
        self.events += 1
        if self.node is not None and self.node.attached:  # the control run has no hook
            self.node.take(pages)
        self._fill(pages, garbage=True)
        self.taken.append((pages, self.step + self.plan.get("held", 4)))

    def _give(self, due: list[list[int]]) -> None:
        self.taken = [entry for entry in self.taken if entry[0] not in due]
        for pages in due:
            self._fill(pages, garbage=False)
            if self.node is not None and self.node.attached:
                self.node.give(pages)

    def _fill(self, pages: list[int], *, garbage: bool) -> None:
        import torch

        pages = pages[self.rank :: self.ranks] if garbage else pages
        rows = (torch.tensor(pages, dtype=torch.int64)[:, None] * self.page + torch.arange(self.page)).flatten()
        content = torch.zeros(self.pool.k_buffer[0].shape[1:])
        if garbage:
            content[:] = self.chance.uniform(-3, 3)
            content[..., ::2] *= -1.7
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[rows] = content

    # ---- with nothing to run ----

    def _idle(self) -> None:
        """Whoever waits for memory gets it at last; and where all pages are is written down once it is quiet."""
        self.on_idle()
        if self.scheduler.waiting_queue and self.taken:
            self.idle_turns += 1
            if self.idle_turns == IDLE_TURNS:
                self.idle_turns, self.starved = 0, self.starved + 1
                self._give([pages for pages, _ in self.taken])
            return
        hook = self.scheduler.__dict__.get("_valve")
        if self.node is None or hook is None or self.scheduler.waiting_queue:
            return
        withheld = {page for page in hook.reconciler.withheld.nonzero()[0].tolist() if page}
        cached = set((self.scheduler.tree_cache.all_values_flatten() // self.page).tolist())
        state = {
            "step": self.step,
            "free": self.allocator.available_size() // self.page,
            "cached": len(cached),
            "withheld": len(withheld),
            "pages": self.pages - 1,
            "spoilt": len(cached & withheld),
        }
        if state != getattr(self, "state", None):
            self.state = state
            draft = self.idle_report.with_suffix(".draft")
            draft.write_text(json.dumps(state))
            draft.replace(self.idle_report)


class _NOBODY:
    reqs = ()


def register(kind: type[Injector] = Injector) -> None:
    """Entry point `sglang.srt.plugins` of the mounted test folder."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    injectors: list[Injector] = []

    def after_init(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        scheduler._injector = kind(scheduler)
        injectors.append(scheduler._injector)

    def counted(original: Any, *arguments: Any) -> Any:
        has_preempted = original(*arguments)
        injectors[0].preempted += has_preempted
        return has_preempted

    def without_nccl(original: Any, *arguments: Any, **options: Any) -> Any:
        """A CUDA build of torch on CPU: SGLang would ask NCCL for ranks on a CPU."""
        return original(*arguments, **{**options, "use_pynccl": False})

    HookRegistry.register(SCHEDULER_INIT, after_init, HookType.AFTER)
    HookRegistry.register(PREEMPT, counted, HookType.AROUND)
    group = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    HookRegistry.register(group, without_nccl, HookType.AROUND)


def prompts(seed: int, count: int) -> list[list[int]]:
    chance = random.Random(seed)
    heads = [[chance.randrange(3, 1024) for _ in range(70)] for _ in range(3)]
    return [
        heads[number % 3] * (number % 4 != 3) + [chance.randrange(3, 1024) for _ in range(chance.randrange(10, 40))]
        for number in range(count)
    ]


def logprobs_of(told: dict[str, Any]) -> list[float]:
    """Of the prompt, then of the answer; empty where none were asked for."""
    both = (*told.get("input_token_logprobs", ()), *told.get("output_token_logprobs", ()))
    return [each[0] for each in both if each[0] is not None]


def is_same(mine: tuple[Any, list[float]], theirs: tuple[Any, list[float]]) -> bool:
    """The same tokens; and of each the same log probability, but for its last bits: another batch sums otherwise."""
    if mine[0] != theirs[0] or len(mine[1]) != len(theirs[1]):
        return False
    return all(abs(one - other) < NEAR for one, other in zip(mine[1], theirs[1], strict=True))


async def by_priority(engine: Any, work: list[list[int]], sampling: list[dict[str, Any]]) -> list[Any]:
    """The first half comes at once. The others come one by one while these are answered, each before all that are
    there already.
    """
    half, told = len(work) // 2, 0
    comes = [asyncio.Event() for _ in work[half:]]

    async def one(number: int) -> list[int]:
        nonlocal told
        answer: list[int] = []
        if number >= half:
            await comes[number - half].wait()
        asked = {"input_ids": work[number], "sampling_params": sampling[number], "priority": number}
        async for chunk in await engine.async_generate(**asked, stream=True):
            answer, told = chunk["output_ids"], told + 1
            if told % 20 == 0 and told // 20 <= half:
                comes[told // 20 - 1].set()
        return answer

    return [(answer, []) for answer in await asyncio.gather(*map(one, range(len(work))))]


def idle_state(folder: Path) -> dict[str, Any]:
    """Once every page is free, cached or withheld; a leak is what is there at the deadline."""
    deadline = time.monotonic() + 60
    while True:
        state = json.loads((folder / "idle.json").read_text()) if (folder / "idle.json").exists() else {}
        is_whole = state and state["free"] + state["cached"] + state["withheld"] == state["pages"]
        if is_whole or time.monotonic() > deadline:
            return {"idle": state}
        time.sleep(0.05)


def start_engine(model: str, folder: Path, **options: Any) -> Any:
    """A real SGLang on CPU, with the fake node's socket in this folder."""
    os.environ["VALVE_RUN_DIR"] = str(folder)
    import sglang

    return sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        dtype="float32",
        log_level="warning",
        **options,
    )


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    from fastapi import HTTPException

    engine = start_engine(
        model,
        folder,
        max_total_tokens=plan.get("tokens", 3000),
        page_size=plan.get("page", 1),
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan.get("overlap", True),
        enable_mixed_chunk=plan.get("mixed", False),
        tp_size=plan.get("ranks", 1),
        **({"enable_priority_scheduling": True, "max_running_requests": PLACES} if plan.get("priority") else {}),
        **({"priority_scheduling_preemption_threshold": 0} if plan.get("priority") else {}),
    )
    asks, logprobs = plan.get("asks", {}), plan.get("logprobs", False)
    sampling = [
        {"temperature": 0, "max_new_tokens": 50 - number % 7, "ignore_eos": True, **asks} for number in range(24)
    ]
    work = prompts(1, 24)

    @functools.cache
    def expected(count: int) -> list[Any]:
        return answers(count)

    def answers(count: int) -> list[Any]:
        """Tokens, and the log probabilities that were asked for."""
        start = 0 if logprobs else -1
        try:
            told = engine.generate(
                input_ids=work[:count],
                sampling_params=sampling[:count],
                return_logprob=logprobs,
                logprob_start_len=start,
            )
        except HTTPException:  # how SGLang reports an abort
            return [([], [])] * count
        return [(each["output_ids"], logprobs_of(each["meta_info"])) for each in told]

    for trial in plan["trials"]:
        expected(trial.get("requests", 24))
    for trial in plan["trials"]:
        began, count = time.monotonic(), trial.get("requests", 24)
        (folder / "plan.json").write_text(json.dumps(trial))
        if plan.get("priority"):
            got = engine.loop.run_until_complete(by_priority(engine, work, sampling))
        else:
            got = answers(count)
        (folder / "plan.json").write_text(json.dumps({"seed": 0, "events": 0}))
        report = json.loads((folder / "report.json").read_text())
        if "remove" not in trial:
            report |= idle_state(folder)
        wrong = sum(not is_same(*pair) for pair in zip(expected(count), got, strict=True))
        took = round(time.monotonic() - began, 1)
        print(json.dumps({**trial, **report, "wrong": wrong, "seconds": took}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
