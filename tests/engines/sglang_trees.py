"""The real radix caches of SGLang, Rust's core and Python's, forget chosen pages and nothing else.

No model and no scheduler: a cache, an allocator, three prompts with a common beginning. Prints one JSON line per core.
"""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from valve_hook.sglang.engine import SglangEngine

HEAD = list(range(10))
PROMPTS = {"a": [*HEAD, *range(100, 106)], "b": [*HEAD, *range(200, 206)], "c": list(range(300, 312))}


def match(tree, prompt):
    return tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))


def story(core):
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
    )
    engine = SglangEngine(scheduler)
    lost = np.array([int(slots["b"][2])], dtype=np.uint32)
    forgotten = engine.forget(lost)
    engine.withhold(lost)
    tree.sanity_check()
    return {
        "core": type(tree.tree_core).__name__,
        "forgotten": forgotten,
        "cached": {name: int(match(tree, prompt).device_prefix_len) for name, prompt in PROMPTS.items()},
        "free": allocator.available_size(),
    }


if __name__ == "__main__":
    for core in ("rust", "python"):
        print(json.dumps(story(core)), flush=True)
