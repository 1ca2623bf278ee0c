"""What the hook imports from sglang (and of torch), made of the toy's: for sys.modules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
from toy_sglang import ending
from toy_sglang_memory import FULL
from toy_tensor import tensor


def sglang_modules(scheduler_of):
    def retract_all(
        *, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, hisparse_coordinator, offload_kv
    ):
        for request in reqs:
            scheduler_of(tree_cache).release(request)

    names = {
        "torch": {"cat": lambda tensors: tensor(np.concatenate(tensors))},
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.schedule_batch": {
            "retract_all": retract_all,
            "FINISH_ABORT": ending,
        },
        "sglang.srt.managers.io_struct": {
            "PauseGenerationReqInput": lambda mode: SimpleNamespace(mode=mode),
            "ContinueGenerationReqInput": lambda torch_empty_cache: None,
            "AbortReq": lambda rid, finished_reason: SimpleNamespace(rid=rid, finished_reason=finished_reason),
        },
        "sglang.srt.managers.schedule_policy": {"CLIP_MAX_NEW_TOKENS": 4096},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.base_prefix_cache": {
            "EvictParams": lambda num_tokens: SimpleNamespace(num_tokens=num_tokens)
        },
        "sglang.srt.mem_cache.radix_cache": {
            "RadixKey": lambda token_ids, extra_key, limit, cache_salt: token_ids[:limit]
        },
        "sglang.srt.mem_cache.unified_cache": {},
        "sglang.srt.mem_cache.unified_cache.component_type": {"ComponentType": SimpleNamespace(FULL=FULL)},
    }
    made = {}
    for name, content in names.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
    return made
