"""A real vLLM whose memory is left alone, in this process: `vllm_reported.py KIND TOKENIZER FOLDER`.

KIND is `hybrid` (sliding-window and full layers), `encoder` (no KV cache), `lora` (adapters are allowed) or `sound`.
Prints what valved's side has seen, and the reason that the engine was told, as JSON. Weights are random: nobody looks
at the answers.
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
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def config(kind: str) -> Any:
    from transformers import (
        BertConfig,
        Gemma2Config,
        LlamaConfig,
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2Config,
    )

    if kind == "lora":
        return LlamaConfig(vocab_size=1024, architectures=["LlamaForCausalLM"], dtype="float32", **SIZES)
    if kind == "sound":
        ears = Qwen2AudioEncoderConfig(d_model=128, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=128)
        text = Qwen2Config(vocab_size=1024, num_key_value_heads=4, **SIZES)
        names = ["Qwen2AudioForConditionalGeneration"]
        return Qwen2AudioConfig(audio_config=ears, text_config=text, architectures=names, dtype="float32")
    if kind == "encoder":
        return BertConfig(vocab_size=1024, architectures=["BertModel"], dtype="float32", **SIZES)
    layers = ["sliding_attention", "full_attention"] * 2
    return Gemma2Config(
        vocab_size=1024,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=64,
        layer_types=layers,
        architectures=["Gemma2ForCausalLM"],
        dtype="float32",
        **SIZES,
    )


OPTIONS = {
    "encoder": {"runner": "pooling"},
    "lora": {"enable_lora": True, "max_lora_rank": 8},
    "sound": {"limit_mm_per_prompt": {"audio": 0}},
}


def main() -> None:
    kind, tokenizer, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ["VALVE_RUN_DIR"] = str(folder)
    from kv_node import KvNode, wait_for

    node = KvNode(folder)
    config(kind).save_pretrained(folder / "config")
    from valve_hook.vllm import worker
    from vllm import LLM, SamplingParams

    flags: list[int] = []
    judge = worker.range_flags
    worker.range_flags = lambda *seen: flags.append(judge(*seen)) or flags[-1]
    llm = LLM(
        model=str(folder / "config"),
        tokenizer=tokenizer,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        **OPTIONS.get(kind, {}),
    )
    prompts = [{"prompt_token_ids": list(range(3, 23))} for _ in range(5)]
    if kind == "encoder":
        llm.embed(prompts, use_tqdm=False)
    else:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    wait_for(lambda: node.hellos, "the hook has connected")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.schedule()  # of nothing: it tells who has ended
    seen = {"flags": flags, "is_attached": bool(node.attached), "why": scheduler._valve_why}
    print(json.dumps({**seen, "region": node.region()}))


if __name__ == "__main__":
    main()
