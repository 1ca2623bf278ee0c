"""The real radix caches of SGLang, Rust's core and Python's, forget chosen pages and nothing else, and give up last
what is kept for a request that was sent back.

No model and no scheduler: a cache, an allocator, three prompts with a common beginning. Prints one JSON line per core.
"""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from valve_hook.sglang.engine import SglangEngine
from valve_hook.sglang.prefixes import held_by_others

HEAD = list(range(10))
PROMPTS = {"a": [*HEAD, *range(100, 106)], "b": [*HEAD, *range(200, 206)], "c": list(range(300, 312))}


def match(tree, prompt):
    return tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))


def make(core):
    """The cache with three prompts in it, the engine over it, and the slots of each."""
    allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", None, False)
    pool = ReqToTokenPool(4, 64, "cpu", False)
    parts = {"tree_components": (ComponentType.FULL,), "tree_core_backend": core}
    tree = UnifiedRadixCache(CacheInitParams(False, pool, allocator, 1, **parts))
    slots = {}
    for name, prompt in PROMPTS.items():
        known = tree.path_device_indices(match(tree, prompt).last_device_node)
        slots[name] = allocator.alloc(len(prompt) - len(known))
        value = torch.cat((known, slots[name]))
        tree.insert(InsertParams(key=RadixKey(array("q", prompt)), value=value, prev_prefix_len=len(known)))
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=tree,
        req_to_token_pool=pool,
        max_total_num_tokens=64,
        batch_result_processor=SimpleNamespace(enable_overlap=False),
        waiting_queue=[],
    )
    return SglangEngine(scheduler), slots


def cached(tree):
    return {name: int(match(tree, prompt).device_prefix_len) for name, prompt in PROMPTS.items()}


def keeping(core, *, keeps):
    """a is the oldest, and 18 tokens are given up; what is kept of it is a quarter of the memory, 16 tokens."""
    engine, _ = make(core)
    tree, queue = engine.tree, engine.scheduler.waiting_queue
    request = SimpleNamespace(rid="a", origin_input_ids=array("q", PROMPTS["a"]), output_ids=array("q"))
    request.extra_key = request.cache_salt = None
    queue.append(request)
    if keeps:
        engine.prefixes.keep(request, 16)
    for name in "bc":
        match(tree, PROMPTS[name])
    tree.evict(EvictParams(num_tokens=18))
    tree.sanity_check()
    return cached(tree)


def shared(core):
    """Of prompts of those beginnings, what a request that runs holds: all of b, and nothing else."""
    tree = make(core)[0].tree
    lock = tree.lock(match(tree, PROMPTS["b"]).last_device_node)
    request = SimpleNamespace(output_ids=array("q"), extra_key=None, cache_salt=None)
    request._compute_max_prefix_len = lambda tokens: tokens - 1
    found = {}
    for name, prompt in PROMPTS.items():
        request.origin_input_ids = array("q", prompt)
        found[name] = held_by_others(tree, request)
    tree.unlock(lock)
    tree.sanity_check()
    return found


def story(core):
    engine, slots = make(core)
    tree, allocator = engine.tree, engine.allocator
    lost = np.array([int(slots["b"][2])], dtype=np.uint32)
    forgotten = engine.forget(lost)
    engine.withhold(lost)
    tree.sanity_check()
    return {
        "core": type(tree.tree_core).__name__,
        "forgotten": forgotten,
        "cached": cached(tree),
        "free": allocator.available_size(),
        "shared": shared(core),
        "kept": keeping(core, keeps=True),
        "not kept": keeping(core, keeps=False),
    }


if __name__ == "__main__":
    for core in ("rust", "python"):
        print(json.dumps(story(core)), flush=True)
