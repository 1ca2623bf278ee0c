"""What is kept for requests that lost KV and were sent back to SGLang's queue: their sound beginnings.

What of them stands in the radix cache is found again when they come back, unless the cache has given it up meanwhile.
So whenever it is about to give up something, those beginnings are used anew first, oldest first: by SGLang's own order
(LRU) they are the last to go. Nothing is locked, so nobody waits or is retracted for it. They are a quarter of the
memory at most; beyond it the request sent back first is dropped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("valve")
SHARE = 4  # of the tokens that have memory, one in so many at most


class KeptPrefixes:
    """One per Scheduler."""

    def __init__(self, scheduler: Any, backed_tokens: Callable[[], int]) -> None:
        self._scheduler, self._tree, self._backed_tokens = scheduler, scheduler.tree_cache, backed_tokens
        self._kept: dict[str, tuple[Any, int]] = {}  # the request, and how many of its tokens are kept
        self._has_failed = False
        for name in ("evict", "evict_for_alloc"):
            if hasattr(self._tree, name):
                setattr(self._tree, name, self._refreshing(getattr(self._tree, name)))

    def keep(self, request: Any, sound_tokens: int) -> None:
        """It was sent back; so many of its tokens are sound."""
        most = self._backed_tokens() // SHARE
        self._kept.pop(request.rid, None)
        self._kept[request.rid] = request, min(sound_tokens, most)
        while sum(tokens for _, tokens in self._kept.values()) > most:
            del self._kept[next(iter(self._kept))]

    def refresh(self) -> None:
        """A request that does not wait any more has come back, or has ended."""
        if not self._kept:
            return
        waiting = {each.rid for each in self._scheduler.waiting_queue}
        self._kept = {name: kept for name, kept in self._kept.items() if name in waiting}
        for request, tokens in self._kept.values():
            self._tree.touch_prefix(key_of(request, tokens))

    def _refreshing(self, evict: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(evict)
        def refresh_and_evict(*arguments: Any, **options: Any) -> Any:
            try:
                self.refresh()
            except Exception:
                self._kept = {}
                if not self._has_failed:
                    log.exception("valve: this cache lacks the prefixes that were to be kept; the engine goes on")
                self._has_failed = True
            return evict(*arguments, **options)

        return refresh_and_evict


def key_of(request: Any, tokens: int) -> Any:
    """By which the cache knows the first tokens of this request."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids = request.origin_input_ids + request.output_ids
    return RadixKey(token_ids=ids, extra_key=request.extra_key, limit=tokens, cache_salt=request.cache_salt)


def held_by_others(tree: Any, request: Any) -> int:
    """Tokens at the beginning of a waiting request's prompt that stand in the cache and that a running request holds.
    Locks reach from a node to the root: pinned for this moment, the prefix tells by what becomes unavailable.
    """
    core: Any = getattr(tree, "tree_core", None)
    has_own_embeddings = getattr(request, "positional_embed_overrides", None) is not None  # then SGLang shares nothing
    if has_own_embeddings or not hasattr(core, "match_full_device_prefix"):
        return 0
    limit = request._compute_max_prefix_len(len(request.origin_input_ids) + len(request.output_ids))
    matched, node, whole = core.match_full_device_prefix(key_of(request, limit))
    if not matched:
        return 0
    before = tree.evictable_size()
    core.inc_full_pin(node)
    try:
        unheld = before - tree.evictable_size()
    finally:
        core.dec_full_pin(node)
    return int(min(matched, whole - unheld))
