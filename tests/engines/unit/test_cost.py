"""What the hook adds to a step of 1,024 requests and what an event of 1,000 blocks takes, in Python instructions.

They are the same on every machine. `valve bench hook` measures times.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from instructions import instructions_of
from kv_node import KvNode, wait_for
from toy_engine import ToyScheduler
from toy_tensor import tensor
from toy_world import close, hooked
from valve_hook.ledger import Ledger
from valve_hook.reconciler import Reconciler
from valve_hook.sglang.steps import Launched, StepLedger
from valve_hook.shared import Book
from valve_hook.vllm import calls
from valve_hook.vllm.engine import VllmEngine
from valve_tools.bench.hook import measure

REQUESTS, BLOCKS_EACH, BLOCK_TOKENS = 1024, 200, 16


@pytest.fixture
def world(tmp_path):
    node = KvNode(tmp_path, columns=2000)
    blocks = REQUESTS * (BLOCKS_EACH + 4)
    scheduler = hooked(node, blocks=blocks, block_size=BLOCK_TOKENS, max_seqs=REQUESTS)
    scheduler.max_model_len = 4096
    hook = scheduler._valve
    names = [f"request-{number}" for number in range(REQUESTS)]
    for name in names:
        table = scheduler.pool.get_new_blocks(BLOCKS_EACH)
        scheduler.req_to_blocks[name] = table
        request = SimpleNamespace(request_id=name, num_computed_tokens=BLOCKS_EACH * 16, num_stale_output_tokens=0)
        scheduler.requests[name] = request
        hook.ledger.note((), (), [(name, table)])
    yield node, scheduler, names
    close(scheduler)
    node.stop()


def step(scheduler: ToyScheduler, names) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A decode step; where there are blocks left, one request in sixteen takes one."""
    grown = [None] * len(names)
    if scheduler.pool.get_num_free_blocks() >= 64:
        for number in range(0, len(names), 16):
            if names[number] in scheduler.req_to_blocks:
                fresh = scheduler.pool.get_new_blocks(1)
                scheduler.req_to_blocks[names[number]] += fresh
                grown[number] = ([fresh[0].block_id],)
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, resumed_req_ids=set(), new_block_ids=grown, num_computed_tokens=[3200] * len(names)
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        finished_req_ids=set(),
        preempted_req_ids=None,
        kv_cache_block_copies=None,
        scheduled_spec_decode_tokens={},
    )
    return output, SimpleNamespace(sampled_token_ids=[[7]] * len(names), req_id_to_index={}, pooler_output=None)


def test_a_step_never_looks_at_each_of_its_requests(world):
    _, scheduler, names = world
    hook = scheduler._valve
    hook.before_schedule()
    took = []
    for _ in range(60):
        output, result = step(scheduler, names)

        def calls(output=output, result=result):
            hook.before_schedule()
            hook.after_schedule(output)
            hook.before_update(output, result)

        took.append(instructions_of(calls))

    assert max(took) < REQUESTS


def test_a_step_in_which_nothing_happened_never_asks_the_table_or_the_ledger(world, monkeypatch):
    _, scheduler, names = world
    hook = scheduler._valve
    calls.before_schedule(scheduler)

    def asked(*_):
        assert threading.current_thread() is not threading.main_thread(), "asked by the engine's thread"
        return False

    for owner, name in ((Reconciler, "sync"), (Ledger, "tend"), (Ledger, "steps"), (VllmEngine, "record")):
        monkeypatch.setattr(owner, name, asked)
    for _ in range(3):
        output, result = step(scheduler, names)
        calls.before_schedule(scheduler)
        calls.after_schedule(scheduler, output)
        calls.before_update(scheduler, output, result)

    assert hook.reconciler.receipts.failures == 0
    assert hook.progress.useful_tokens == 3 * REQUESTS


def test_a_request_that_goes_or_comes_never_costs_a_look_at_the_steps_in_flight_nor_a_row(world, monkeypatch):
    """Who left, and from which step, is asked when something is lost; the rows are the link's thread's."""
    _, scheduler, names = world
    ledger = scheduler._valve.ledger
    output, _ = step(scheduler, names)
    ledger.launch(output)

    def asked(*_):
        assert threading.current_thread() is not threading.main_thread(), "asked by the engine's thread"

    for owner, name in ((Ledger, "_step"), (Ledger, "_catch_up"), (Book, "open_row"), (Book, "close_row")):
        monkeypatch.setattr(owner, name, asked)
    ledger.note({names[0]}, (), [("another", [])])
    monkeypatch.undo()
    while ledger.tend():
        pass

    assert [(launched, held.request) for launched, held in ledger.left] == [(ledger.believed + 1, names[0])]
    ledger.believe(output)
    ledger.tend()
    assert ledger.left == []


def test_the_bench_is_never_broken_where_there_is_no_vllm():
    result = measure(Path(sys.executable), is_real=False)

    assert len(result["decode"]["own_us"]) == 200


@pytest.mark.parametrize("change", ["loss", "target", "detached", "session"])
def test_a_quiet_step_never_misses_what_valved_wrote(world, change):
    node, scheduler, _ = world
    hook = scheduler._valve
    calls.before_schedule(scheduler)
    assert hook.is_quiet()
    if change == "loss":
        node.take([3])
    elif change == "target":
        node.aim(1)
    elif change == "detached":
        node.detach()
    else:
        before = hook.link.session
        node.stop()
        node.start()
        wait_for(lambda: hook.link.session is not before, "attached again")

    assert not hook.is_quiet()
    calls.before_schedule(scheduler)
    assert hook.is_quiet()


def test_a_look_that_failed_is_never_taken_for_a_quiet_one(world, monkeypatch):
    node, scheduler, _ = world
    hook = scheduler._valve
    calls.before_schedule(scheduler)
    node.take([3])
    monkeypatch.setattr(Reconciler, "_try", lambda *_: False)
    monkeypatch.setattr(VllmEngine, "abandon", lambda *_: 0)
    calls.before_schedule(scheduler)

    assert not hook.is_quiet()


def test_sglang_never_walks_the_page_table_for_whom_1000_lost_pages_hit():
    """From the page table, with two steps in flight and fifty requests whose rows have changed under them."""
    slots = tensor(range(BLOCK_TOKENS, BLOCK_TOKENS * (REQUESTS * BLOCKS_EACH + 1))).reshape(REQUESTS, -1)
    length, names = BLOCKS_EACH * BLOCK_TOKENS, [f"request-{number}" for number in range(REQUESTS)]
    kvs = [SimpleNamespace(kv_allocated_len=length, req_pool_idx=number) for number in range(REQUESTS)]
    requests = [SimpleNamespace(rid=name, kv=kv) for name, kv in zip(names, kvs, strict=True)]
    ledger = StepLedger(block_tokens=BLOCK_TOKENS, requests=lambda: requests, page_table=slots)
    for behind in (1, 0):
        lengths = np.full(REQUESTS, length - behind)
        ledger.begin_step(Launched(requests=requests, rows=np.arange(REQUESTS), lengths=lengths, starts=None))
    lost = np.arange(1, 1001, dtype=np.uint32)
    took = []
    for _ in range(6):
        for row in range(REQUESTS - 50, REQUESTS):
            ledger.keep(row)
        found = []
        took.append(instructions_of(lambda: found.append(ledger.judge(lost, REQUESTS * BLOCKS_EACH + 1))))  # noqa: B023
    (judgement,) = found

    assert judgement.running == dict.fromkeys(names[:5], 0)
    assert judgement.left == frozenset()
    assert max(took) < REQUESTS * BLOCKS_EACH  # pages


def test_an_event_of_1000_blocks_never_walks_all_the_others(world):
    """Two steps in flight; all affected requests are preempted by a stand-in, the rest is the hook's own work."""
    node, scheduler, names = world
    hook = scheduler._valve
    hook.before_schedule()

    def discard(running, left):
        for name in running:
            scheduler.pool.free_blocks(scheduler.req_to_blocks.pop(name, []))
        return dict.fromkeys(running, ())

    hook.engine.discard = discard
    took = []
    for attempt in range(6):
        for _ in range(2):
            hook.after_schedule(step(scheduler, names)[0])
        node.take(list(range(1 + attempt * 1000, 1001 + attempt * 1000)))
        took.append(instructions_of(hook.before_schedule))
        while hook.ledger.in_flight:
            hook.ledger.believe(hook.ledger.in_flight[0])

    assert hook.reconciler.receipts.hit_requests > 0
    # The first takes in what the link's thread had not noted yet. A loop over all blocks takes more for each.
    assert max(took[1:]) < 4 * REQUESTS * BLOCKS_EACH


class PriorityQueue:
    """As vLLM's: to walk it is to copy it."""

    def __init__(self, requests):
        self._heap = requests

    def __len__(self):
        return len(self._heap)

    def __iter__(self):
        raise AssertionError("the whole heap would be copied")


def test_a_long_priority_queue_is_never_copied_for_a_gauge(world):
    _, scheduler, _ = world
    scheduler.waiting = PriorityQueue([SimpleNamespace(num_tokens=16, request_id="1")] * 20_000)
    used, wanted, _, waiting = scheduler._valve.engine.gauges()

    assert (wanted - used, waiting) == (32, 20_000)


def test_the_need_of_a_waiting_request_is_never_that_of_another_one(world):
    """One follows another at the same place in memory, or comes back longer than it was."""
    _, scheduler, _ = world
    engine = scheduler._valve.engine
    one = SimpleNamespace(num_tokens=16, request_id="1")

    def need():
        used, wanted, _, _ = engine.gauges()
        return wanted - used

    scheduler.waiting = [one]
    small = need()
    scheduler.waiting = []
    assert need() == 0
    one.request_id, one.num_tokens = "2", 16 * 100
    scheduler.waiting = [one]
    assert need() == 100 * small
    one.num_tokens = 16 * 200
    assert need() == 200 * small


def test_with_surplus_and_no_free_column_a_step_never_looks_at_the_columns(world):
    node, scheduler, _ = world
    scheduler._valve.before_schedule()
    queue = scheduler.pool.free_block_queue
    node.aim(1)
    for column in list(queue.whole):
        queue.remove(next(iter(queue._fresh[column].values())))
    scheduler._valve.reconciler.sync()
    scheduler._valve.reconciler.publish()
    queue._sizes = None  # what a look at any of them would need
    scheduler._valve.reconciler.publish()
    queue._sizes = [64] * len(queue._fresh)

    assert queue.whole == set()
    assert node.offered() == []
