"""What a vLLM has open and what it has done, for the lifecycle page. It needs no KV cache and changes nothing.

An engine whose memory is left alone (a hybrid model, an encoder without a cache) still says how many requests are open,
so that gating is exact, and how far its work is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Any

from valve_hook.link import Link

log = logging.getLogger("valve")
MOST_ROWS = 256  # steps whose tokens wait to be counted


class Progress:
    """One per Scheduler. A token is useful once, however often its KV is computed again: a token that was generated
    when it is believed, the prompt of a pooling request (embeddings, scores) when its answer is there.
    """

    def __init__(self, scheduler: Any, link: Link) -> None:
        self._scheduler = scheduler
        self._link = link
        self.ended = 0
        self._counted = 0  # rows that wait are not in it, what is to be taken out of them is
        self._last_useful = 0
        self._rows: deque[list[Any]] = deque()  # a step's sampled tokens, one or none in a row, not counted yet
        self._lock = threading.Lock()
        self._gone: set[str] = set()  # ended, and may be in a step in flight
        self.told_open = -1
        self._failures = 0
        self.calm: None = None

    @property
    def useful_tokens(self) -> int:
        """Any thread may ask, and counts what is left to count."""
        with self._lock:
            while self._rows:
                self._counted += sum(map(len, self._rows.popleft()))
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
        return False

    def after_schedule(self, output: Any) -> str:
        finished = output.finished_req_ids
        if finished:
            self.ended += len(finished)
            self._gone |= finished
        if finished or len(self._scheduler.requests) != self.told_open:
            self._tell()
        return self.unheeded

    def _tell(self) -> None:
        """In a step's way the tokens as they were counted last: the link's thread counts and tells them."""
        self.told_open = len(self._scheduler.requests)
        tokens = self._last_useful if self.told_open else self.useful_tokens
        self._link.lifecycle.tell(self.told_open, self.ended, tokens)

    def tell_tokens(self) -> None:
        """On the link's thread, between two changes of what is open; and what is, before the first step."""
        self._link.lifecycle.tell_first(len(self._scheduler.requests), self.useful_tokens)

    def before_update(self, output: Any, result: Any) -> None:
        self.count(output, result)

    def count_plain(self, output: Any, result: Any) -> bool:
        """Take it in where each row is one token or none, of a request that is open; whether it was."""
        rows = self._rows
        if (
            self._gone
            or output.scheduled_spec_decode_tokens
            or getattr(result, "pooler_output", None)
            or len(rows) >= MOST_ROWS  # the link's thread, which counts them, has no connection
        ):
            return False
        rows.append(result.sampled_token_ids)
        return True

    def count(self, output: Any, result: Any, dropped: Collection[str] = ()) -> int:
        """Take a step's output into the sum. Returns the tokens of requests whose output is `dropped`."""
        sampled, wasted, requests = result.sampled_token_ids, 0, self._scheduler.requests
        late: Collection[str] = ()
        if self._gone:
            self._gone -= output.finished_req_ids  # steps come in in order: theirs are in
            late = [name for name in self._gone if name in output.num_scheduled_tokens and name not in requests]
        if sampled:  # without drafts a row holds one token or none
            if output.scheduled_spec_decode_tokens:  # of several in a row vLLM may yet take some out
                self._count(sum(map(len, sampled)))
            else:
                self._rows.append(sampled)
                if len(self._rows) >= MOST_ROWS:  # the link's thread, which counts them, has no connection
                    self.tell_tokens()
            if dropped or late:
                row_of = result.req_id_to_index
                wasted = sum(len(sampled[row_of[name]]) for name in dropped)
                self._count(-wasted - sum(len(sampled[row_of[name]]) for name in late if name not in dropped))
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
