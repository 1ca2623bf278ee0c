"""Where a vLLM's engine core pauses: on a core made of its two step functions, a scheduler and an input queue."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from grant_valved import GAP_MS, TPOT_MS, Valved, stop_time
from valve_abi import GrantAnswer
from valve_hook.policy.granting import GrantSettings
from valve_hook.policy.misses import MissSettings
from valve_hook.vllm import pauses

HASTY = GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=MissSettings(trial=0))
PARALLEL = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "distributed_executor_backend": "uni"}


class Scheduler:
    """Each request gets a token a step; what vLLM's own is asked by the hook."""

    max_num_running_reqs = 16

    def __init__(self):
        self.requests, self.running, self.waiting = {}, [], []
        pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 95)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.schedules = 0

    def add(self, name, tokens):
        self.requests[name] = SimpleNamespace(
            request_id=name, num_prompt_tokens=5, arrival_time=time.time() - 1, sampling_params=None, left=tokens
        )  # it has waited: ending a grant is a small part of its time to the first token
        self.waiting.append(self.requests[name])

    def has_requests(self):
        return bool(self.requests)

    def schedule(self):
        begun_ns = time.monotonic_ns()
        self.schedules += 1
        new, self.waiting = self.waiting, []
        self.running += new
        counts = {each.request_id: 5 if each in new else 1 for each in self.running}
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=each.request_id) for each in new],
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(),
        )  # fmt: skip
        pauses.scheduled(self, output, begun_ns)
        return output

    def update_from_output(self, output):
        rows = []
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None:
                continue
            request.left -= 1
            rows.append(SimpleNamespace(
                request_id=name, new_token_ids=[7], finish_reason="length" if request.left <= 0 else None
            ))  # fmt: skip
            if request.left <= 0:
                del self.requests[name]
                self.running.remove(request)
        outputs = {0: SimpleNamespace(outputs=rows)}
        pauses.delivered(self, output, outputs)
        return outputs


class Core:
    """vLLM's two loops, without a model."""

    def __init__(self, *, is_async, **config):
        self.scheduler, self.is_async = Scheduler(), is_async
        self.batch_queue = deque(maxlen=2) if is_async else None
        self.input_queue = queue.Queue()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**{**PARALLEL, **config}))

    def step(self):
        if not self.scheduler.has_requests():
            return {}, False
        output = self.scheduler.schedule()
        time.sleep(0.001)
        return self.scheduler.update_from_output(output), True

    def step_with_batch_queue(self):
        if self.scheduler.has_requests():
            self.batch_queue.appendleft(self.scheduler.schedule())
            if len(self.batch_queue) < 2:
                return None, True
        elif not self.batch_queue:
            return None, False
        time.sleep(0.001)
        return self.scheduler.update_from_output(self.batch_queue.pop()), True


class Played:
    """A core with the hook's steps, and a valved that gives what it is asked for."""

    def __init__(self, valved, *, is_async, answer=GrantAnswer.GIVEN, **config):
        self.valved, self.core, self.answer = valved, Core(is_async=is_async, **config), answer
        link = lambda: valved  # noqa: E731
        whole = Core.step_with_batch_queue if is_async else Core.step
        self.step_once = pauses.around(whole, link)
        self.hook = pauses.pauses_of(self.core, link)
        self.hook.asking._settings = HASTY
        self.flown = []  # at each request for a pause: what was in flight
        self.hook.wait = self.wait
        self.interrupts = lambda seconds: False

    def wait(self, seconds):
        if not self.flown or self.flown[-1][0] != self.valved.seq:
            self.flown.append((self.valved.seq, len(self.core.batch_queue or ())))
            self.valved.answer(self.answer)
        if self.interrupts(seconds):
            return True
        time.sleep(seconds)
        return False

    def run(self, steps=60):
        for _ in range(steps):
            self.step_once(self.core)

    def run_until(self, is_so):
        while not is_so() and self.core.scheduler.has_requests():
            self.step_once(self.core)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def played(request, monkeypatch):
    stop_time(monkeypatch)  # a step that takes long leaves no time for a pause
    valved = Valved()
    yield Played(valved, is_async=request.param)
    valved.close()


def test_pauses_are_asked_for_with_nothing_in_flight(played):
    played.core.scheduler.add("a", 1_000)
    played.run_until(lambda: played.hook.asking.sums.given > 3)

    assert played.hook.asking.sums.given > 3
    assert {flying for _, flying in played.flown} == {0}


def test_every_token_is_delivered_and_each_step_scheduled_once(played):
    played.core.scheduler.add("a", 40)
    played.core.scheduler.add("b", 25)
    played.run(200)

    assert played.core.scheduler.requests == {}
    assert played.core.scheduler.has_requests() is False  # the method is the scheduler's own again
    assert "has_requests" not in vars(played.core.scheduler)
    assert played.hook.asking.readers == 0


def test_an_engine_without_consent_takes_its_steps_untouched(played):
    played.valved.consent(TPOT_MS, GAP_MS, consented=0)
    played.core.scheduler.add("a", 30)
    played.run()

    assert played.flown == []
    assert played.hook.asking.policy is None
    begun_ns, ended_ns = played.valved.step
    assert 0 < begun_ns < ended_ns  # valved says from it what a consent would be worth


def test_nothing_is_asked_while_a_request_waits_or_is_at_its_prompt(played):
    played.core.scheduler.add("a", 1_000)
    played.run(20)
    asked = len(played.flown)
    for number in range(20):
        played.core.scheduler.add(f"new{number}", 1_000)
        played.core.scheduler.waiting, kept = [], played.core.scheduler.waiting
        played.hook._look()
        played.core.scheduler.waiting = kept
        played.hook._look()
        assert played.hook.facts.waiting == 1
        assert played.hook._before() is False
        played.core.scheduler.waiting, played.core.scheduler.requests = (
            [],
            dict(list(played.core.scheduler.requests.items())[:1]),
        )
    assert len(played.flown) == asked


def test_a_request_that_comes_in_a_pause_ends_it(played):
    """The core's own queue is waited on: nobody polls it."""
    del played.hook.wait
    came = threading.Timer(0.05, played.core.input_queue.put, args=[("add", None)])
    came.start()
    begun = time.monotonic()
    assert played.hook.wait(100.0)
    assert time.monotonic() - begun < 50.0
    assert played.hook.wait(100.0)  # it is still there
    came.join()


def test_no_grant_stays_open_behind_a_request_that_came_in_it(played):
    played.interrupts = lambda seconds: len(played.flown) > 3
    played.core.scheduler.add("a", 1_000)
    played.run()

    assert len(played.flown) > 3
    assert played.valved.until_ns == 0


@pytest.mark.parametrize("config", [{"pipeline_parallel_size": 2}, {"data_parallel_size": 2}, {"nnodes": 2}])
def test_an_engine_in_more_than_one_place_never_asks(played, config):
    other = Played(played.valved, is_async=True, **config)
    other.core.scheduler.add("a", 100)
    other.run()

    assert other.hook.asking.refused
    assert other.flown == []


def test_a_reader_that_is_at_its_prompt_again_is_never_credited_with_a_token(played):
    """It was preempted: its chunks are scheduled, and no row of the output is its."""
    for name in "abc":
        played.core.scheduler.add(name, 1_000)
    played.run(5)
    followed, counts = played.hook.asking._followed, {"a": 1, "b": 512, "c": 1}
    assert set(followed.readers) == set(counts)
    before, told = followed.context, {}
    played.hook.asking.policy.delivered = lambda now_ms, skipped, extra: told.update(skipped=skipped, extra=extra)
    rows = [SimpleNamespace(request_id=name, new_token_ids=[7], finish_reason=None) for name in "ac"]

    played.hook.delivered(
        SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=514, finished_req_ids=set()),
        {0: SimpleNamespace(outputs=rows)},
    )

    assert told == {"skipped": [followed.readers["b"].number], "extra": {}}
    assert followed.context == before + 2


def test_a_hook_that_fails_never_stops_the_engine(played):
    played.core.scheduler.add("a", 30)
    played.core.scheduler.kv_cache_manager = None
    played.run()

    assert played.core.scheduler.requests == {}
    assert played.hook.asking.refused
    assert played.flown == []
