"""One vLLM on this CPU for the fused spike: `fused_side.py FOLDER DTYPE [ADAPTER]`. Orders come as JSON lines on
standard input, and each is answered by [CPU seconds, wall seconds] of one engine step. With ADAPTER it is the engine
that a fused lane would need: LoRA is on, the span has the adapter, and hooks clone what backward needs of its rows.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from fused import ENGINE_ENVIRONMENT, MODEL_LEN

VOCABULARY, BLOCK_TOKENS = 2048, 32


class SpanRows:
    """Clones of the last `count` rows of a step: what the pruned stash keeps of a layer."""

    def __init__(self, layers: Any) -> None:
        self.layers, self.count = len(layers), 0
        self.kept: list[Any] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._before)
            layer.self_attn.qkv_proj.register_forward_hook(self._after(0))
            layer.post_attention_layernorm.register_forward_hook(self._after(1))

    def begin(self, count: int) -> None:
        self.count = count
        self.kept.clear()

    def _before(self, _layer: Any, arguments: tuple[Any, ...]) -> None:
        if self.count:
            _, hidden, residual = arguments
            rows = hidden[-self.count :]
            self.kept.append(rows.clone() if residual is None else rows + residual[-self.count :])

    def _after(self, part: int) -> Any:
        def keep(_module: Any, _arguments: Any, output: Any) -> None:
            if self.count:
                self.kept.append(output[part][-self.count :].clone())

        return keep


class SteppedEngine:
    """A vLLM in this process whose steps are called for one by one; requests of drawn tokens."""

    def __init__(self, model: str, dtype: str, tokens: int, blocks: int, **more: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=tokens,
            max_num_batched_tokens=tokens,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=blocks,
            disable_log_stats=True,
            **more,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.chance, self.number = random.Random(0), 0

    def add(self, tokens: int, answer: int, lora: Any = None) -> None:
        from vllm import SamplingParams

        self.number += 1
        prompt = {"prompt_token_ids": [self.chance.randrange(3, VOCABULARY) for _ in range(tokens)]}
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(str(self.number), prompt, params, lora_request=lora)


class BatchEngine(SteppedEngine):
    def __init__(self, folder: str, adapter: str, dtype: str) -> None:
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if adapter else {}
        super().__init__(folder, dtype, MODEL_LEN, 600, **lora)
        self.rows: SpanRows | None = None
        self.lora = None
        if adapter:
            from vllm.lora.request import LoRARequest

            self.lora = LoRARequest("mine", 1, adapter)
            self.rows = SpanRows(self.worker.model_runner.model.model.layers)

    def begin(self, running: int) -> None:
        """Readers that decode from now on."""
        for _ in range(running):
            self.add(16, MODEL_LEN - 16)
        while any(each.num_output_tokens < 2 for each in self.core.scheduler.requests.values()):
            self.llm.llm_engine.step()

    def step(self, span: int, alone: bool) -> tuple[float, float]:
        """One step of the readers, of a span, or of both. Never more than one: the span must be in it whole."""
        scheduler = self.core.scheduler
        readers = scheduler.running
        if alone:
            scheduler.running = []
        if span:
            self.add(span, 1, self.lora)
        if self.rows:
            self.rows.begin(span)
        cpu, wall = time.process_time(), time.perf_counter()
        done = self.llm.llm_engine.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if alone:
            scheduler.running = readers
        if span and not any(each.finished for each in done):
            raise RuntimeError("the span was not computed in one step")
        if self.rows and len(self.rows.kept) != 3 * self.rows.layers * bool(span):
            raise RuntimeError("the hooks did not keep what backward needs")
        return cpu, wall


def main(folder: str, dtype: str, adapter: str) -> None:
    os.environ |= ENGINE_ENVIRONMENT
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    engine = BatchEngine(folder, adapter, dtype)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "running" in order:
            engine.begin(order["running"])
            answer: Any = "begun"
        else:
            answer = engine.step(order["span"], order["alone"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
