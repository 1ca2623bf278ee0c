"""What a vLLM has open and what it has done, for the lifecycle page. It needs no KV cache and changes nothing.

An engine whose memory is left alone (a hybrid model, an encoder without a cache) still says how many requests are open,
so that gating is exact, and how far its work is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from valve_hook.link import Link

log = logging.getLogger("valve")


class Progress:
    """One per Scheduler. A token is useful once, however often its KV is computed again: a token that was generated
    when it is believed, the prompt of a pooling request (embeddings, scores) when its answer is there.
    """

    def __init__(self, scheduler: Any, link: Link) -> None:
        self._scheduler = scheduler
        self._link = link
        self.useful_tokens = 0
        self.ended = 0
        self._gone: set[str] = set()  # ended, and may be in a step in flight
        self._failures = 0

    def before_schedule(self) -> None:
        pass

    def after_schedule(self, output: Any) -> None:
        self.ended += len(output.finished_req_ids)
        self._gone |= output.finished_req_ids
        region = self._link.region
        if region is not None:
            region.write(len(self._scheduler.requests), self.ended, self.useful_tokens)

    def before_update(self, output: Any, result: Any) -> None:
        self.count(output, result)

    def count(self, output: Any, result: Any, dropped: Collection[str] = ()) -> int:
        """Take a step's output into the sum. Returns the tokens of requests whose output is `dropped`."""
        sampled, wasted, requests = result.sampled_token_ids, 0, self._scheduler.requests
        self._gone -= output.finished_req_ids  # steps come in in order: theirs are in
        late = [name for name in self._gone if name in output.num_scheduled_tokens and name not in requests]
        if sampled:  # without drafts a row holds one token or none
            drafts, row_of = output.scheduled_spec_decode_tokens, result.req_id_to_index
            wasted = sum(len(sampled[row_of[name]]) for name in dropped)
            unread = sum(len(sampled[row_of[name]]) for name in late if name not in dropped)
            tokens = sum(map(len, sampled)) if drafts or not all(sampled) else len(sampled)
            self.useful_tokens += tokens - wasted - unread
        pooled = getattr(result, "pooler_output", None)
        if pooled:
            index = result.req_id_to_index
            answered = [name for name in output.num_scheduled_tokens if pooled[index[name]] is not None]
            self.useful_tokens += sum(
                requests[name].num_prompt_tokens for name in answered if name in requests and name not in dropped
            )
        return wasted

    def fail(self, what: str, *, is_look: bool = False) -> None:
        self._failures += 1
        if self._failures <= 3:
            log.exception("valve: %s; the engine goes on", what)
