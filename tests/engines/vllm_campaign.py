"""Random reclaims under a real vLLM on CPU, in this process: `vllm_campaign.py MODEL FOLDER '{"trials": [...]}'`.

A pre-hook on every decoder layer overwrites reclaimed blocks with garbage in the middle of a step and keeps doing so
while they have no memory; the fake node says what it takes before it is taken. One JSON line per trial on standard
output. Runs inside the engines' environment, with the exported hook on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
EXTENSION = "vllm_ranks.InjectedWorker"  # of each rank's worker
ABLATIONS: dict[str, Callable[[Any], None]] = {}


def ablation(change: Callable[[Any], None]) -> Callable[[Any], None]:
    ABLATIONS[change.__name__] = change
    return change


@ablation
def none(hook: Any) -> None:
    hook.before_schedule = lambda: None
    hook.after_schedule = lambda output: None
    hook.before_update = lambda output, result: None


@ablation
def no_hash_eviction(hook: Any) -> None:
    hook.engine.manager.evict_blocks = lambda blocks: None


@ablation
def no_withholding(hook: Any) -> None:
    hook.engine.withhold = hook.engine.release = lambda blocks: None


@ablation
def stale_output_delivered(hook: Any) -> None:
    preempt = hook.scheduler._preempt_request
    hook.scheduler._preempt_request = lambda request, now, drop_stale_output=False: preempt(request, now)


@ablation
def no_taint(hook: Any) -> None:
    type(hook.ledger).first_written = lambda ledger, held: -1


@ablation
def no_step_record(hook: Any) -> None:
    from valve_hook.vllm import calls

    hook.calm, calls.calm_of = None, lambda hook, last: None  # a calm step notes itself
    type(hook.ledger).launch = lambda ledger, step: None


@ablation
def no_prev_step_fix(hook: Any) -> None:
    class Kept(set[str]):
        def discard(self, _: str) -> None:
            pass

    hook.scheduler.prev_step_scheduled_req_ids = Kept(hook.scheduler.prev_step_scheduled_req_ids)


@ablation
def no_sync_before_schedule(hook: Any) -> None:
    hook.before_schedule = lambda: None


@ablation
def not_begun_again(hook: Any) -> None:
    from valve_hook.vllm.resumed import Resumed

    Resumed.before_step = lambda resumed, output: None


@ablation
def coarse(hook: Any) -> None:
    from valve_hook.wire import Mode

    hook.reconciler.mode = Mode.COARSE


def force_async() -> None:
    """vLLM switches async scheduling off on CPU: switch it on, with an output that needs no device."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker import gpu_model_runner

    settle = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        settle(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    class HostOutput(AsyncModelRunnerOutput):
        def __init__(
            self, model_runner_output: Any, sampled_token_ids: Any, invalid_req_indices: Any, **_: Any
        ) -> None:
            self._output, self._invalid = model_runner_output, invalid_req_indices
            self.sampled_token_ids_cpu = sampled_token_ids.clone()
            self.async_copy_ready_event = SimpleNamespace(synchronize=lambda: None)

        def get_output(self) -> Any:
            tokens = self.sampled_token_ids_cpu.tolist()
            for row in self._invalid:
                tokens[row].clear()
            self._output.sampled_token_ids = [[token for token in row if token >= 0] for row in tokens]
            return self._output

        def get_kv_connector_output(self) -> Any:  # asked for since 0.33
            return None

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    gpu_model_runner.AsyncGPUModelRunnerOutput = HostOutput
    gpu_model_runner.GPUModelRunner._get_or_create_async_output_copy_stream = lambda self: None


def use_source(path: str) -> None:
    """Load Scheduler from this file instead of the installed one: the patched source."""
    import importlib.util

    class Finder:
        @staticmethod
        def find_spec(name: str, _path: Any = None, _target: Any = None) -> Any:
            if name == "vllm.v1.core.sched.scheduler":
                return importlib.util.spec_from_file_location(name, path)
            return None

    sys.meta_path.insert(0, Finder)


class Injector:
    """Takes blocks in the middle of a step, and gives them back some steps later."""

    def __init__(self, runner: Any, node: Any, share: slice = slice(None)) -> None:
        self.node, self.runner, self.share = node, runner, share
        self.chance = random.Random(0)
        self.armed = self.is_paused = False
        self.reset()
        for layer in self.runner.model.model.layers:
            layer.register_forward_pre_hook(self._before_layer)

    def reset(self) -> None:
        self.events, self.calls, self.taken = 0, 0, []  # taken: (blocks, given back at this step)
        self.zeroes, self.lost = True, "garbage"
        self.step, self.layers = 0, len(self.runner.model.model.layers)

    def start(
        self, seed: int, *, every: int, held: int, most: int, columns: bool, limit: int, zeroes: bool, lost: str
    ) -> None:
        self.reset()
        self.zeroes, self.lost = zeroes, lost
        self.chance = random.Random(seed)
        self.every, self.held, self.most, self.columns, self.limit = every, held, most, columns, limit
        self.armed = True

    def stop(self) -> None:
        self.armed = False
        self._give([blocks for blocks, _ in self.taken])
        self.taken = []

    def _before_layer(self, _module: Any, _arguments: Any) -> None:
        if not self.armed:
            return
        layer = self.calls % self.layers
        self.calls += 1
        if layer == 0:
            self.step += 1
            due = [blocks for blocks, until in self.taken if until <= self.step]
            self.taken = [entry for entry in self.taken if entry[1] > self.step]
            self._give(due)
            self.at_layer = self.chance.randrange(self.layers) if self.chance.randrange(self.every) == 0 else -1
        if layer == self.at_layer and self.events < self.limit and not self.is_paused:
            self._take()
        for blocks, _ in self.taken:
            self._spoil(blocks)

    def _take(self) -> None:
        out = {block for blocks, _ in self.taken for block in blocks}
        if self.columns:
            column = cheapest_column(self.node, out)
            blocks = [int(block) for block in (self.node.column_of == column).nonzero()[0] if block]
        else:
            rest = [block for block in range(1, len(self.runner.kv_caches[0])) if block not in out]
            blocks = self.chance.sample(rest, min(self.chance.randrange(1, self.most + 1), max(1, len(rest) // 3)))
        blocks = [block for block in blocks if block not in out]
        if blocks:
            self.events += 1
            self.node.take(blocks)
            self._spoil(blocks)
            self.taken.append((blocks, self.step + self.held))
            if not self.held:
                self._give([self.taken.pop()[0]])

    def _give(self, groups: list[list[int]]) -> None:
        """The memory that comes was another tenant's: NaN. Who gets it zeroes it before its engine is told."""
        for blocks in groups:
            for cache in self.runner.kv_caches:
                cache[blocks] = math.nan
                if self.zeroes:
                    cache[blocks] = 0.0
            self.node.give(blocks)

    def _spoil(self, blocks: list[int]) -> None:
        blocks = blocks[self.share]
        for cache in self.runner.kv_caches:
            cache[blocks] = math.nan if self.lost == "nan" else self.chance.uniform(-3, 3)
            cache[blocks, ..., ::2] *= -1.7


def cheapest_column(node: Any, out: set[int]) -> int:
    """The column whose requests have the fewest tokens, as the book tells: the paper's cost."""
    cost: dict[int, int] = {}
    for blocks in node.rows().values():
        for column in {int(node.column_of[block]) for block in blocks}:
            cost[column] = cost.get(column, 0) + len(blocks)
    backed = {int(node.column_of[block]) for block in range(1, len(node.entries)) if block not in out}
    return min(backed, key=lambda column: (cost.get(column, 0) == 0, cost.get(column, 0), column))


def prompts(seed: int, count: int, *, long: int = 70) -> list[list[int]]:
    chance = random.Random(seed)
    heads = [[chance.randrange(3, 1024) for _ in range(long)] for _ in range(3)]
    return [
        heads[number % 3] * (number % 4 != 3) + [chance.randrange(3, 1024) for _ in range(chance.randrange(10, 40))]
        for number in range(count)
    ]


class Campaign:
    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        os.environ["VALVE_RUN_DIR"] = str(folder)
        from kv_node import KvNode

        self.node = KvNode(folder, columns=options.get("columns", 8))
        if options.get("scheduler_source"):
            use_source(options["scheduler_source"])
        ranks = int(options.get("ranks", 1))
        if options.get("async"):
            os.environ["VALVE_TEST_ASYNC"] = "1"
            force_async()
        from vllm import LLM

        self.pooling = str(options.get("pooling", ""))  # a task: answers are vectors, not tokens
        self.asks = dict(options.get("asks", {}))  # of each request, besides greedy tokens
        self.policy = str(options.get("policy", "fcfs"))
        speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
        self.llm = LLM(
            model=model,
            dtype=options.get("dtype", "float32"),
            enforce_eager=True,
            skip_tokenizer_init=not (self.pooling or "structured" in self.asks),
            scheduling_policy=self.policy,
            block_size=32,
            num_gpu_blocks_override=options.get("blocks", 60),
            max_num_batched_tokens=options.get("budget", 96),
            max_num_seqs=options.get("seqs", 16),
            max_model_len=512,
            enable_prefix_caching=options.get("caching", True),
            seed=0,
            **({"speculative_config": speculative} if options.get("speculative") else {}),
            **({"runner": "pooling", "convert": "embed"} if self.pooling else {}),
            **({"tensor_parallel_size": ranks, "worker_extension_cls": EXTENSION} if ranks > 1 else {}),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        if ranks > 1:
            from vllm_ranks import Injectors

            self.injector: Any = Injectors(self.llm, self.node, folder, ranks)
        else:
            self.injector = Injector(self.core.model_executor.driver_worker.worker.model_runner, self.node)
        self.undisturbed: dict[tuple[int, int, int], list[Any]] = {}

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Long ones where nothing is generated, so that a prompt takes some steps."""
        return prompts(seed, count, long=200 if self.pooling else 70)

    def asked(self, number: int, tokens: int) -> Any:
        from vllm import PoolingParams, SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if self.pooling:
            return PoolingParams(task=self.pooling)
        asks = {"temperature": 0.0, **self.asks}
        if asks.get("n", 1) > 1:  # else the last sequence to end is all that comes
            asks["output_kind"] = RequestOutputKind.FINAL_ONLY
        if asks.pop("streams", False):  # each token comes once, when it is there, and cannot be called back
            asks["output_kind"] = RequestOutputKind.DELTA
        if "structured" in asks:
            asks["structured_outputs"] = StructuredOutputsParams(regex=asks.pop("structured"))
        if asks.pop("seeds", False):
            asks["seed"] = 1000 + number
        return SamplingParams(max_tokens=tokens - number % 7, ignore_eos=True, detokenize=False, **asks)

    def generate(self, seed: int, count: int, tokens: int, aborts: int = 0, *, is_reversed: bool = False) -> list[Any]:
        """Greedy tokens of every request, in order; with `aborts` some are cancelled midway and sent again."""
        engine = self.llm.llm_engine
        wanted = self.prompts(seed, count)
        names: dict[str, int] = {}
        done: dict[int, Any] = {}
        told: dict[str, list[int]] = {}  # what has come of each stream
        chance = random.Random(seed + 99)

        def send(number: int, suffix: str = "") -> None:
            name = f"{seed}-{number}{suffix}-{time.monotonic_ns()}"
            names[name] = number
            more = {"priority": number * 7 % 5} if self.policy == "priority" else {}
            engine.add_request(name, {"prompt_token_ids": wanted[number]}, self.asked(number, tokens), **more)

        for number in reversed(range(count)) if is_reversed else range(count):
            send(number)
        step = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if self.asks.get("streams"):
                    told.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
                if output.finished and output.request_id in names and not is_aborted(output):
                    done[names[output.request_id]] = told.pop(output.request_id, None) or answer_of(output)
            step += 1
            if aborts and step % 9 == 0:
                aborts -= 1
                alive = [name for name, number in names.items() if number not in done]
                for name in chance.sample(alive, min(2, len(alive))):
                    engine.abort_request([name])
                    send(names.pop(name), "+")
        return [done.get(number, []) for number in range(count)]

    def trial(self, options: dict[str, Any]) -> dict[str, Any]:
        """Undisturbed, then with reclaims; what differs."""
        seed, count, tokens = options.get("seed", 0), options.get("requests", 24), options.get("tokens", 60)
        scheduler = self.core.scheduler
        work = seed, count, tokens
        if work not in self.undisturbed:
            self.undisturbed[work] = self.generate(*work)
        expected = self.undisturbed[work]
        if "structured" in self.asks:
            assert all(map(has_form, expected)), "vLLM does not keep the form that was asked for"
        between = self.in_other_batches(work, expected) if options.get("is_compared") else {}
        hook = scheduler.__dict__.get("_valve")
        if "remove" in options:
            ABLATIONS[options["remove"]](hook)
        before = self.books(hook)
        useful_before = hook.progress.useful_tokens if hook is not None else 0
        self.injector.start(
            seed,
            every=options.get("every", 8),
            held=options.get("held", 5),
            most=options.get("most", 12),
            columns=options.get("take") == "columns",
            limit=options.get("events", 1_000_000),
            zeroes=options.get("zeroes", True),
            lost=options.get("lost", "garbage"),
        )
        began = time.monotonic()
        try:
            got = self.generate(seed, count, tokens, options.get("aborts", 0))
            crash = ""
        except Exception as error:
            got, crash = [[]] * count, repr(error)
        useful_tokens = hook.progress.useful_tokens - useful_before if hook is not None else 0
        cached = cached_without_memory(hook)
        self.injector.stop()
        if not crash and hook is not None:  # a step of nothing, so that the hook sees what came back
            self.generate(seed, 1, 8)
        after = self.books(hook)
        wrong = sum(not is_same(mine, theirs) for mine, theirs in zip(expected, got, strict=True))
        return {
            **options,
            "events": self.injector.events,
            "steps": self.injector.step,
            "wrong": wrong,
            **between,
            "seconds": round(time.monotonic() - began, 1),
            "crash": crash,
            "leak": cached or leaks(scheduler),
            **{name: after[name] - before[name] for name in after},
            "useful_tokens": useful_tokens,
            "prompt_tokens": sum(map(len, self.prompts(seed, count))),
        }

    def in_other_batches(self, work: tuple[int, int, int], expected: list[Any]) -> dict[str, int]:
        """How many answers differ where nothing disturbs, but the last request comes first, so in other batches."""
        got = self.generate(*work, is_reversed=True)
        return {"between": sum(not is_same(mine, theirs) for mine, theirs in zip(expected, got, strict=True))}

    def books(self, hook: Any) -> dict[str, int]:
        if hook is None or self.node._book is None:
            return {}
        book, names = self.node.book(), ("lost_blocks", "hit_requests", "lost_tokens", "dropped_tokens", "failures")
        return {name: book[name] for name in names}


def is_aborted(output: Any) -> bool:
    return isinstance(output.outputs, list) and output.outputs[0].finish_reason == "abort"


def answer_of(output: Any) -> Any:
    """Tokens of each sequence, or a vector; logprobs of the prompt where they were asked for."""
    if not isinstance(output.outputs, list):
        return output.outputs.data
    outputs = sorted(output.outputs, key=lambda each: each.index)
    tokens = [list(each.token_ids) for each in outputs]
    pairs = [(each.token_ids, each.logprobs) for each in outputs] + [(output.prompt_token_ids, output.prompt_logprobs)]
    logprobs = [value for given, rows in pairs if rows is not None for value in logprobs_of(given, rows)]
    return (tokens, logprobs) if logprobs else tokens


def logprobs_of(tokens: Any, rows: Any) -> list[float]:
    return [row[token].logprob for token, row in zip(tokens, rows, strict=False) if row is not None]


def is_same(mine: Any, theirs: Any) -> bool:
    """Tokens to the last one; vectors as closely as the shapes of two batches allow."""
    if isinstance(mine, list) or isinstance(theirs, list):
        return bool(mine == theirs)
    if isinstance(mine, tuple):
        pairs = zip(mine[1], theirs[1], strict=False)
        is_near = len(mine[1]) == len(theirs[1]) and all(abs(one - other) < 1e-3 for one, other in pairs)
        return bool(mine[0] == theirs[0]) and is_near
    import torch

    return mine.shape == theirs.shape and bool(torch.allclose(mine, theirs, atol=1e-3))


def has_form(tokens: Any) -> bool:
    """t1..., t2..., t3..., and again; a token's word is t and its number."""
    return all(str(token)[0] == "123"[at % 3] for at, token in enumerate(tokens[0]))


def leaks(scheduler: Any) -> str:
    """Nothing runs: every block but the null block is free, once, and the cache names no block that is not there."""
    pool = scheduler.kv_cache_manager.block_pool
    if scheduler.requests:
        return "requests are left"
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if sorted(free) != list(range(1, pool.num_gpu_blocks)) or pool.get_num_free_blocks() != len(free):
        return f"{len(free)} of {pool.num_gpu_blocks - 1} blocks are free"
    if any(block.ref_cnt for block in pool.blocks if not block.is_null):
        return "a free block has users"
    entries = pool.cached_block_hash_to_block._cache.items()
    named = [(key, each) for key, found in entries for each in (found.values() if isinstance(found, dict) else [found])]
    if any(block.block_hash != key for key, block in named):
        return "the prefix cache names a block that was forgotten"
    return ""


def cached_without_memory(hook: Any) -> str:
    """While blocks are withheld none of them may be found by a prompt."""
    if hook is None:
        return ""
    cached = [block for block in hook.engine.withheld if hook.engine.pool.blocks[block].block_hash is not None]
    return f"the prefix cache holds {len(cached)} blocks without memory" if cached else ""


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    campaign = Campaign(model, folder, plan)
    campaign.generate(0, 2, 4)  # the hook attaches at the first step
    hook = campaign.core.scheduler.__dict__.get("_valve")
    handling = plan.get("handling", "full")
    assert hook is not None, "the hook did not attach"
    if handling == "stock":  # the plugin's own free queue off, everything else on
        queue = hook.engine.pool.free_block_queue
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        hook.engine.pool.free_block_queue = FreeKVCacheBlockQueue(
            sorted(queue.get_all_free_blocks(), key=lambda block: block.block_id)
        )
    elif handling in ABLATIONS:
        ABLATIONS[handling](hook)
    for options in plan["trials"]:
        print(
            json.dumps({"handling": handling, "async": bool(plan.get("async")), **campaign.trial(options)}), flush=True
        )


if __name__ == "__main__":
    main()
