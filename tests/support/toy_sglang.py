"""A small engine with SGLang's hazards: its two loops, its page table, its tree of cached pages, its rules for
retracted, finishing and chunked requests, under its names. As in toy_engine.py a token is a function of all that a
request's pages hold, so one wrong number anywhere shows in the output.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from types import SimpleNamespace

import numpy as np
from toy_tensor import Tensor, tensor

POISON = 987_654_321
FULL = "FULL"


class Mode(IntEnum):
    EXTEND = 1
    DECODE = 2

    def is_extend(self):
        return self is Mode.EXTEND


@dataclass(eq=False)
class Req:
    rid: str
    origin_input_ids: list[int]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    is_retracted: bool = False
    is_done: bool = False
    to_finish: str | None = None
    beam_group: object = None
    input_embeds: object = None
    extra_key: str | None = None
    cache_salt: str | None = None
    prefix_len: int = 0
    extend_end: int = 0
    inflight_middle_chunks: int = 0
    lock: int | None = None
    prompt_logprobs: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.kv, self.sampling_params = Kv(), SimpleNamespace(max_new_tokens=self.max_new_tokens, ignore_eos=False)

    @property
    def tokens(self):
        return [*self.origin_input_ids, *self.output_ids]

    def finished(self):
        return self.is_done


@dataclass(eq=False)
class Kv:
    req_pool_idx: int | None = None
    kv_allocated_len: int = 0
    kv_committed_len: int = 0
    cache_protected_len: int = 0

    @property
    def holds_kv(self):
        return self.req_pool_idx is not None


@dataclass(eq=False)
class Batch:
    reqs: list[Req]
    forward_mode: Mode
    req_to_token_pool: Rows
    spans: dict[str, tuple[int, int]]  # what this step computes of each
    batch_is_full: bool = False
    return_logprob: bool = False
    decoding_reqs: None = None
    sampling_info = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False))

    @property
    def req_pool_indices(self):
        return [each.kv.req_pool_idx for each in self.reqs]

    @property
    def req_pool_indices_cpu(self):
        return tensor(self.req_pool_indices)

    @property
    def seq_lens_cpu(self):
        return tensor([self.spans[each.rid][1] for each in self.reqs])

    @property
    def prefix_lens(self):
        return [self.spans[each.rid][0] for each in self.reqs]

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[at] for at in keep_indices]


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


class Processor:
    """A frozen value, as there."""

    def __init__(self, enable_overlap):
        object.__setattr__(self, "enable_overlap", enable_overlap)

    def __setattr__(self, name, value):
        raise TypeError("frozen")


class Scheduler:
    """`turn` is one pass of its event loop, with or without overlap."""

    return_logprob = False

    def __init__(self, pages=60, page_size=4, overlap=True, rows=8, chunk=12, hooks=None):
        self.page, self.enable_overlap, self.chunk, self.hooks = page_size, overlap, chunk, hooks
        self.token_to_kv_pool_allocator = self.allocator = Allocator(pages, page_size)
        self.tree_cache = self.tree = Tree(self.allocator)
        self.req_to_token_pool = Rows(rows)
        self.table = self.req_to_token_pool.req_to_token
        self.running_batch = self.batch([], Mode.DECODE)
        self.last_batch = self.chunked_req = self.hisparse_coordinator = self.max_queued_requests = None
        self.waiting_queue: list[Req] = []
        self.result_queue: deque[tuple[Batch, SimpleNamespace]] = deque()
        self.batch_result_processor = Processor(overlap)
        self.device_module = SimpleNamespace(synchronize=lambda: None)
        self.new_token_ratio_tracker = SimpleNamespace(current=1.0)
        self.max_total_num_tokens = self.allocator.size
        self.invariant_checker = SimpleNamespace(max_total_num_tokens=self.max_total_num_tokens)
        self.memory = [[0] * page_size for _ in range(pages)]
        self.quarantined: set[int] = set()
        self.future = [0] * rows  # token sampled last, by row: the worker has it before the scheduler
        self.done: dict[str, list[int] | str] = {}
        self.is_paused = self.enable_priority_scheduling = False

    def batch(self, reqs, mode):
        return Batch(
            reqs=list(reqs),
            forward_mode=mode,
            req_to_token_pool=self.req_to_token_pool,
            spans={each.rid: (each.prefix_len, each.extend_end) for each in reqs},
            return_logprob=self.return_logprob,
        )

    def add(self, rid, prompt, max_new_tokens):
        self.waiting_queue.append(Req(rid, list(prompt), max_new_tokens))

    @property
    def is_idle(self):
        return not (self.waiting_queue or self.running_batch.reqs or self.last_batch or self.result_queue)

    # ---- the loop ----

    def turn(self, reclaim=None):
        batch = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        if batch is not None:
            result = self.run(batch, reclaim)
            copy = Batch(**{**vars(batch), "reqs": batch.reqs[:]})
            if not self.enable_overlap:
                self.process_batch_result(copy, result)
            else:
                self.result_queue.append((copy, result))
        elif reclaim is not None:
            reclaim()
        if self.enable_overlap and self.last_batch is not None:
            self.process_batch_result(*self.result_queue.popleft())
        elif batch is None:
            self.check_idle()
        self.last_batch = batch

    def get_next_batch_to_run(self, running, last):
        if self.hooks:
            running, last = self.hooks.before_choose(self, running, last)
        if self.chunked_req is not None:
            self.checkpoint(self.chunked_req)  # before its result: others may find the chunk from here on
        if last is not None and last.forward_mode.is_extend():
            running.reqs += [each for each in last.reqs if each is not self.chunked_req and not each.finished()]
        running.reqs = [each for each in running.reqs if not each.finished()]
        self.running_batch = running
        chosen = self.prefill(running) or self.decode(running)
        if self.hooks:
            self.hooks.after_choose(self, chosen)
        return chosen

    def prefill(self, running):
        room, chosen = self.chunk, []
        chunked, self.chunked_req = self.chunked_req, None
        queue = [chunked] if chunked else []
        while room > 0 and (queue or self.waiting_queue):
            request = queue.pop() if queue else self.waiting_queue[0]
            if not self.extend(request, room):
                self.chunked_req = request if request is chunked else None
                break
            if request is not chunked:
                self.waiting_queue.pop(0)
            room -= request.extend_end - request.prefix_len
            chosen.append(request)
            if request.extend_end < len(request.tokens):
                request.inflight_middle_chunks += 1
                self.chunked_req = request
                break
        return self.batch(chosen, Mode.EXTEND) if chosen else None

    def extend(self, request, room):
        kv, tokens = request.kv, request.tokens
        path = []
        if not kv.holds_kv:
            if not self.req_to_token_pool.free_rows:
                return False
            path = self.tree.path(tokens[: len(tokens) - 1])
            request.prefix_len = len(path) * self.page
            self.tree.lock(path[-1] if path else 0, 1)
        end = min(len(tokens), request.prefix_len + room)
        have = request.prefix_len if not kv.holds_kv else kv.kv_allocated_len
        pages = self.pages_for(have, end)
        if pages is None:
            self.tree.lock(path[-1] if path else 0, -1)
            return False
        if not kv.holds_kv:
            kv.req_pool_idx, request.lock = self.req_to_token_pool.free_rows.pop(), path[-1] if path else 0
            kv.cache_protected_len = request.prefix_len
            self.write(kv, 0, [self.tree.nodes[node].page for node in path])
        self.write(kv, -(-have // self.page), pages)
        kv.kv_allocated_len = kv.kv_committed_len = request.extend_end = end
        request.is_retracted = False
        return True

    def decode(self, running):
        flying = self.result_queue[0][0].reqs if self.result_queue else []
        running.reqs = [
            each for each in running.reqs if not (each in flying and len(each.output_ids) + 1 >= each.max_new_tokens)
        ]
        if not running.reqs:
            return None
        self.make_room(running)
        for each in running.reqs:
            have = each.kv.kv_allocated_len
            self.write(each.kv, -(-have // self.page), self.pages_for(have, have + 1))
            each.kv.kv_allocated_len = each.kv.kv_committed_len = have + 1
        running.forward_mode = Mode.DECODE
        running.spans = {each.rid: (each.kv.kv_allocated_len - 1, each.kv.kv_allocated_len) for each in running.reqs}
        return running if running.reqs else None

    def make_room(self, running):
        """ScheduleBatch.retract_decode: newest first, and the last one is aborted."""

        def fits():
            need = sum(each.kv.kv_allocated_len % self.page == 0 for each in running.reqs)
            self.tree.make_room(need - len(self.allocator.free_pages))
            return need <= len(self.allocator.free_pages)

        retracted, aborted = [], []
        while running.reqs and not fits():
            victim = running.reqs.pop()
            self.release(victim)
            (retracted if running.reqs else aborted).append(victim)
        for each in aborted:
            each.to_finish = "out of memory"
        if self.hooks and retracted + aborted:
            retracted, aborted = self.hooks.spare(retracted, aborted)
        for each in aborted:
            each.is_done, self.done[each.rid] = True, each.to_finish
        for each in retracted:
            self._add_request_to_queue(each, is_retracted=True)

    def process_batch_result(self, batch, result):
        after = self.hooks.before_result(self, batch, result) if self.hooks else None
        logprobs = iter(result.logprobs)  # of all prompts, one behind the other: who is skipped takes none
        for request, token in zip(batch.reqs, result.tokens, strict=True):
            skips = request.finished() or request.is_retracted
            if batch.forward_mode.is_extend():
                if skips:
                    continue
                start, end = batch.spans[request.rid]
                request.prompt_logprobs += islice(logprobs, (end - start) * batch.return_logprob)
                if request.inflight_middle_chunks:
                    request.inflight_middle_chunks -= 1
                    continue
            elif self.batch_result_processor.enable_overlap and skips:
                continue
            request.output_ids.append(token)
            if request.to_finish or len(request.output_ids) >= request.max_new_tokens:
                request.is_done, self.done[request.rid] = True, request.to_finish or request.output_ids
                self.checkpoint(request, len(request.tokens) - 1)
                self.release(request)
            elif batch.forward_mode.is_extend():
                self.checkpoint(request)
        if after:
            after()

    # ---- SGLang's names for a flush ----

    def pause_generation(self, request):
        assert request.mode == "retract"
        self.is_paused = True
        if self.enable_overlap and self.last_batch is not None:
            self.process_batch_result(*self.result_queue.popleft())
        batches = [self.running_batch, *([self.last_batch] if self.last_batch else [])]
        everybody = {id(each): each for batch in batches for each in batch.reqs}
        if self.chunked_req is not None:
            everybody[id(self.chunked_req)] = self.chunked_req
        self.last_batch = self.chunked_req = None
        self.running_batch.reqs = []
        for each in everybody.values():
            if not each.finished() and each.kv.holds_kv:
                self.release(each)
                self._add_request_to_queue(each)

    def continue_generation(self, request):
        self.is_paused = False

    def flush_cache(self, empty_cache=True):
        if self.running_batch.reqs or self.last_batch or self.result_queue:
            return False
        self.tree.reset()
        self.req_to_token_pool.clear()
        self.allocator.clear()
        return True

    def send_abort_output(self, abort, request):
        self.done[request.rid] = abort.finished_reason["message"]

    def _add_request_to_queue(self, request, is_retracted=False):
        if self.max_queued_requests is not None and len(self.waiting_queue) >= self.max_queued_requests:
            request.is_done, self.done[request.rid] = True, "queue full"
            return
        self.waiting_queue.append(request)

    # ---- the worker ----

    def run(self, batch, reclaim):
        slots = [self.table[each.kv.req_pool_idx].tolist() for each in batch.reqs]
        tokens = []
        for place, request in enumerate(batch.reqs):
            if reclaim is not None and place == len(batch.reqs) // 2:
                reclaim()
            tokens.append(self.compute(request, slots[place], *batch.spans[request.rid]))
        known = [token for each in batch.reqs for token in each.tokens[slice(*batch.spans[each.rid])]]
        return SimpleNamespace(copy_done=None, tokens=tokens, logprobs=[-token for token in known])

    def compute(self, request, slots, start, end):
        known = request.tokens
        for position in range(start, end):
            token = known[position] if position < len(known) else self.future[request.kv.req_pool_idx]
            before = sum(self.read(slots[place]) * (place + 3) for place in range(position))
            page, offset = divmod(slots[position], self.page)
            self.memory[page][offset] = POISON if page in self.quarantined else (token * 31 + before) % 1_000_003
        token = sum(self.read(slots[place]) * (place + 7) for place in range(end)) % 50_021
        self.future[request.kv.req_pool_idx] = token
        return token

    def read(self, slot):
        return self.memory[slot // self.page][slot % self.page]

    def poison(self, pages):
        self.quarantined |= set(pages)
        for page in pages:
            self.memory[page] = [POISON] * self.page

    def back(self, pages):
        self.quarantined -= set(pages)
        for page in pages:
            self.memory[page] = [0] * self.page

    # ---- pages ----

    def pages_of(self, request):
        length = -(-request.kv.kv_allocated_len // self.page)
        return [
            int(slot) // self.page for slot in self.table[request.kv.req_pool_idx, : length * self.page : self.page]
        ]

    def pages_for(self, have, end):
        need = -(-end // self.page) - -(-have // self.page)
        self.tree.make_room(need - len(self.allocator.free_pages))
        return self.allocator.alloc(need) if need <= len(self.allocator.free_pages) else None

    def write(self, kv, first, pages):
        for number, page in enumerate(pages, first):
            for slot in range(self.page):
                self.table[kv.req_pool_idx, number * self.page + slot] = page * self.page + slot

    def checkpoint(self, request, length=None):
        """Into the tree; where it has these tokens already, its pages take the place of the request's own."""
        kv = request.kv
        whole = (request.extend_end if length is None else length) // self.page
        own = self.pages_of(request)[:whole]
        path = self.tree.insert(request.tokens, own)
        kept = [self.tree.nodes[node].page for node in path]
        protected = kv.cache_protected_len // self.page
        self.allocator.free(
            [page for page, other in zip(own[protected:], kept[protected:], strict=True) if page != other]
        )
        slots = [page * self.page + slot for page in kept for slot in range(self.page)]
        self.req_to_token_pool.write((kv.req_pool_idx, slice(0, len(slots))), slots)
        self.tree.lock(path[-1] if path else 0, 1)
        self.tree.lock(request.lock, -1)
        request.lock = path[-1] if path else 0
        kv.cache_protected_len = whole * self.page
        request.prefix_len = request.extend_end

    def release(self, request):
        """release_kv_cache and reset_for_retract."""
        kv = request.kv
        self.allocator.free(self.pages_of(request)[kv.cache_protected_len // self.page :])
        self.tree.lock(request.lock, -1)
        self.req_to_token_pool.free(request)
        request.lock = None
        request.prefix_len = request.inflight_middle_chunks = 0
        request.is_retracted = True
        request.prompt_logprobs *= request.is_done  # whoever comes back is told anew

    def check_idle(self):
        """SGLang's own: what is free and what is cached is all there is."""
        if self.is_idle:
            held = self.allocator.available_size() + (len(self.tree.nodes) - 1) * self.page
            assert held == self.invariant_checker.max_total_num_tokens, "pool memory leak"
