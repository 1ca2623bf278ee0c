"""Useful tokens: each counted once, whatever the engine makes: generated text, embeddings, or nothing lendable."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from valve_hook.shared import Lifecycle
from valve_hook.vllm.progress import MOST_ROWS, Progress


class Page:
    def __init__(self):
        self.written = []

    def write(self, *numbers):
        self.written.append(numbers)

    def write_tokens(self, tokens):
        self.tokens = tokens


@pytest.fixture
def page():
    return Page()


@pytest.fixture
def lifecycle(page):
    lifecycle = Lifecycle()
    lifecycle.begin(page)
    return lifecycle


@pytest.fixture
def progress(lifecycle):
    requests = {name: SimpleNamespace(num_prompt_tokens=tokens) for name, tokens in (("a", 7), ("b", 30), ("c", 500))}
    return Progress(SimpleNamespace(requests=requests), SimpleNamespace(lifecycle=lifecycle))


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


def test_the_prompt_of_a_request_that_ended_never_counts_although_a_step_of_it_gives_no_token(progress):
    told = step()
    told.finished_req_ids = {"gone"}
    progress.after_schedule(told)

    assert progress.row(step("gone"), result(["gone"])) == ([], [])
    assert progress.useful_tokens == 0


def test_an_embedding_counts_its_prompt_once_when_it_is_there(progress):
    """A prompt in chunks gives no output before its last one."""
    progress.before_update(step("a", "c"), result("ac", pooled=["vector", None]))
    assert progress.useful_tokens == 7
    progress.before_update(step("c"), result("c", pooled=["vector"]))

    assert progress.useful_tokens == 507


def test_an_embedding_that_is_dropped_or_was_aborted_does_not_count(progress):
    progress.count(step("a", "b", "gone"), result(["a", "b", "gone"], pooled=["v", "v", "v"]), ["b"])

    assert progress.useful_tokens == 7


def test_tokens_are_never_counted_twice_by_two_threads(progress):
    """The link's thread counts what the engine's thread leaves to it."""
    seen = []
    reader = threading.Thread(target=lambda: seen.extend(progress.useful_tokens for _ in range(2000)))
    reader.start()
    for _ in range(1000):
        progress.before_update(step("a", "b"), result("ab", [[5], []]))
    reader.join()

    assert progress.useful_tokens == 1000
    assert seen == sorted(seen)


def test_steps_never_pile_up_where_no_thread_counts_them(progress):
    for _ in range(3 * MOST_ROWS):
        progress.before_update(step("a"), result("a", [[5]]))

    assert len(progress.rows) < MOST_ROWS
    assert progress.useful_tokens == 3 * MOST_ROWS


def test_a_new_connection_is_never_left_without_what_is_open(progress, page, lifecycle):
    progress.after_schedule(step("a"))
    lifecycle.begin(fresh := Page())
    progress.tell_tokens()

    assert page.written == fresh.written == [(3, 0, 0)]


def test_what_was_told_before_there_was_a_connection_is_never_lost(progress, page):
    progress._link.lifecycle = late = Lifecycle()
    progress.after_schedule(step("a"))
    late.begin(page)
    progress.tell_tokens()

    assert page.written == [(3, 0, 0)]


def test_open_requests_are_told_without_any_memory(progress, page):
    ended = step("a")
    ended.finished_req_ids = {"x", "y"}
    progress.after_schedule(ended)

    assert page.written == [(3, 2, 0)]
