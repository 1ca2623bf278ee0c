"""The memory that SGLang wants to see before a waiting request may begin: for its prompt, and set apart for answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valve_hook.sglang.prefixes import held_by_others

LOOK_AT_WAITING = 32  # waiting requests whose prompts are added up: enough to ask for memory, bounded in a long queue
RESERVED = 1  # token of each request, beside a page: without a prefix cache SGLang wants to see it, too


class AnswerRoom:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, pages: int, page_tokens: int) -> None:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        self._scheduler, self._pages, self._page = scheduler, pages, page_tokens
        self._tree = scheduler.tree_cache
        self._most_new = int(CLIP_MAX_NEW_TOKENS)

    def needed(self, request: Any) -> int:
        """Tokens that have to be free or cached, and a few more, before it begins, should nobody else run."""
        return self._known_pages(request) * self._page + self._answer(request) + self._page + self._reserved(1)

    def finds_next_chunk(self, request: Any) -> bool:
        """Whether what is free or cached for nobody holds the next chunk of a prompt that has begun. SGLang does not
        ask: where it finds too little for a chunk it ends itself.
        """
        rest = len(request.origin_input_ids) + len(request.output_ids) - request.kv.kv_allocated_len
        chunk = min(rest, self._scheduler.chunked_prefill_size or rest)
        return bool(-(-chunk // self._page) <= self.free_or_cached())

    def wanted(self, waiting: Sequence[Any], held: int) -> int:
        """Pages that requests hold, and those that the ones that wait need. What is free or cached for nobody makes
        room for them; only if it does not, what they share with others is looked up, and page 0 is counted, which is
        among those that have memory.
        """
        rest = self._rest_of_chunked()
        if not waiting and not rest:
            return held
        waiting = waiting[:LOOK_AT_WAITING]
        prompts, room = [self._known_pages(each) for each in waiting], self.free_or_cached()
        need = self._need(waiting, prompts)
        if rest + need > room:
            prompts = [pages - self._shared_pages(each) for pages, each in zip(prompts, waiting, strict=True)]
            need = self._need(waiting, prompts)
        if rest + need > room:
            return min(self._pages, held + rest + need + 1)
        return held + rest + sum(prompts)

    def free_or_cached(self) -> int:
        """Pages that are free, or cached for no running request."""
        free = self._scheduler.token_to_kv_pool_allocator.available_size()
        return int(free + self._tree.evictable_size()) // self._page

    def _need(self, waiting: Sequence[Any], prompts: list[int]) -> int:
        """Of those that wait: all prompts, and at least what SGLang wants to see before the first of them begins."""
        if not waiting:
            return 0
        running, last = self._scheduler.running_batch.reqs, self._scheduler.last_batch
        if last is not None and last.forward_mode.is_extend():  # SGLang takes them along before it chooses
            running = [each for each in (*running, *last.reqs) if not each.finished()]
        answers = self._answer(waiting[0]) + sum(map(self._expected, running)) + self._reserved(1 + len(running))
        more = int(answers) + 1  # than that
        return max(sum(prompts), prompts[0] + 1 - (-more // self._page))

    def _rest_of_chunked(self) -> int:
        """Pages that a prompt which goes in chunk by chunk has still to take."""
        chunked = self._scheduler.chunked_req
        return 0 if chunked is None else self._known_pages(chunked) - -(-chunked.kv.kv_allocated_len // self._page)

    def _known_pages(self, request: Any) -> int:
        return -(-(len(request.origin_input_ids) + len(request.output_ids)) // self._page)

    def _shared_pages(self, request: Any) -> int:
        """Of its prompt, those that a running request holds: they are not in `free_or_cached`."""
        return held_by_others(self._tree, request) // self._page

    def _reserved(self, requests: int) -> int:
        return 0 if self._tree.supports_prefix_sharing() else RESERVED * requests

    def _expected(self, request: Any) -> float:
        """Of those tokens, as many as SGLang sets apart once it runs."""
        ratio = 1.0 if request.sampling_params.ignore_eos else self._scheduler.new_token_ratio_tracker.current
        return self._answer(request) * float(ratio)

    def _answer(self, request: Any) -> int:
        """Tokens to come, as many of them as SGLang counts."""
        left = int(request.sampling_params.max_new_tokens) - len(request.output_ids)
        return min(max(left, 0), self._most_new)
