"""The memory that SGLang wants to see before a waiting request may begin: for its prompt, and set apart for answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOOK_AT_WAITING = 32  # waiting requests whose prompts are added up: enough to ask for memory, bounded in a long queue


class AnswerRoom:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, page_tokens: int) -> None:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        self._scheduler, self._page = scheduler, page_tokens
        self._most_new = int(CLIP_MAX_NEW_TOKENS)

    def needed(self, request: Any) -> int:
        """Tokens that have to be free or cached, and a few more, before it begins, should nobody else run."""
        return self._known_pages(request) * self._page + self._answer(request) + self._page

    def wanted(self, running: Sequence[Any], waiting: Sequence[Any], *, is_short: bool) -> int:
        """Pages beside those in use. `is_short`: memory was taken, which an answer may need."""
        pages = sum(map(self._known_pages, waiting[:LOOK_AT_WAITING]))
        if waiting and is_short:
            expected = self._scheduler.new_token_ratio_tracker.current * sum(map(self._answer, running))
            pages += int(self._answer(waiting[0]) + expected) // self._page + 2
        return pages

    def _known_pages(self, request: Any) -> int:
        return -(-(len(request.origin_input_ids) + len(request.output_ids)) // self._page)

    def _answer(self, request: Any) -> int:
        """Tokens to come, as many of them as SGLang counts."""
        left = int(request.sampling_params.max_new_tokens) - len(request.output_ids)
        return min(max(left, 0), self._most_new)
