"""Cached paths are forgotten from their first spoilt page on. Both tree cores, Rust's and Python's, have the calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from valve_hook.sglang.steps import look_up, on_device
from valve_hook.shared import Blocks


def evict(tree: Any, blocks: Blocks, pages: int, page_tokens: int) -> None:
    """Leaf by leaf, and a parent when its last child is gone."""
    import torch

    core, leaves = tree.tree_core, unused_leaves(tree, pages * page_tokens)
    if not leaves:
        return
    paths = core.collect_path_info(leaves)
    root = paths[0][0].parent_id
    slots = [core.collect_full_device_indices(leaf, root) for leaf in leaves]
    is_bad = np.zeros(pages, dtype=bool)
    is_bad[blocks] = True
    where_cached = torch.cat(slots) // page_tokens
    spoilt = np.flatnonzero(look_up(on_device(where_cached, is_bad), where_cached).cpu().numpy())
    ends = np.cumsum([len(each) for each in slots])
    hit, where = np.unique(np.searchsorted(ends, spoilt, side="right"), return_index=True)
    tracker, gone = dict.fromkeys(tree.tree_components, 0), Counter[int]()
    for at, first in zip(hit.tolist(), spoilt[where].tolist(), strict=True):
        sound = first - int(ends[at]) + len(slots[at])
        for node in reversed(paths[at]):
            if node.path_end <= sound or gone[node.node_id] < node.num_children:
                break
            tree._evict_device_leaf(node.node_id, tracker)
            gone[node.parent_id] += 1


def unused_leaves(tree: Any, tokens: int) -> list[int]:
    """Of the cache, those that no request uses: SGLang's own eviction walk, with nothing evicted."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core, full = tree.tree_core, ComponentType.FULL
    found: list[int] = []
    tracker = dict.fromkeys(tree.tree_components, 0)
    core.evict_device_start(full, tokens)
    try:
        while True:
            node, has_moved = tree._evict_device_next_node(full, tracker)
            if node is None and not has_moved:
                return found
            if node is not None:
                found.append(node)
    finally:
        core.evict_device_end(full)
