"""What a vLLM worker keeps of a request beside its tokens stands, when it begins again, as it stood when it began."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from valve_hook.vllm.resumed import KEPT, NotPutBack, Resumed


class Generator:
    """torch's, as far as it is used."""

    def __init__(self):
        self._random = random.Random()
        self.get_state, self.set_state, self.manual_seed = (
            self._random.getstate,
            self._random.setstate,
            self._random.seed,
        )

    def draw(self):
        return self._random.random()


class Runner:
    """vLLM's V1 runner: one token a step for each request."""

    def __init__(self):
        self.requests, self.num_prompt_logprobs = {}, {}
        self.input_batch = SimpleNamespace(generators={}, vocab_size=1024)
        self.resumed, self.may_lose = Resumed(self), True

    def add(self, name, seed=None, prompt_logprobs=None):
        generator = None
        if seed is not None:
            generator = self.input_batch.generators[len(self.requests)] = Generator()
            generator.manual_seed(seed)
        params = SimpleNamespace(seed=seed, prompt_logprobs=prompt_logprobs)
        self.requests[name] = SimpleNamespace(
            generator=generator, sampling_params=params, output_token_ids=[], in_progress_prompt_logprobs_cpu=None
        )

    def step(self, *names, resumed=(), generated=None, computed=0, finished=()):
        cached = SimpleNamespace(
            req_ids=names,
            resumed_req_ids=set(resumed),
            num_computed_tokens=[computed] * len(names),
            num_output_tokens=[generated] * len(names),
        )
        output = SimpleNamespace(scheduled_cached_reqs=cached, finished_req_ids=set(finished))
        self.resumed.before_step(output, may_lose=self.may_lose)

    def sample(self, name):
        request = self.requests[name]
        request.output_token_ids.append(request.generator.draw())


@pytest.fixture
def runner():
    return Runner()


def undisturbed(seed, count):
    generator = Generator()
    generator.manual_seed(seed)
    return [generator.draw() for _ in range(count)]


@pytest.mark.parametrize(("believed", "dropped"), [(0, 1), (0, 2), (1, 0), (1, 1), (3, 0), (3, 2), (9, 1)])
def test_a_seeded_request_never_draws_past_tokens_that_nobody_saw(runner, believed, dropped):
    runner.add("a", seed=7)
    for number in range(believed + dropped):
        runner.step(*(["a"] if number else []))  # its first step is not among those of known requests
        runner.sample("a")
    runner.step("a", resumed=["a"], generated=believed)
    runner.sample("a")
    runner.step("a")
    runner.sample("a")

    assert runner.requests["a"].output_token_ids == undisturbed(7, believed + 2)


def test_a_seeded_request_that_is_lost_twice_in_a_row_draws_the_same_again(runner):
    runner.add("a", seed=3)
    for number in range(4):
        runner.step(*(["a"] if number else []))
        runner.sample("a")
    for believed in (3, 2, 2):
        runner.step("a", resumed=["a"], generated=believed)
        runner.sample("a")

    assert runner.requests["a"].output_token_ids == undisturbed(3, 3)


def test_what_is_kept_of_generators_is_bounded_and_goes_with_its_request(runner):
    runner.add("a", seed=1)
    for _ in range(10 * KEPT):
        runner.sample("a")
        runner.step("a")

    assert len(runner.resumed._states["a"]) == KEPT
    runner.step(finished=["a"])
    assert runner.resumed._states == {}


@pytest.mark.parametrize(("wanted", "told"), [(0, 0), (3, 3), (-1, 1024)])
def test_logprobs_of_a_prompt_are_never_lost_with_the_step_that_finished_it(runner, wanted, told):
    runner.add("a", prompt_logprobs=wanted)
    runner.requests["a"].in_progress_prompt_logprobs_cpu = "rows of the step that was dropped"
    runner.step("a", resumed=["a"], generated=0)

    assert runner.num_prompt_logprobs == {"a": told}
    assert runner.requests["a"].in_progress_prompt_logprobs_cpu is None


def test_logprobs_of_a_prompt_are_never_told_twice(runner):
    """They came with the first token, which was believed."""
    runner.add("a", prompt_logprobs=2)
    runner.add("b")
    runner.step("a", "b", resumed=["a", "b"], generated=1)

    assert runner.num_prompt_logprobs == {}


def test_chunks_that_were_pooled_begin_again(runner):
    cleaned = []
    runner.add("a")
    runner.add("b")
    runner.requests["b"].pooling_states = SimpleNamespace(clean=lambda: cleaned.append("b"))
    runner.step("a", "b", resumed=["a", "b"], generated=0)

    assert cleaned == ["b"]


STRANGE = [SimpleNamespace(), SimpleNamespace(requests=["another kind"])]


def told(*resumed):
    cached = SimpleNamespace(
        req_ids=["a"], resumed_req_ids=set(resumed), num_computed_tokens=[0], num_output_tokens=[0]
    )
    return SimpleNamespace(scheduled_cached_reqs=cached, finished_req_ids=set())


@pytest.mark.parametrize("strange", STRANGE)
def test_a_runner_of_another_kind_goes_on_where_no_step_is_dropped(strange, caplog):
    resumed = Resumed(strange)
    for _ in range(3):
        resumed.before_step(told("a"), may_lose=False)

    assert len(caplog.records) <= 1


def test_a_runner_that_cannot_be_followed_never_computes_on_for_who_begins_again():
    """Once something was missed it is not known what was noted: a later step that raises nothing is no better."""
    runner = SimpleNamespace(requests=["another kind"])
    resumed = Resumed(runner)
    resumed.before_step(told(), may_lose=True)  # nobody begins again: nothing to put back
    with pytest.raises(NotPutBack):
        resumed.before_step(told("a"), may_lose=True)
    runner.requests = None
    with pytest.raises(NotPutBack):
        resumed.before_step(told("a"), may_lose=True)


def test_a_seeded_request_never_goes_on_where_the_state_it_had_is_not_kept_any_more(runner):
    runner.add("a", seed=5)
    for number in range(KEPT + 6):
        runner.step(*(["a"] if number else []))
        runner.sample("a")
    with pytest.raises(NotPutBack):
        runner.step("a", resumed=["a"], generated=2)
