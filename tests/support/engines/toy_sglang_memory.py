"""The memory of the toy SGLang: its page table, its free list and its tree of cached pages, under SGLang's names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace

import numpy as np
from toy_tensor import Tensor, tensor

FULL = "FULL"


@dataclass(eq=False)
class Kv:
    """What a request holds."""

    req_pool_idx: int | None = None
    kv_allocated_len: int = 0
    kv_committed_len: int = 0
    cache_protected_len: int = 0

    @property
    def holds_kv(self):
        return self.req_pool_idx is not None


class Rows:
    """ReqToTokenPool: a row of slots for each request."""

    def __init__(self, rows):
        self.req_to_token = np.zeros((rows, 400), dtype=np.int64).view(Tensor)
        self.clear()

    def write(self, indices, values):
        self.req_to_token[indices] = values

    def free(self, request):
        self.free_rows.append(request.kv.req_pool_idx)
        request.kv = Kv()

    def clear(self):
        self.free_rows = list(range(len(self.req_to_token)))


class MHATokenToKVPool:
    """Two layers; 8 bytes a token in each of four buffers, 4096 bytes apart."""

    kv_cache_layout = "nhd"

    def __init__(self, slots):
        bases = [
            SimpleNamespace(data_ptr=lambda at=at: 4096 * at, stride=lambda _: 4, element_size=lambda: 2)
            for at in range(4)
        ]
        self.slots, self.k_buffer, self.v_buffer = slots, bases[:2], bases[2:]


class Allocator:
    def __init__(self, pages, page_size):
        self.size, self.page_size = (pages - 1) * page_size, page_size
        self.clear()

    def clear(self):
        self.free_pages = tensor(range(1, self.size // self.page_size + 1))

    def get_kvcache(self):
        return MHATokenToKVPool(self.size + self.page_size)

    def merge_and_sort_free(self):
        pass

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def alloc(self, count):
        taken, self.free_pages = self.free_pages[:count].tolist(), self.free_pages[count:]
        return taken

    def free(self, pages):
        self.free_pages = tensor([*self.free_pages.tolist(), *pages])


@dataclass(eq=False)
class Node:
    parent: int
    key: tuple[int, ...]
    page: int
    locks: int = 0
    children: dict[tuple[int, ...], int] = field(default_factory=dict)


class Tree:
    """One page a node; cache and tree core in one."""

    def __init__(self, allocator):
        self.allocator, self.page = allocator, allocator.page_size
        self.tree_components, self.tree_core = (FULL,), self
        self.numbers = itertools.count(1)
        self.reset()

    def reset(self):
        self.nodes = {0: Node(parent=-1, key=(), page=-1)}

    def supports_prefix_sharing(self):
        return True

    def path(self, tokens):
        at, found = 0, []
        for start in range(0, len(tokens) - self.page + 1, self.page):
            at = self.nodes[at].children.get(tuple(tokens[start : start + self.page]))
            if at is None:
                break
            found.append(at)
        return found

    def insert(self, tokens, pages):
        """The path that now stands for these tokens: nodes that were there keep their page."""
        at, path = 0, []
        for number, page in enumerate(pages):
            key = tuple(tokens[number * self.page : (number + 1) * self.page])
            if key not in self.nodes[at].children:
                new = next(self.numbers)
                self.nodes[at].children[key] = new
                self.nodes[new] = Node(parent=at, key=key, page=page)
            at = self.nodes[at].children[key]
            path.append(at)
        return path

    def lock(self, node, by):
        while node:
            self.nodes[node].locks += by
            node = self.nodes[node].parent

    def leaves(self):
        return [number for number, node in self.nodes.items() if number and not node.children and not node.locks]

    def evictable_size(self):
        return sum(not node.locks for node in islice(self.nodes.values(), 1, None)) * self.page

    def touch_prefix(self, key):
        for number in self.path(key):
            self.nodes[number] = self.nodes.pop(number)

    def make_room(self, pages):
        if pages > 0:
            self.evict(SimpleNamespace(num_tokens=pages * self.page))

    def evict(self, params):
        """What was used the longest ago first."""
        pages = params.num_tokens // self.page
        while pages > 0 and self.leaves():
            self._evict_device_leaf(self.leaves()[0], {})
            pages -= 1

    # ---- SGLang's names ----

    def match_full_device_prefix(self, key):
        path = self.path(key)
        return len(path) * self.page, path[-1] if path else 0, len(path) * self.page

    def inc_full_pin(self, node):
        self.lock(node, 1)

    def dec_full_pin(self, node):
        self.lock(node, -1)

    def all_values_flatten(self):
        pages = [node.page for number, node in self.nodes.items() if number]
        return tensor([page * self.page + slot for page in pages for slot in range(self.page)])

    def evict_device_start(self, component, count):
        assert (component, count > 0) == (FULL, True)
        self.seen = set()

    def evict_device_end(self, component):
        del self.seen

    def _evict_device_next_node(self, component, tracker):
        node = next((each for each in self.leaves() if each not in self.seen), None)
        self.seen.add(node)
        return node, node is not None

    def _evict_device_leaf(self, number, tracker):
        node = self.nodes[number]
        assert not node.children
        assert not node.locks
        del self.nodes[node.parent].children[node.key], self.nodes[number]
        self.allocator.free([node.page])

    def collect_path_info(self, numbers):
        return [self._path_info(number) for number in numbers]

    def _path_info(self, number):
        chain = []
        while number:
            chain.insert(0, number)
            number = self.nodes[number].parent
        return [
            SimpleNamespace(
                node_id=each,
                parent_id=self.nodes[each].parent,
                path_end=place * self.page,
                num_children=len(self.nodes[each].children),
            )
            for place, each in enumerate(chain, 1)
        ]

    def collect_full_device_indices(self, number, root):
        pages = []
        while number != root:
            pages.insert(0, self.nodes[number].page)
            number = self.nodes[number].parent
        return tensor([page * self.page + slot for page in pages for slot in range(self.page)])
