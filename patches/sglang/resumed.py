"""Requests that begin again in SGLang: what it counts along an answer is put back to where the answer's tokens are.

A request that was sent back computes its prompt and its answer so far as one prompt, and for a prompt SGLang counts
from nothing: penalties would forget every token of the answer, and `min_new_tokens` would ask for as many once more.
What a request keeps itself (its tokens, their log probabilities, its grammar) moves when a token is believed and at no
other moment, so of a step that was dropped there is nothing to take back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BY_TOKEN = {f"Batched{kind.title()}Penalizer": kind for kind in ("frequency", "presence", "repetition")}


def put_back(batch: Any, *, overlap: bool) -> None:
    """Before a step of prompts is launched. What each penalizer keeps, a row a request, becomes what it is when the
    answer's tokens are told one by one.
    """
    whole = batch.sampling_info.penalizer_orchestrator
    if not whole.is_required:
        return
    for place, request in begun_again(batch):
        alone = _Alone(request, whole.device)
        told = type(whole)(vocab_size=whole.vocab_size, batch=alone, penalizers=set())
        tokens = batch.seq_lens.new_tensor(counted(request, overlap=overlap))
        for kind, penalizer in whole.penalizers.items():
            if penalizer.is_prepared():
                single = kind(told)
                single.prepare()
                tell(single, tokens)
                for name, kept in vars(single).items():
                    if hasattr(kept, "shape"):
                        getattr(penalizer, name)[place] = kept[0]


def tell(penalizer: Any, tokens: Any) -> None:
    """One request's, as if told one by one, and the same to the last bit: what is added for a token is added as often,
    and not multiplied. A kind that is not known here is told one by one.
    """
    kind = BY_TOKEN.get(type(penalizer).__name__)
    if kind is not None:
        row, each = (getattr(penalizer, name) for name in (f"cumulated_{kind}_penalties", f"{kind}_penalties"))
        put = row.scatter_add_ if kind == "frequency" else row.scatter_
        put(1, tokens[None], each.expand(1, len(tokens)))
    elif type(penalizer).__name__ == "BatchedMinNewTokensPenalizer":
        penalizer.len_output_tokens += len(tokens)
    else:
        for at in range(len(tokens)):
            penalizer.cumulate_output_tokens(tokens[at : at + 1])


def begun_again(batch: Any) -> Iterator[tuple[int, Any]]:
    """Place and request. A request that takes its next token in a step of prompts, as SGLang may mix them, has its
    counts; one that computes a part of its prompt that is not the last draws nothing in this step.
    """
    running = {id(each) for each in batch.decoding_reqs or ()}
    for at, each in enumerate(batch.reqs):
        answered = len(each.output_ids)
        if answered and id(each) not in running and batch.seq_lens_cpu[at] >= len(each.origin_input_ids) + answered:
            yield at, each


def counted(request: Any, *, overlap: bool) -> list[int]:
    """What SGLang has counted when the next token of an answer is drawn. With overlap a step is prepared before the
    token of the one before is known: it counts one behind, and the prompt's last token for the first.
    """
    answer = list(request.output_ids)
    return [request.origin_input_ids[-1], *answer[:-1]] if overlap else answer


def cannot_begin_again(request: Any) -> str:
    """Why an answer may come out otherwise once its request was sent back; empty where it does not."""
    if request.beam_group is not None:
        return "a request asks for beam search"
    if request.input_embeds is not None:
        return (
            "a request brings its own embeddings: sent back, it would begin its answer anew, after a part was streamed"
        )
    return ""


class _Alone:
    """A batch of one, as a penalizer looks at it. (SGLang keeps a weak reference to it.)"""

    def __init__(self, request: Any, device: Any) -> None:
        self.reqs, self.device = [request], device
