"""A small engine with SGLang's hazards: its two loops, its page table, its tree of cached pages, its rules for
retracted, finishing and chunked requests, under its names. As in toy_engine.py a token is a function of all that a
request's pages hold, so one wrong number anywhere shows in the output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from types import SimpleNamespace

from toy_sglang_memory import Allocator, Kv, Rows, Tree
from toy_tensor import tensor

POISON = 987_654_321


class Mode(IntEnum):
    EXTEND = 1
    DECODE = 2

    def is_extend(self):
        return self is Mode.EXTEND


def ending(message, status_code=None):
    """FINISH_ABORT."""
    return SimpleNamespace(message=message, to_json=lambda: {"message": message})


@dataclass(eq=False)
class Req:
    rid: str
    origin_input_ids: list[int]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    is_retracted: bool = False
    is_done: bool = False
    to_finish: SimpleNamespace | None = None
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

    def _compute_max_prefix_len(self, tokens):
        return tokens - 1

    def finished(self):
        return self.is_done


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
        self.page, self.enable_overlap, self.chunked_prefill_size, self.hooks = page_size, overlap, chunk, hooks
        self.token_to_kv_pool_allocator = self.allocator = Allocator(pages, page_size)
        self.tree_cache = self.tree = Tree(self.allocator)
        self.req_to_token_pool = Rows(rows)
        self.table = self.req_to_token_pool.req_to_token
        self.running_batch = self.batch([], Mode.DECODE)
        self.last_batch = self.chunked_req = self.hisparse_coordinator = self.max_queued_requests = None
        self._pending_chunked_abort_req = None
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

    def abort(self, rid):
        """A client has left: abort_request, between two steps."""
        if self.chunked_req is not None and self.chunked_req.rid == rid:
            self._pending_chunked_abort_req = self.chunked_req
        for each in [each for each in self.waiting_queue if each.rid == rid]:
            self.waiting_queue.remove(each)
            self.done[rid] = "left"
        for each in (*self.running_batch.reqs, *(self.last_batch.reqs if self.last_batch else ())):
            if each.rid == rid and not each.finished():
                each.to_finish = ending("left")

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
        if (gone := self._pending_chunked_abort_req) is not None:
            if self.chunked_req is gone:
                gone.is_done, self.done[gone.rid], self.chunked_req = True, "left", None
                self.release(gone)
            self._pending_chunked_abort_req = None
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
        room, chosen = self.chunked_prefill_size, []
        chunked, self.chunked_req = self.chunked_req, None
        queue = [chunked] if chunked else []
        if chunked:  # add_chunked_req
            answers = sum(each.max_new_tokens - len(each.output_ids) for each in running.reqs)
            left = self.allocator.available_size() + self.tree.evictable_size() - answers
            room = min(room, left // self.page * self.page) if left >= self.page else room
        while room > 0 and (queue or self.waiting_queue):
            request = queue.pop() if queue else self.waiting_queue[0]
            if not self.extend(request, room):
                if request is chunked:
                    raise RuntimeError("Prefill out of memory")
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
        whole = -(-len(tokens) // self.page) - -(-have // self.page)  # a prompt begins where all of it finds memory
        fits = kv.holds_kv or whole <= (self.allocator.available_size() + self.tree.evictable_size()) // self.page
        pages = self.pages_for(have, end) if fits else None
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

        spare = self.hooks.sparing(running) if self.hooks else lambda *both: both
        retracted, aborted = [], []
        while running.reqs and not fits():
            victim = running.reqs.pop()
            self.release(victim)
            (retracted if running.reqs else aborted).append(victim)
        for each in aborted:
            each.to_finish = ending("out of memory")
        retracted, aborted = spare(retracted, aborted)
        for each in aborted:
            self.done[each.rid] = each.to_finish.message
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
                told = request.to_finish.message if request.to_finish else request.output_ids
                request.is_done, self.done[request.rid] = True, told
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
