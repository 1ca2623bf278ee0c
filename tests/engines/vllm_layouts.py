"""Every KV cache layout that this vLLM knows, as it would place it: does the hook take just those of whole pages?

Prints JSON: {layout: [whether vLLM calls its pages compact, whether the hook takes it]}.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from valve_hook.vllm import check
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS, LAYERS = 100, 4


def is_taken(spec: FullAttentionSpec, layout: KVCacheLayout) -> bool:
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"layer{number}" for number in range(LAYERS)]
    size = spec.page_size_bytes * BLOCKS * LAYERS
    tensor = KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1])
    try:
        check.refuse_layout(SimpleNamespace(kv_cache_spec=spec), [tensor])
    except check.MemoryRefused:
        return False
    return True


def main() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert check.strange_kinds(spec) == []
    print(json.dumps({each.name: [each.is_block_compact, is_taken(spec, each)] for each in KVCacheLayout}))


if __name__ == "__main__":
    main()
