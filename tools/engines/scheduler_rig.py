"""vLLM's own scheduler and block pool without a model or a worker, with the hook on it and a table that we write.

Runs inside an environment that has vLLM, with the exported hook on PYTHONPATH, as a file beside its user: tests of the
hit rate, and `valve bench hook`. Tokens are made up; everything that the scheduler decides is the real thing.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections import deque
from collections.abc import Sequence
from time import thread_time_ns
from typing import Any

import numpy as np
import valve_abi
from valve_hook import wire
from valve_hook.sessions import Session, Sessions
from valve_hook.shared import Book, Lifecycle, Table
from valve_hook.vllm import calls
from valve_hook.wire import Mode

SIZES = 8, 8, 128  # of a model that is never run: heads, layers, size of a head


class RigDesk:
    """What stands for the link: a session of its own making, whose table is written by `take` and `give`."""

    is_offline, said = True, ""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.lifecycle = Lifecycle()
        self.session: Session | None = None
        self.on_tick: Any = None

    def propose(self, wanted: Any) -> None:
        """The table is made by `begin`, when it is known where the columns lie."""

    def answer(self, wait_s: float) -> Any:
        return self.session

    def next_session(self, last: Any) -> Any:
        return self.sessions.after(last)

    def need(self, wanted_blocks: int) -> None: ...

    def begin(self, column_of: Sequence[int], rows: int, row_blocks: int) -> None:
        """Every block has memory."""
        blocks, at = len(column_of), valve_abi.KV_TABLE.size
        size = at + 8 * blocks
        head = wire.TABLE_MAGIC, wire.KV_ABI, size, blocks, 16, max(column_of) + 1, at, at + 4 * blocks
        self._table, fd = memory("table", size)
        self._table[: wire.TABLE_HEAD.size] = wire.TABLE_HEAD.pack(*head)
        self._write(wire.TABLE_BACKED_BLOCKS, "<II", blocks, blocks)
        self.entries = np.frombuffer(self._table, dtype=np.uint32, count=blocks, offset=at)
        self.entries[:] = 1
        np.frombuffer(self._table, dtype=np.uint32, count=blocks, offset=at + 4 * blocks)[:] = column_of
        heads = wire.BOOK_BYTES + -(-blocks // 8) * 8
        cells = heads + wire.ROW.size * rows
        book_bytes = cells + 4 * rows * row_blocks
        self._book, book_fd = memory("book", book_bytes)
        self._book[: wire.BOOK_HEAD.size] = wire.BOOK_HEAD.pack(
            wire.BOOK_MAGIC, wire.KV_ABI, book_bytes, rows, row_blocks, wire.BOOK_BYTES, heads, cells
        )
        self.session = Session(number=1, table=Table(fd, size), book=Book(book_fd, book_bytes))
        self.sessions.begin(self.session)

    def take(self, blocks: Sequence[int]) -> None:
        self._change(blocks, 0)

    def give(self, blocks: Sequence[int]) -> None:
        self._change(blocks, 1)

    def aim(self, target_blocks: int) -> None:
        self._write(wire.TABLE_TARGET_BLOCKS, "<I", target_blocks)

    def _change(self, blocks: Sequence[int], backed: int) -> None:
        self.entries[blocks] = ((self.entries[blocks] >> 1) + 1) << 1 | backed
        self._write(wire.TABLE_BACKED_BLOCKS, "<I", int(np.count_nonzero(self.entries & 1)))
        (epoch,) = struct.unpack_from("<Q", self._table, wire.TABLE_EPOCH)
        self._write(wire.TABLE_EPOCH, "<Q", epoch + 1)

    def _write(self, at: int, form: str, *numbers: int) -> None:
        self._table[at : at + struct.calcsize(form)] = struct.pack(form, *numbers)


def memory(name: str, size: int) -> tuple[mmap.mmap, int]:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return mmap.mmap(fd, size), fd


def make_scheduler(model: str, *, blocks: int, seqs: int, budget: int, length: int, block_tokens: int = 16) -> Any:
    """Stock, with prefix caching. `model`: a folder with a configuration; no weights are read."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=block_tokens,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        enable_prefix_caching=True,
        num_gpu_blocks_override=blocks,
        hf_overrides={"max_position_embeddings": length},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(sha256)
    heads, layers, size = SIZES
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=size, dtype=torch.float16)
    names = [f"layer.{number}" for number in range(layers)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        log_stats=False,
    )


class RiggedScheduler:
    """A scheduler and what stands for its workers: every request goes on with made-up tokens."""

    def __init__(self, scheduler: Any, *, column: int, depth: int = 1) -> None:
        """`column`: blocks of one; 0: the hook is left out."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.scheduler, self.depth = scheduler, depth
        self.pool = scheduler.kv_cache_manager.block_pool
        self.hasher = get_request_block_hasher(scheduler.block_size, sha256)
        self.flying: deque[tuple[Any, Any]] = deque()
        self.asked = self.found = 0  # tokens of prompts, and of them in the cache
        self.computed: dict[str, int] = {}  # by every request: tokens of all its steps
        self.step_ns = 0  # of this thread's time, in the last step: all of its scheduling
        self.hook_ns = 0  # and the hook's part; without a hook what the readings of the clock take
        self._chance = random.Random(7)
        self.desk: RigDesk | None = RigDesk() if column else None
        self.hook: Any = None
        if self.desk is not None:
            self.hook = scheduler._valve = calls.VllmHook(scheduler, self.desk, Mode.FULL, "vllm rig")  # type: ignore[arg-type]
            count = self.pool.num_gpu_blocks
            self.desk.begin([block // column for block in range(count)], 2 * scheduler.max_num_running_reqs, 512)

    def add(self, name: str, tokens: Sequence[int], answer: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(tokens),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """Schedule one and take the output of the oldest in; whether anything was scheduled."""
        self.step_ns = self.hook_ns = 0
        output = self._schedule()
        for new in output.scheduled_new_reqs:
            self.asked += len(new.prompt_token_ids)
            self.found += new.num_computed_tokens
        for name, tokens in output.num_scheduled_tokens.items():
            self.computed[name] = self.computed.get(name, 0) + tokens
        self.flying.append((output, self.result_of(output)))
        while len(self.flying) >= self.depth:
            self.believe()
        return bool(output.num_scheduled_tokens)

    def _schedule(self) -> Any:
        began = thread_time_ns()
        if self.hook is not None:
            calls.before_schedule(self.scheduler)
        looked = thread_time_ns()
        output = self.scheduler.schedule()
        scheduled = thread_time_ns()
        if self.hook is not None:
            calls.after_schedule(self.scheduler, output)
        ended = thread_time_ns()
        self.hook_ns += looked - began + ended - scheduled
        self.step_ns += ended - began
        return output

    def believe(self) -> None:
        output, result = self.flying.popleft()
        began = thread_time_ns()
        if self.hook is not None:
            calls.before_update(self.scheduler, output, result)
        self.hook_ns += thread_time_ns() - began
        self.scheduler.update_from_output(output, result)
        self.step_ns += thread_time_ns() - began

    def result_of(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        tokens = [
            [self._chance.randrange(1000)] if each.num_computed_tokens >= each.num_tokens else [] for each in requests
        ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
