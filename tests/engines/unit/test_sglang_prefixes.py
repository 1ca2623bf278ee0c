"""SGLang: the sound beginning of a request that was sent back is the last that its cache gives up, within a bound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang_world import finish, lose, request_of, undisturbed

PROMPTS = {name: list(range(start, start + 40)) for name, start in (("a", 100), ("b", 200), ("c", 300))}


def sent_back(world, *, pages=120, name="a"):
    """Of its ten pages of prompt it loses the eighth, and waits: nobody may run."""
    scheduler, node = world(pages=pages, chunk=40, overlap=False)
    scheduler.add(name, PROMPTS[name], 30)
    for _ in range(3):
        scheduler.turn()
    held = scheduler.pages_of(request_of(scheduler, name))
    scheduler.prefill = lambda running: None
    lose(node, scheduler, held[7:8])
    scheduler.turn()
    assert [each.rid for each in scheduler.waiting_queue] == [name]
    del scheduler.prefill
    return scheduler, held


def cache(scheduler, name):
    """As if another request had left this prompt."""
    tree, prompt = scheduler.tree, PROMPTS[name]
    tree.insert(prompt, scheduler.allocator.alloc(len(prompt) // scheduler.page))


def cached(scheduler, name):
    return len(scheduler.tree.path(PROMPTS[name]))


def evict(scheduler, pages):
    scheduler.tree.evict(SimpleNamespace(num_tokens=pages * scheduler.page))


def test_what_a_request_that_waits_had_computed_is_never_given_up_while_the_cache_has_anything_else(world):
    scheduler, _ = sent_back(world)
    cache(scheduler, "b")
    evict(scheduler, 8)

    assert (cached(scheduler, "a"), cached(scheduler, "b")) == (7, 2)
    evict(scheduler, 5)
    assert (cached(scheduler, "a"), cached(scheduler, "b")) == (4, 0)  # but it is no reason for anybody to wait
    done = finish(scheduler, ["a"])
    assert done == undisturbed([("a", PROMPTS["a"], 30)])


def test_what_is_kept_is_never_more_than_a_quarter_of_the_memory(world):
    """Of 23 pages five: who holds more keeps its first."""
    scheduler, _ = sent_back(world, pages=24)
    cache(scheduler, "b")
    evict(scheduler, 12)

    assert cached(scheduler, "b") == 0
    assert scheduler._valve.engine.prefixes._kept["a"][1] <= 23 * scheduler.page // 4
    assert cached(scheduler, "a") == 5


@pytest.mark.parametrize("newest", ["b", "c"])
def test_who_was_sent_back_first_is_dropped_first(world, newest):
    scheduler, _ = sent_back(world, pages=60)  # 58 pages with memory: 14 are kept, two times seven
    prefixes = scheduler._valve.engine.prefixes
    for name in {"b", "c"} - {newest}, {newest}:
        (name,) = name
        cache(scheduler, name)
        request = SimpleNamespace(
            rid=name, origin_input_ids=PROMPTS[name], output_ids=[], extra_key=None, cache_salt=None
        )
        scheduler.waiting_queue.append(request)
        prefixes.keep(request, 28)

    assert list(prefixes._kept) == [*({"b", "c"} - {newest}), newest]


def test_what_came_back_or_ended_is_never_kept_on(world):
    scheduler, _ = sent_back(world)
    finish(scheduler, ["a"])
    evict(scheduler, 1)

    assert scheduler._valve.engine.prefixes._kept == {}


def test_a_cache_that_cannot_be_asked_never_stops_the_engine(world, monkeypatch):
    scheduler, _ = sent_back(world)
    monkeypatch.setattr(scheduler.tree, "touch_prefix", lambda key: 1 // 0)
    evict(scheduler, 1)

    assert scheduler._valve.engine.prefixes._kept == {}
    assert finish(scheduler, ["a"]) == undisturbed([("a", PROMPTS["a"], 30)])
