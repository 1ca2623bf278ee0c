"""The memory that SGLang wants to see before a waiting request may begin: for its prompt, and set apart for answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOOK_AT_WAITING = 32  # waiting requests whose prompts are added up: enough to ask for memory, bounded in a long queue


class AnswerRoom:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, pages: int, page_tokens: int) -> None:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        self._scheduler, self._pages, self._page = scheduler, pages, page_tokens
        self._most_new = int(CLIP_MAX_NEW_TOKENS)

    def needed(self, request: Any) -> int:
        """Tokens that have to be free or cached, and a few more, before it begins, if no other request runs."""
        return self._known_pages(request) * self._page + self._answer(request) + self._page

    def wanted(self, running: Sequence[Any], waiting: Sequence[Any], used: int, taken: int) -> int:
        """Pages in use and to be used. While some are taken an answer may need them: then what the first that waits
        does not find is wanted beyond all that have memory, page 0 among them. Cached pages without a request make
        room.
        """
        prompts = used + sum(map(self._known_pages, waiting[:LOOK_AT_WAITING]))
        if not waiting or not taken:
            return prompts
        expected = sum(map(self._expected, running))
        needed = self._known_pages(waiting[0]) + int(self._answer(waiting[0]) + expected) // self._page + 2
        short = needed - self._room()
        return max(prompts, self._pages - taken + short) if short > 0 else prompts

    def _room(self) -> int:
        """Pages that are free, or cached for no running request."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        return int(free + scheduler.tree_cache.evictable_size()) // self._page

    def _known_pages(self, request: Any) -> int:
        return -(-(len(request.origin_input_ids) + len(request.output_ids)) // self._page)

    def _expected(self, request: Any) -> float:
        """Of those tokens, as many as SGLang sets apart once it runs."""
        ratio = 1.0 if request.sampling_params.ignore_eos else self._scheduler.new_token_ratio_tracker.current
        return self._answer(request) * float(ratio)

    def _answer(self, request: Any) -> int:
        """Tokens to come, as many of them as SGLang counts."""
        left = int(request.sampling_params.max_new_tokens) - len(request.output_ids)
        return min(max(left, 0), self._most_new)
