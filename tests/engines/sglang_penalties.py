"""SGLang's own penalizers, told an answer at once and told it one by one: one JSON object on standard output.

What both keep must be the same to the last bit; and the milliseconds that a long answer takes each way.
"""

from __future__ import annotations

import json
import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from valve_hook.sglang.resumed import put_back, tell

KINDS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}
VOCABULARY, TRIALS, LONG = 128_256, 40, 500


class Batch(SimpleNamespace):
    """SGLang keeps a weak reference to it."""


def request(chance: random.Random, length: int) -> Any:
    sampling = SimpleNamespace(
        frequency_penalty=chance.uniform(-2, 2),
        presence_penalty=chance.uniform(-2, 2),
        repetition_penalty=chance.uniform(0.5, 2),
        min_new_tokens=chance.randrange(1, 600),
        stop_token_ids={1, 2},
    )
    used = chance.randrange(1, 300)  # few different ones: they repeat
    return SimpleNamespace(
        sampling_params=sampling,
        origin_input_ids=[3, 4],
        output_ids=[chance.randrange(used) for _ in range(length)],
        eos_token_ids={0},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5),
    )


def batch_of(requests: list[Any]) -> Any:
    lengths = torch.tensor([2 + len(each.output_ids) for each in requests])
    batch = Batch(reqs=requests, device="cpu", decoding_reqs=None, seq_lens=lengths, seq_lens_cpu=lengths)
    whole = BatchedPenalizerOrchestrator(VOCABULARY, batch, KINDS)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=whole)
    return batch


def one_by_one(penalizer: Any, tokens: Any) -> None:
    for at in range(len(tokens)):
        penalizer.cumulate_output_tokens(tokens[at : at + 1])


def kept(penalizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(penalizer).items() if hasattr(value, "shape")}


def is_same(length: int, chance: random.Random) -> bool:
    one = request(chance, length)
    batches, tokens = [batch_of([one]) for _ in range(2)], torch.tensor(one.output_ids)
    told = [each.sampling_info.penalizer_orchestrator.penalizers for each in batches]
    for kind in KINDS:
        tell(told[0][kind], tokens)
        one_by_one(told[1][kind], tokens)
    pairs = [(kept(told[0][kind]), kept(told[1][kind])) for kind in KINDS]
    return all(
        mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its) for mine, its in pairs
    )


def milliseconds(how: Any) -> float:
    took = []
    for _ in range(9):
        began = time.perf_counter()
        how()
        took.append((time.perf_counter() - began) * 1e3)
    return round(sorted(took)[4], 2)


def main() -> None:
    chance = random.Random(1)
    same = sum(is_same(chance.randrange(1, 600), chance) for _ in range(TRIALS))
    alone, eight = (batch_of([request(chance, LONG) for _ in range(count)]) for count in (1, 8))
    penalizers = alone.sampling_info.penalizer_orchestrator.penalizers.values()
    tokens = torch.tensor(alone.reqs[0].output_ids)
    report = {
        "same": same,
        "of": TRIALS,
        "loop_ms": milliseconds(lambda: [one_by_one(each, tokens) for each in penalizers]),
        "put_back_ms": milliseconds(lambda: put_back(alone, overlap=False)),
        "put_back_8_ms": milliseconds(lambda: put_back(eight, overlap=False)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
