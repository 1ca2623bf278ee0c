"""Random reclaims under a real SGLang on CPU: `sglang_campaign.py MODEL FOLDER '{"trials": [...]}'`.

The scheduler lives in a process of its own: this file installs the injector there by SGLang's own plugin registry
(entry point in the folder that the test mounts), and the fake node runs there too. One JSON line per trial on standard
output.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"


class Injector:
    """In the scheduler's process: takes pages between two layers, fills them with garbage, gives them back later."""

    def __init__(self, scheduler: Any) -> None:
        from kv_node import KvNode

        folder = Path(os.environ["VALVE_RUN_DIR"])
        self.scheduler = scheduler
        self.remove = os.environ.get("VALVE_TEST_REMOVE")  # a protection, by its name in sglang_ablations.py
        self.node = KvNode(folder, columns=16)
        self.plan_file, self.report = folder / "plan.json", folder / "report.json"
        self.runner = scheduler.tp_worker.model_runner
        self.pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.page = scheduler.token_to_kv_pool_allocator.page_size
        self.pages = scheduler.token_to_kv_pool_allocator.size // self.page + 1
        self.calls = self.step = self.events = 0
        self.taken: list[tuple[list[int], int]] = []
        self.plan: dict[str, Any] = {}
        self.seen = 0.0
        layers = self.runner.model.model.layers
        self.layers = len(layers)
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer)

    def _before_layer(self, _module: Any, _arguments: Any) -> None:
        layer = self.calls % self.layers
        self.calls += 1
        if layer == 0:
            self._begin_step()
        if layer == self.at_layer and self.events < int(self.plan.get("events", 0)):
            self._take()
        for pages, _ in self.taken:
            self._fill(pages, garbage=True)

    def _begin_step(self) -> None:
        self.step += 1
        hook = self.scheduler.__dict__.get("_valve")
        if self.remove and hook is not None:
            import sglang_ablations

            getattr(sglang_ablations, self.remove)(hook.engine)
            self.remove = None
        stamp = self.plan_file.stat().st_mtime if self.plan_file.exists() else 0.0
        if stamp != self.seen:
            self.seen, self.plan = stamp, json.loads(self.plan_file.read_text())
            self.chance, self.events = random.Random(self.plan["seed"]), 0
        due = [pages for pages, until in self.taken if until <= self.step]
        self.taken = [entry for entry in self.taken if entry[1] > self.step]
        for pages in due:
            self._give(pages)
        wants = self.plan.get("events", 0) and self.chance.randrange(self.plan.get("every", 8)) == 0
        self.at_layer = self.chance.randrange(self.layers) if wants else -1
        receipts = self.node.book() if self.node.attached else {}
        receipts |= {"layout": self._layout_is_told()} if self.node.attached else {}
        self.report.write_text(json.dumps({"events": self.events, "attached": bool(self.node.attached), **receipts}))

    def _layout_is_told(self) -> bool:
        """Every buffer's first page stands where the hook said."""
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        expected = [(buffer[0].data_ptr(), buffer[: self.page].numel() * 4) for buffer in buffers]
        told = [struct.unpack_from("<QQ", body, 56 + 72 * run) for body in self.node.layouts for run in range(16)]
        return told[: len(expected)] == expected

    def _take(self) -> None:
        out = {page for pages, _ in self.taken for page in pages}
        rest = [page for page in range(1, self.pages) if page not in out]
        most = max(1, len(rest) // 5)
        pages = self.chance.sample(rest, self.chance.randrange(1, most + 1)) if rest else []
        if pages:
            self.events += 1
            if self.node.attached:  # the control run has no hook
                self.node.take(pages)
            self._fill(pages, garbage=True)
            self.taken.append((pages, self.step + self.plan.get("held", 4)))

    def _give(self, pages: list[int]) -> None:
        self._fill(pages, garbage=False)
        if self.node.attached:
            self.node.give(pages)

    def _fill(self, pages: list[int], *, garbage: bool) -> None:
        import torch

        rows = (torch.tensor(pages)[:, None] * self.page + torch.arange(self.page)).flatten()
        content = torch.zeros(self.pool.k_buffer[0].shape[1:])
        if garbage:
            content[:] = self.chance.uniform(-3, 3)
            content[..., ::2] *= -1.7
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[rows] = content


def register() -> None:
    """Entry point `sglang.srt.plugins` of the mounted test folder."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        scheduler._injector = Injector(scheduler)

    HookRegistry.register(SCHEDULER_INIT, after_init, HookType.AFTER)


def prompts(seed: int, count: int) -> list[list[int]]:
    chance = random.Random(seed)
    heads = [[chance.randrange(3, 1024) for _ in range(70)] for _ in range(3)]
    return [
        heads[number % 3] * (number % 4 != 3) + [chance.randrange(3, 1024) for _ in range(chance.randrange(10, 40))]
        for number in range(count)
    ]


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    os.environ["VALVE_RUN_DIR"] = str(folder)
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        dtype="float32",
        max_total_tokens=plan.get("tokens", 3000),
        page_size=plan.get("page", 1),
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan.get("overlap", True),
        log_level="warning",
    )
    sampling = [{"temperature": 0, "max_new_tokens": 50 - number % 7, "ignore_eos": True} for number in range(24)]
    work = prompts(1, 24)

    def tokens() -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(input_ids=work, sampling_params=sampling)]

    expected = tokens()
    for trial in plan["trials"]:
        began = time.monotonic()
        (folder / "plan.json").write_text(json.dumps(trial))
        got = tokens()
        (folder / "plan.json").write_text(json.dumps({**trial, "events": 0}))
        report = json.loads((folder / "report.json").read_text())
        wrong = sum(mine != theirs for mine, theirs in zip(expected, got, strict=True))
        print(
            json.dumps({**trial, **report, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}), flush=True
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
