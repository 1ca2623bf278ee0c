"""Useful tokens: each counted once, whatever the engine makes: generated text, embeddings, or nothing lendable."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from valve_hook.vllm.progress import Progress


class Page:
    def __init__(self):
        self.written = []

    def write(self, *numbers):
        self.written.append(numbers)


@pytest.fixture
def page():
    return Page()


@pytest.fixture
def progress(page):
    requests = {name: SimpleNamespace(num_prompt_tokens=tokens) for name, tokens in (("a", 7), ("b", 30), ("c", 500))}
    return Progress(SimpleNamespace(requests=requests), SimpleNamespace(region=page))


def step(*names, drafts=None):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_spec_decode_tokens=drafts or {}, finished_req_ids=set()
    )


def result(names, sampled=(), pooled=None):
    return SimpleNamespace(
        sampled_token_ids=list(sampled),
        pooler_output=pooled,
        req_id_to_index={name: place for place, name in enumerate(names)},
    )


def test_generated_tokens_count_when_they_are_believed(progress):
    progress.before_update(step("a", "b", "c"), result("abc", [[5], [], [6]]))
    progress.before_update(step("a", "b", drafts={"a": [1, 2]}), result("ab", [[5, 6, 7], [8]]))

    assert progress.useful_tokens == 6


def test_output_that_is_dropped_does_not_count(progress):
    assert progress.count(step("a", "b"), result("ab", [[5], [6]]), ["b"]) == 1
    assert progress.useful_tokens == 1


def test_the_token_of_a_request_that_ended_while_one_more_step_of_it_was_in_flight_does_not_count(progress):
    """Async: it stops by a token, and the next step is under way already. The name may be used again later."""
    told = step()
    told.finished_req_ids = {"gone"}
    progress.after_schedule(told)
    late = step("a", "gone"), result(["a", "gone"], [[5], [6]])
    again = step("gone"), result(["gone"], [[7]])

    assert progress.count(*late) == 0
    assert progress.useful_tokens == 1

    progress.before_update(told, result([]))
    progress.before_update(*again)

    assert progress.useful_tokens == 2


def test_an_embedding_counts_its_prompt_once_when_it_is_there(progress):
    """A prompt in chunks gives no output before its last one."""
    progress.before_update(step("a", "c"), result("ac", pooled=["vector", None]))
    assert progress.useful_tokens == 7
    progress.before_update(step("c"), result("c", pooled=["vector"]))

    assert progress.useful_tokens == 507


def test_an_embedding_that_is_dropped_or_was_aborted_does_not_count(progress):
    progress.count(step("a", "b", "gone"), result(["a", "b", "gone"], pooled=["v", "v", "v"]), ["b"])

    assert progress.useful_tokens == 7


def test_open_requests_are_told_without_any_memory(progress, page):
    ended = step("a")
    ended.finished_req_ids = {"x", "y"}
    progress.after_schedule(ended)

    assert page.written == [(3, 2, 0)]
