"""A small engine with vLLM's hazards and none of its weight: blocks hold numbers, and a token is a function of all
that a request's blocks hold, so one wrong number anywhere shows in the output.

It schedules, runs and believes steps like vLLM's scheduler (async: a step is launched before the last one is believed;
blocks are hashed when scheduled, not when computed) and hands its steps to the real hook code by the same fields.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

from valve_tools.engines.block_manager import BlockManager

POISON = 987_654_321


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: object = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_stale_output_tokens: int = 0
    num_output_placeholders: int = 0
    drop_stale_output: bool = False
    resumable: bool = False
    status: str = "WAITING"

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class Waiting(deque):
    """vLLM's names for the queue of who waits."""

    def peek_request(self):
        return self[0]

    def pop_request(self):
        return self.popleft()

    def prepend_request(self, request):
        self.appendleft(request)


class Queue:
    """The stock order: last freed without content first, then oldest content."""

    def __init__(self, blocks):
        self.free = dict.fromkeys(blocks)

    @property
    def num_free_blocks(self):
        return len(self.free)

    def popleft_n(self, n):
        taken = list(self.free)[:n]
        for block in taken:
            del self.free[block]
        return taken

    def remove(self, block):
        del self.free[block]

    def append_n(self, blocks):
        self.free |= dict.fromkeys(blocks)

    def prepend_n(self, blocks):
        self.free = dict.fromkeys(blocks) | self.free

    def get_all_free_blocks(self):
        return list(self.free)


class Pool:
    def __init__(self, count):
        self.num_gpu_blocks = count
        self.blocks = [Block(number) for number in range(count)]
        self.free_block_queue = Queue(self.blocks[1:])
        self.null_block = self.blocks[0]
        self.cache: dict[object, Block] = {}

    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, n):
        taken = self.free_block_queue.popleft_n(n)
        for block in taken:
            self.evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        first, last = [], []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (first if block.block_hash is None else last).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def evict(self, block):
        if block.block_hash is not None and self.cache.get(block.block_hash) is block:
            del self.cache[block.block_hash]
        block.block_hash = None

    def evict_blocks(self, ids):
        for number in ids:
            self.evict(self.blocks[number])

    def reset_prefix_cache(self):
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        for block in self.blocks:
            self.evict(block)
        return True


class ToyScheduler:
    """Scheduler and worker in one. `launch` schedules and runs a step; `believe` takes the oldest step's output."""

    def __init__(self, blocks=40, block_size=4, max_seqs=8, budget=24, caching=True, hooks=None, manager=BlockManager):
        self.block_size, self.max_num_running_reqs, self.budget = block_size, max_seqs, budget
        self.max_model_len, self.caching = 400, caching
        self.pool = Pool(blocks)
        self.manager = manager(self.pool, block_size)
        self.req_to_blocks: dict[str, list[Block]] = self.manager.req_to_blocks
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool,
            coordinator=SimpleNamespace(single_type_managers=[self.manager]),
            evict_blocks=self.pool.evict_blocks,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        )
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.num_spec_tokens = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = Waiting()
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.grammar_compile_error_reqs: set[str] = set()
        self.failed: set[str] = set()  # ended with an error
        self.memory = [[0] * block_size for _ in range(blocks)]  # what the blocks hold
        self.quarantined: set[int] = set()
        self.in_flight: deque[tuple[SimpleNamespace, SimpleNamespace]] = deque()
        self.done: dict[str, list[int]] = {}
        self.hooks = hooks  # valve_hook.vllm.calls, or nothing

    def add(self, name, prompt, max_tokens):
        self.requests[name] = Request(name, list(prompt), max_tokens)
        self.waiting.append(self.requests[name])

    def abort(self, name):
        request = self.requests.pop(name)
        if request.status == "RUNNING":
            self.running.remove(request)
            self._free(request)
        else:
            self.waiting.remove(request)
        self.finished_req_ids.add(name)

    # ---- vLLM's names ----

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        assert request.status == "RUNNING"
        self._free(request)
        request.status = "PREEMPTED"
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.drop_stale_output = drop_stale_output or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        self.waiting.appendleft(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def reset_prefix_cache(self, reset_running_requests=False):
        while reset_running_requests and self.running:
            self._preempt_request(self.running.pop(), 0.0, drop_stale_output=True)
        self.prev_step_scheduled_req_ids.clear()
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("blocks are held")
        return True

    def schedule(self):
        if self.hooks:
            self.hooks.before_schedule(self)
        self._plan = SimpleNamespace(budget=self.budget, scheduled={}, new=[], rows=[], resumed=set())
        if not self._schedule_running():
            self._schedule_waiting()
        plan = self._plan
        names, grown, starts = zip(*plan.rows, strict=True) if plan.rows else ((), (), ())
        output = SimpleNamespace(
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=names, resumed_req_ids=plan.resumed, new_block_ids=grown, num_computed_tokens=starts
            ),
            num_scheduled_tokens=plan.scheduled,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.reset_preempted_req_ids,
            kv_cache_block_copies=None,
            scheduled_spec_decode_tokens={},
        )
        self._tables = {name: list(self.req_to_blocks[name]) for name in plan.scheduled}
        for name, count in plan.scheduled.items():
            self._advance(self.requests[name], count)
        self.prev_step_scheduled_req_ids = set(plan.scheduled)
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        if self.hooks:
            self.hooks.after_schedule(self, output)
        return output

    def _schedule_running(self):
        """Whether somebody was preempted."""
        plan, preempted = self._plan, False
        for request in list(self.running):
            want = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            ahead = request.num_computed_tokens + 2 - request.num_output_placeholders
            is_last = request.num_output_placeholders and ahead > len(request.prompt) + request.max_tokens
            count = min(want, plan.budget)
            if request.status != "RUNNING" or count <= 0 or is_last:
                continue
            blocks = self._grow(request, count)
            while blocks is None and request.status == "RUNNING":
                victim = self.running.pop()
                assert victim.request_id not in plan.scheduled
                preempted = True
                self._preempt_request(victim, 0.0)
                blocks = self._grow(request, count) if victim is not request else None
            if request.status != "RUNNING":
                break
            grown = ([block.block_id for block in blocks],) if blocks else None
            plan.rows.append((request.request_id, grown, request.num_computed_tokens))
            plan.scheduled[request.request_id] = count
            plan.budget -= count
        return preempted

    def _schedule_waiting(self):
        plan = self._plan
        while plan.budget and self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            if request.num_stale_output_tokens and not request.drop_stale_output:
                break
            hits = self._hits(request)
            computed = len(hits) * self.block_size
            count = min(request.num_tokens - computed, plan.budget)
            self.pool.touch(hits)
            self.req_to_blocks[request.request_id] = list(hits)
            request.num_computed_tokens = computed
            if self._grow(request, count) is None:
                self._free(request)
                request.num_computed_tokens = 0
                break
            self.waiting.popleft()
            self.running.append(request)
            self._admit(request, computed)
            plan.scheduled[request.request_id] = count
            plan.budget -= count

    def _admit(self, request, computed):
        name, plan = request.request_id, self._plan
        blocks = ([block.block_id for block in self.req_to_blocks[name]],)
        if request.status == "PREEMPTED":
            plan.resumed.add(name)
            plan.rows.append((name, blocks, computed))
        else:
            plan.new.append(SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed))
        request.status = "RUNNING"

    def _advance(self, request, count):
        request.num_computed_tokens += count
        request.num_in_flight_tokens += count
        if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
            request.num_output_placeholders += 1
        if self.caching:
            self._hash(request, request.num_computed_tokens - request.num_output_placeholders)

    def update_from_output(self, output, result):
        if self.hooks:
            self.hooks.before_update(self, output, result)
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= count
                if request.drop_stale_output:
                    continue
            for token in result.sampled_token_ids[result.req_id_to_index[name]]:
                request.output.append(token)
                if not stale:
                    request.num_output_placeholders -= 1
            if len(request.output) >= request.max_tokens:
                self.done[name] = request.output[: request.max_tokens]
                del self.requests[name]
                self.finished_req_ids.add(name)
                if request.status == "RUNNING":
                    self.running.remove(request)
                    self._free(request)
                else:
                    self.waiting.remove(request)
        for name in self.grammar_compile_error_reqs & self.requests.keys():
            self.abort(name)
            self.failed.add(name)
        self.grammar_compile_error_reqs.clear()

    # ---- the worker ----

    def launch(self, reclaim=None):
        """Schedule a step and run it; `reclaim` is called half way, between its first and its second request."""
        output = self.schedule()
        sampled, index = [], {}
        names = list(output.num_scheduled_tokens)
        starts = dict(
            zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
        )
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for place, name in enumerate(names):
            if reclaim is not None and place == len(names) // 2:
                reclaim()
            index[name] = place
            sampled.append(self._compute(name, starts[name], output.num_scheduled_tokens[name]))
        if reclaim is not None and not names:
            reclaim()
        result = SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=index, pooler_output=None)
        self.in_flight.append((output, result))

    def believe(self):
        if self.in_flight:
            self.update_from_output(*self.in_flight.popleft())

    def poison(self, blocks):
        """What a reclaim does to memory: garbage now, and for writes as long as it lasts."""
        self.quarantined |= set(blocks)
        for block in blocks:
            self.memory[block] = [POISON] * self.block_size

    def back(self, blocks):
        self.quarantined -= set(blocks)
        for block in blocks:
            self.memory[block] = [0] * self.block_size

    def _compute(self, name, start, count):
        """Write KV of the scheduled tokens; the last one's token depends on everything before it."""
        table, request = self._tables[name], self.requests[name]
        known = [*request.tokens, *self._guesses(request)]
        for position in range(start, start + count):
            before = sum(self._read(table, place) * (place + 3) for place in range(position))
            block = table[position // self.block_size].block_id
            value = (known[position] * 31 + before) % 1_000_003
            self.memory[block][position % self.block_size] = POISON if block in self.quarantined else value
        if start + count < len(known):
            return []
        return [sum(self._read(table, place) * (place + 7) for place in range(start + count)) % 50_021]

    def _read(self, table, place):
        return self.memory[table[place // self.block_size].block_id][place % self.block_size]

    def _guesses(self, request):
        """Tokens of steps in flight that the scheduler has not seen yet: the worker has them (async scheduling)."""
        return [
            token
            for output, result in self.in_flight
            if request.request_id in result.req_id_to_index and not self._is_stale(request, output)
            for token in result.sampled_token_ids[result.req_id_to_index[request.request_id]]
        ]

    def _is_stale(self, request, output):
        stale, seen = request.num_stale_output_tokens, 0
        for flying, _ in self.in_flight:
            seen += flying.num_scheduled_tokens.get(request.request_id, 0)
            if flying is output:
                return seen <= stale
        return False

    # ---- blocks ----

    def _grow(self, request, count):
        tokens = request.num_computed_tokens + count
        need = -(-tokens // self.block_size) - len(self.req_to_blocks.get(request.request_id, ()))
        if need > self.pool.get_num_free_blocks():
            return None
        return self.manager.allocate_new_blocks(request.request_id, tokens, tokens)

    def _free(self, request):
        self.pool.free_blocks(reversed(self.req_to_blocks.pop(request.request_id, [])))

    def _hash(self, request, tokens):
        for number in range(tokens // self.block_size):
            block = self.req_to_blocks[request.request_id][number]
            key = tuple(request.tokens[: (number + 1) * self.block_size])
            if block.block_hash is None and key not in self.pool.cache:
                block.block_hash, self.pool.cache[key] = key, block

    def _hits(self, request):
        """The longest cached beginning, at least one token short of the whole."""
        found = []
        for number in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.cache.get(tuple(request.tokens[: (number + 1) * self.block_size]))
            if block is None or not self.caching:
                break
            found.append(block)
        return found

    def check_integrity(self, withheld=()):
        """Free, used and withheld add up, nothing is counted twice, and the cache holds no withheld block."""
        used = {block for table in self.req_to_blocks.values() for block in table}
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == len(set(free)) == self.pool.get_num_free_blocks()
        assert not set(free) & used
        assert not {block.block_id for block in free} & set(withheld)
        assert not {block.block_id for block in self.pool.cache.values()} & set(withheld)
        assert len(set(free) | used | {self.pool.blocks[block] for block in withheld}) == self.pool.num_gpu_blocks - 1
