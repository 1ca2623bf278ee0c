"""A real vLLM with less memory than a request needs, in this process: `vllm_waiting.py MODEL FOLDER '{"async": ...}'`.

18 blocks of 32 tokens, 12 of them without memory: first a request that needs 10, then nine short ones.
Prints JSON: who had ended how when all that could go on had, and after memory has come; the long one's answer alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_campaign import Campaign

TAKEN = list(range(6, 18))


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    campaign = Campaign(model, folder, {**plan, "blocks": 18, "columns": 2})
    from vllm import SamplingParams

    engine = campaign.llm.llm_engine
    ended: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}

    def send(name: str, length: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": [3 + at % 1000 for at in range(length)]}, params)

    def step(count: int) -> dict[str, str]:
        for _ in range(count):
            for output in engine.step() if engine.has_unfinished_requests() else ():
                if output.finished:
                    ended[output.request_id] = str(output.outputs[0].finish_reason)
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return dict(ended)

    send("alone", 300)
    step(60)
    campaign.node.take(TAKEN)
    for name, length in [("long", 300), *((f"short{number}", 40) for number in range(9))]:
        send(name, length)
    before = step(150)
    campaign.node.give(TAKEN)
    after: Any = step(100)
    is_same = tokens.get("long") == tokens["alone"]
    print(json.dumps({"before": before, "after": after, "is_same": is_same}), flush=True)


if __name__ == "__main__":
    main()
