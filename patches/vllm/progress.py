"""What a vLLM has open and what it has done, for the lifecycle page. It needs no KV cache and changes nothing.

An engine whose memory is left alone (a hybrid model, an encoder without a cache) still says how many requests are open,
so that gating is exact, and how far its work is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from valve_hook.link import Link

log = logging.getLogger("valve")
MOST_ROWS = 256  # steps whose tokens wait to be counted
Row = tuple[Any, Sequence[int]]
"""A step's sampled tokens, and the places of the requests that have ended since it was launched."""


def tokens_of(sampled: Any, late: Sequence[int]) -> int:
    return sum(map(len, sampled)) - sum(len(sampled[place]) for place in late)


class Progress:
    """One per Scheduler. A token is useful once, however often its KV is computed again: a token that was generated
    when it is believed, the prompt of a pooling request (embeddings, scores) when its answer is there.
    """

    def __init__(self, scheduler: Any, link: Link) -> None:
        self._scheduler = scheduler
        self._link = link
        self.ended = 0
        self.ended_beside = 0  # as many had come: of an offline engine the link's thread tells it
        self._counted = 0  # rows that wait are not in it, what is to be taken out of them is
        self._last_useful = 0
        self.rows: deque[Row] = deque()  # of steps that are not counted yet
        self._lock = threading.Lock()
        self.gone: set[str] = set()  # ended, and may be in a step in flight
        self.told_open = -1
        self._failures = 0

    @property
    def useful_tokens(self) -> int:
        """Any thread may ask, and counts what is left to count."""
        with self._lock:
            while self.rows:
                self._counted += tokens_of(*self.rows.popleft())
            self._last_useful = self._counted
            return self._counted

    def _count(self, tokens: int) -> None:
        with self._lock:
            self._counted += tokens

    @property
    def unheeded(self) -> str:
        """Its memory is left alone: why."""
        return str(getattr(self._scheduler, "_valve_why", "no hook"))

    def before_schedule(self) -> bool:
        """Whether the process's elastic memory, if there is any, is known to be another engine's."""
        self.begin()
        owner = self._link.owner
        return owner is not None and owner() is not None

    def after_schedule(self, output: Any) -> str:
        finished = output.finished_req_ids
        if finished:
            self.ended += len(finished)
            self.gone |= finished
        if finished or len(self._scheduler.requests) != self.told_open:
            self.tell()
        return self.unheeded

    def begin(self) -> None:
        """Before a step is chosen: the first request stops offline work meanwhile."""
        if self.told_open < 1 and self._scheduler.requests:
            self.tell()

    def tell(self) -> None:
        """In a step's way the tokens as they were counted last: the link's thread counts and tells them."""
        self.told_open = len(self._scheduler.requests)
        tokens = self._last_useful if self.told_open else self.useful_tokens
        self._link.lifecycle.tell(self.told_open, self.ended, tokens, self)

    def tell_tokens(self) -> None:
        """On the link's thread, between two changes of what is open; and what is, before the first step."""
        open_requests = len(self._scheduler.requests)
        self._link.lifecycle.tell_beside(open_requests, self.ended_beside, self.useful_tokens, self)

    def before_update(self, output: Any, result: Any) -> None:
        self.count(output, result)

    def row(self, output: Any, result: Any) -> Row:
        sampled, gone, late = result.sampled_token_ids, self.gone, []
        if gone:
            gone -= output.finished_req_ids  # steps come in in order: theirs are in
            if sampled:  # none of prompts that go on
                for name in gone:
                    if name in output.num_scheduled_tokens:
                        late.append(result.req_id_to_index[name])
        return sampled, late

    def count(self, output: Any, result: Any, dropped: Collection[str] = ()) -> int:
        """Take a step's output into the sum. Returns the tokens of requests whose output is `dropped`."""
        sampled, late = row = self.row(output, result)
        wasted, requests = 0, self._scheduler.requests
        if sampled:  # without drafts a row holds one token or none
            if output.scheduled_spec_decode_tokens:  # of several in a row vLLM may yet take some out
                self._count(tokens_of(*row))
            else:
                self.rows.append(row)
                if len(self.rows) >= MOST_ROWS:  # the link's thread, which counts them, has no connection
                    self.tell_tokens()
            if dropped:
                places = [result.req_id_to_index[name] for name in dropped]
                wasted = sum(len(sampled[place]) for place in places)
                self._count(-sum(len(sampled[place]) for place in places if place not in late))
        pooled = getattr(result, "pooler_output", None)
        if pooled:
            index = result.req_id_to_index
            answered = [name for name in output.num_scheduled_tokens if pooled[index[name]] is not None]
            self._count(
                sum(requests[name].num_prompt_tokens for name in answered if name in requests and name not in dropped)
            )
        return wasted

    def fail(self, what: str, *, is_look: bool = False) -> None:
        self._failures += 1
        if self._failures <= 3:
            log.exception("valve: %s; the engine goes on", what)
