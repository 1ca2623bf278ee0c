"""A real vLLM whose cache is elastic, in this process: `vllm_unheeded.py KIND MODEL FOLDER`. Prints JSON.

The shim is a stand-in: it says that the cache lies in memory of Valve's. KIND:
  heeded   as it is meant to be; it also says whether the engine attached before its first request
  broken   the scheduler's hook cannot be made
  missing  this vLLM lacks a name that the hook relies on
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


def stand_in_for_the_shim(placement: Any) -> None:
    ranges: list[int] = []
    exports = {"valve_kv_begin": lambda flags: ranges.append(flags.value), "valve_kv_end": lambda: None}
    placement.shim_call, placement.kv_ranges = exports.get, lambda: len(ranges)


def main() -> None:
    kind, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ["VALVE_RUN_DIR"] = str(folder)
    from kv_node import KvNode, wait_for

    node = KvNode(folder)
    from valve_hook.vllm import calls, check, placement
    from vllm import LLM, SamplingParams

    stand_in_for_the_shim(placement)
    if kind == "broken":
        calls.VllmEngine = None
    if kind == "missing":
        check.SCHEDULER_NAMES = (*check.SCHEDULER_NAMES, "a_name_of_the_future")
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        num_gpu_blocks_override=60,
        max_model_len=256,
    )
    core = llm.llm_engine.engine_core.engine_core
    hook = core.model_executor.driver_worker.worker._valve
    if kind == "heeded":
        wait_for(lambda: core.scheduler._valve.reconciler.session, "attached before the first request")
    error, tokens = "", []
    try:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        tokens = list(answers[0].outputs[0].token_ids)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    told = {"layouts": len(node.layouts), "attached": bool(node.attached)}
    print(json.dumps({"elastic": hook.is_elastic, "error": error, "tokens": len(tokens), **told}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
