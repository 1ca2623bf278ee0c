"""SGLang beside memory that is taken: what it asks for is what it needs beyond free and cached, and no prompt whose
memory went ends the engine.
"""

from __future__ import annotations

import pytest
from kv_node import wait_for
from sglang_world import finish, give, lose, request_of, run, undisturbed
from toy_sglang import ending
from valve_hook.sglang import free_pages

both = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


def full_of_cached(world, *, overlap=True, pages=30):
    """60 pages, of which the first few have memory, and all that can be is cached for nobody."""
    scheduler, node = world(pages=60, overlap=overlap)
    lose(node, scheduler, list(range(pages, 60)))
    scheduler.turn()
    for number in range(4):
        run(scheduler, [(f"cached{number}", list(range(100 * number, 100 * number + 25)), 4)])
    return scheduler, node


@both
def test_a_prompt_never_asks_for_memory_that_the_cache_makes(world, overlap):
    """Offline work would be stopped for a request that begins at once."""
    scheduler, node = full_of_cached(world, overlap=overlap)
    assert scheduler.allocator.available_size() // 4 < 10
    scheduler.add("small", list(range(1000, 1040)), 12)
    scheduler._valve.reconciler.publish()
    assert node.book()["wanted"] <= 29
    finish(scheduler, ["small"])

    assert node.needs == []


def test_what_is_only_cached_is_never_told_as_in_use(world):
    """valved would take memory for a cache that makes room."""
    scheduler, node = full_of_cached(world)
    scheduler._valve.reconciler.publish()

    assert scheduler.tree.evictable_size() >= 4 * 24
    assert (node.book()["used"], node.book()["wanted"]) == (0, 0)


@both
def test_a_prompt_never_asks_for_what_somebody_who_runs_holds_already(world, overlap):
    """40 of its tokens are those of a request that runs; the rest finds memory."""
    scheduler, node = world(pages=60, overlap=overlap, chunk=80)
    lose(node, scheduler, list(range(20, 60)))
    scheduler.add("runs", list(range(40)), 24)
    for _ in range(3):
        scheduler.turn()
    scheduler.add("waits", [*range(40), *range(500, 504)], 1)
    scheduler._valve.reconciler.publish()

    assert node.book()["wanted"] <= 20
    finish(scheduler, ["runs", "waits"])
    assert node.needs == []


def test_what_a_prompt_needs_beyond_free_and_cached_is_asked_for_to_the_page(world):
    """For 44 tokens that nobody has, both answers, a page and one token: SGLang wants more than is needed."""
    scheduler, node = world(pages=60, chunk=80)
    lose(node, scheduler, list(range(20, 60)))
    scheduler.add("runs", list(range(40)), 30)
    for _ in range(3):
        scheduler.turn()
    scheduler.add("waits", [*range(40), *range(500, 544)], 8)
    scheduler._valve.reconciler.publish()
    left = 30 - len(request_of(scheduler, "runs").output_ids)
    book = node.book()

    assert book["used"] == 11
    assert book["wanted"] == 11 + -(-(44 + left + 8 + 4 + 1) // 4) + 1


@both
def test_surplus_that_the_cache_keeps_never_keeps_an_engine_from_asking(world, overlap):
    """valved would have it back, and no column is free: 30 pages have memory, and a prompt needs more."""
    scheduler, node = full_of_cached(world, overlap=overlap)
    node.aim(4)
    work = ("waits", list(range(1000, 1140)), 4)
    scheduler.add(*work)
    scheduler.turn()
    wait_for(lambda: node.needs, "valved is asked")
    give(node, scheduler, list(range(30, 60)))

    assert finish(scheduler, ["waits"])["waits"] == undisturbed([work])["waits"]


def prompt_in_chunks(world, *, overlap, work=(), **knobs):
    """A prompt of 26 pages goes in three at a time, beside one that runs; it has begun."""
    scheduler, node = world(**{"pages": 60, "overlap": overlap, **knobs})
    scheduler.check_idle = lambda: None
    long = ("long", list(range(500, 604)), 4)
    for request in (*work, long):
        scheduler.add(*request)
    while scheduler.chunked_req is None or scheduler.chunked_req.kv.kv_allocated_len < 20:
        scheduler.turn()
    return scheduler, node, [*work, long]


@both
def test_a_prompt_whose_next_chunk_finds_no_memory_never_ends_the_engine(world, overlap):
    """The memory that is left would hold it, but others hold most of it. SGLang raises where a chunk finds none."""
    others = [(f"runs{number}", list(range(100 * number, 100 * number + 40)), 60) for number in range(2)]
    scheduler, node, work = prompt_in_chunks(world, overlap=overlap, work=others, chunk=48)
    lost = scheduler.allocator.free_pages.tolist()[1:]
    lose(node, scheduler, lost)
    assert 60 - len(lost) > 27
    for _ in range(30):
        scheduler.turn()
    give(node, scheduler, lost)

    assert finish(scheduler, [name for name, _, _ in work]) == undisturbed(work)


@both
def test_memory_that_a_prompt_in_chunks_still_needs_is_never_offered(world, monkeypatch, overlap):
    """valved would have 40 pages back; it gets what the prompt leaves, and the prompt is never sent back."""
    monkeypatch.setattr(free_pages, "OFFER_EVERY", 1)
    scheduler, node, work = prompt_in_chunks(world, overlap=overlap)
    node.aim(20)
    engine, sent_back = scheduler._valve.engine, []
    engine.discard = lambda *_: sent_back.append(1)
    finish(scheduler, ["long"])
    assert scheduler.done == undisturbed(work)
    assert not sent_back
    for _ in range(40):
        scheduler.turn()

    assert node.offered()


@both
def test_a_full_queue_never_turns_away_whom_sglang_sends_back_for_want_of_taken_memory(world, overlap):
    scheduler, node = world(pages=20, overlap=overlap)
    lose(node, scheduler, [15, 16, 17, 18])
    scheduler.turn()
    work = [(name, range(start, start + 10), 30) for name, start in (("a", 0), ("b", 100), ("c", 200))]
    for request in work:
        scheduler.add(*request)
    scheduler.max_queued_requests = 0

    assert finish(scheduler, "abc") == undisturbed(work)
    assert scheduler.max_queued_requests == 0


def test_the_queues_limit_is_never_lifted_for_newcomers(world, monkeypatch):
    """Not even after a choice that failed."""
    scheduler, node = world(pages=20)
    lose(node, scheduler, [15, 16, 17, 18])
    scheduler.max_queued_requests = 7
    with monkeypatch.context() as patches:
        patches.setattr(scheduler, "prefill", lambda running: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.turn()
    scheduler.turn()

    assert scheduler.max_queued_requests == 7


# ---- clients that leave ----


def none_is_free(scheduler, name):
    """Until its next token needs a page."""
    request = request_of(scheduler, name)
    while request.kv.kv_allocated_len % 4 or not request.output_ids:
        scheduler.turn()


@both
def test_a_client_that_leaves_in_the_step_that_finds_no_memory_is_never_forgotten(world, overlap):
    """SGLang would abort the last request that runs, and writes that over the reason that stood there."""
    scheduler, node = world(pages=20, overlap=overlap)
    scheduler.add("a", list(range(10)), 40)
    for _ in range(4):
        scheduler.turn()
    held = scheduler.pages_of(request_of(scheduler, "a"))
    lose(node, scheduler, [page for page in range(1, 20) if page not in held])
    none_is_free(scheduler, "a")
    scheduler.abort("a")
    scheduler.turn()
    scheduler.turn()

    assert scheduler.done == {"a": "left"}
    assert not scheduler.waiting_queue


@both
def test_a_client_that_leaves_never_waits_for_the_memory_that_others_took_from_it(world, overlap):
    """Two run, and memory for one of them is left: whom SGLang sends back is ended, and the other one goes on."""
    scheduler, node = world(pages=20, overlap=overlap)
    for name, start in (("a", 0), ("b", 100)):
        scheduler.add(name, list(range(start, start + 10)), 12)
    for _ in range(4):
        scheduler.turn()
    held = {page for name in "ab" for page in scheduler.pages_of(request_of(scheduler, name))}
    lose(node, scheduler, [page for page in range(1, 20) if page not in held])
    none_is_free(scheduler, "b")
    scheduler.abort("b")
    done = finish(scheduler, "ab")

    assert done == {"b": "left", **undisturbed([("a", list(range(10)), 12)])}


@pytest.mark.parametrize("is_sure", [True, False], ids=["its own pages", "everybody's"])
@both
def test_a_client_that_leaves_in_the_step_of_a_loss_is_never_forgotten(world, overlap, is_sure):
    """Sent back with the others, it would wait for memory to end."""
    scheduler, node = world(overlap=overlap)
    scheduler._valve.reconciler.is_sure = is_sure
    for name, start in (("a", 0), ("b", 100)):
        scheduler.add(name, list(range(start, start + 10)), 20)
    for _ in range(5):
        scheduler.turn()
    scheduler.abort("a")
    lose(node, scheduler, scheduler.pages_of(request_of(scheduler, "a")))
    scheduler.turn()
    assert scheduler.done == {"a": "left"}
    assert "a" not in [each.rid for each in scheduler.waiting_queue]

    assert finish(scheduler, "ab")["b"] == undisturbed([("b", list(range(100, 110)), 20)])["b"]


@pytest.mark.parametrize("is_sure", [True, False], ids=["its own pages", "everybody's"])
@both
def test_a_client_that_leaves_while_its_prompt_goes_in_is_never_forgotten_for_a_loss(world, overlap, is_sure):
    """SGLang looks for it where its prompt went in, before the next chunk: it stands in the queue by then."""
    scheduler, node, _ = prompt_in_chunks(world, overlap=overlap)
    scheduler._valve.reconciler.is_sure = is_sure
    scheduler.abort("long")
    lose(node, scheduler, scheduler.pages_of(scheduler.chunked_req)[:1])
    for _ in range(3):
        scheduler.turn()

    assert scheduler.done == {"long": "left"}
    assert scheduler.is_idle


@both
def test_a_client_that_left_before_its_request_stands_aside_never_waits_for_memory(world, overlap):
    scheduler, node = world(pages=60, overlap=overlap)
    scheduler.check_idle = lambda: None
    lose(node, scheduler, list(range(20, 60)))
    scheduler.turn()
    scheduler.add("long", list(range(100)), 6)
    scheduler.turn()
    scheduler.waiting_queue[0].to_finish = ending("left")  # SGLang itself sent it back so
    scheduler.turn()

    assert scheduler.done == {"long": "left"}
    assert scheduler.is_idle
