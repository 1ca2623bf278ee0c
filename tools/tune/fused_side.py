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

VOCABULARY = 2048


class SpanRows:
    """Clones of the last `count` rows of a step: what the pruned stash keeps of a layer."""

    def __init__(self, layers: Any) -> None:
        self.count = 0
        self.kept: list[Any] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._before)
            layer.self_attn.qkv_proj.register_forward_hook(self._after_qkv)
            layer.post_attention_layernorm.register_forward_hook(self._after_norm)

    def begin(self, count: int) -> None:
        self.count = count
        self.kept.clear()

    def _keep(self, tensor: Any) -> None:
        self.kept.append(tensor[-self.count :].clone())

    def _before(self, _layer: Any, arguments: tuple[Any, ...]) -> None:
        if self.count:
            _, hidden, residual = arguments
            rows = hidden[-self.count :]
            self.kept.append(rows.clone() if residual is None else rows + residual[-self.count :])

    def _after_qkv(self, _module: Any, _arguments: Any, output: Any) -> None:
        if self.count:
            self._keep(output[0])

    def _after_norm(self, _module: Any, _arguments: Any, output: Any) -> None:
        if self.count:
            self._keep(output[1])


class BatchEngine:
    def __init__(self, folder: str, adapter: str, dtype: str) -> None:
        from vllm import LLM

        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if adapter else {}
        self.llm = LLM(
            model=folder,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=MODEL_LEN,
            max_num_batched_tokens=MODEL_LEN,
            block_size=32,
            num_gpu_blocks_override=600,
            disable_log_stats=True,
            **lora,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        runner = self.core.model_executor.driver_worker.worker.model_runner
        self.rows: SpanRows | None = None
        self.lora = None
        if adapter:
            from vllm.lora.request import LoRARequest

            self.lora = LoRARequest("mine", 1, adapter)
            self.rows = SpanRows(runner.model.model.layers)
        self.chance, self.number = random.Random(0), 0

    def begin(self, running: int) -> None:
        """Readers that decode from now on."""
        for _ in range(running):
            self._add(16, MODEL_LEN - 16, None)
        while any(each.num_output_tokens < 2 for each in self.core.scheduler.requests.values()):
            self.llm.llm_engine.step()

    def _add(self, tokens: int, answer: int, lora: Any) -> None:
        from vllm import SamplingParams

        self.number += 1
        prompt = {"prompt_token_ids": [self.chance.randrange(3, VOCABULARY) for _ in range(tokens)]}
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(str(self.number), prompt, params, lora_request=lora)

    def step(self, span: int, alone: bool) -> tuple[float, float]:
        """One step of the readers, of a span, or of both. Never more than one: the span must be in it whole."""
        scheduler = self.core.scheduler
        readers = scheduler.running
        if alone:
            scheduler.running = []
        if span:
            self._add(span, 1, self.lora)
        if self.rows:
            self.rows.begin(span)
        cpu, wall = time.process_time(), time.perf_counter()
        done = self.llm.llm_engine.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if alone:
            scheduler.running = readers
        if span and not any(each.finished for each in done):
            raise RuntimeError("the span was not computed in one step")
        if self.rows and len(self.rows.kept) != 3 * len(self.rows_layers()) * bool(span):
            raise RuntimeError("the hooks did not keep what backward needs")
        return cpu, wall

    def rows_layers(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner.model.model.layers


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
