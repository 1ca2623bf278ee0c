"""SGLang: a request that the present memory cannot hold waits for itself, and stops nobody."""

from __future__ import annotations

import pytest
from kv_node import wait_for
from sglang_world import finish, give, lose, request_of, undisturbed

FIT = [(f"short{number}", list(range(number, number + 12)), 6) for number in range(9)]
LONG = ("long", list(range(100)), 6)  # 27 pages of 4 tokens with its answer and one to spare


def shrunken(world, *, overlap, pages=20, work=()):
    """60 pages, of which the first few have memory."""
    scheduler, node = world(pages=60, overlap=overlap)
    scheduler.check_idle = lambda: None
    lose(node, scheduler, list(range(pages, 60)))
    scheduler.turn()
    for request in work:
        scheduler.add(*request)
    return scheduler, node


both = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@both
def test_one_request_that_does_not_fit_never_stops_the_others(world, overlap):
    scheduler, _ = shrunken(world, overlap=overlap, work=[LONG, *FIT])
    for _ in range(150):
        scheduler.turn()

    assert set(scheduler.done) == {name for name, _, _ in FIT}
    assert [each.rid for each in scheduler.waiting_queue] == ["long"]
    assert scheduler._valve.reconciler.receipts.failures == 0


@both
def test_it_goes_first_as_soon_as_it_fits_and_answers_as_undisturbed(world, overlap):
    work = [LONG, *FIT, *((f"{name}+", prompt, 30) for name, prompt, _ in FIT)]
    scheduler, node = shrunken(world, overlap=overlap, work=work)
    for _ in range(6):
        scheduler.turn()
    assert "long" not in scheduler.done
    give(node, scheduler, list(range(20, 60)))
    done = finish(scheduler, [name for name, _, _ in work])

    assert done == undisturbed(work)
    assert list(done).index("long") < list(done).index("short8+")


@both
def test_several_keep_their_order_and_their_place_between_choices(world, overlap):
    longs = [(f"long{number}", list(range(number, number + 100)), 6) for number in range(3)]
    scheduler, _ = shrunken(world, overlap=overlap, work=[*longs, FIT[0]])
    scheduler.turn()

    assert [each.rid for each in scheduler.waiting_queue] == ["long0", "long1", "long2"]


@both
def test_where_any_place_may_become_the_first_nobody_behind_is_stopped_either(world, overlap):
    scheduler, _ = shrunken(world, overlap=overlap, work=[FIT[0], LONG, *FIT[1:]])
    scheduler.enable_priority_scheduling = True
    for _ in range(150):
        scheduler.turn()

    assert set(scheduler.done) == {name for name, _, _ in FIT}


@both
def test_one_that_has_begun_and_cannot_end_any_more_gives_way(world, overlap):
    """Its prompt goes in chunk by chunk; in the middle of it memory is taken that it does not use yet."""
    scheduler, node = world(pages=60, overlap=overlap)
    scheduler.check_idle = lambda: None
    for request in (LONG, *FIT):
        scheduler.add(*request)
    for _ in range(3):
        scheduler.turn()
    assert scheduler.chunked_req is not None
    held = set(scheduler.pages_of(request_of(scheduler, "long")))
    lost = [page for page in range(1, 60) if page not in held][-39:]
    lose(node, scheduler, lost)
    for _ in range(150):
        scheduler.turn()

    assert set(scheduler.done) == {name for name, _, _ in FIT}
    give(node, scheduler, lost)
    assert finish(scheduler, ["long"]) == undisturbed([LONG, *FIT])


@both
def test_what_stands_aside_is_never_lost_when_its_return_fails(world, monkeypatch, overlap):
    scheduler, node = shrunken(world, overlap=overlap, work=[LONG, *FIT])
    aside = scheduler._valve.aside
    with monkeypatch.context() as patches:
        patches.setattr(aside, "after_choose", lambda: 1 // 0)
        scheduler.turn()
    give(node, scheduler, list(range(20, 60)))

    assert finish(scheduler, ["long"])["long"] == undisturbed([LONG])["long"]


@both
def test_valved_is_told_what_stands_aside(world, overlap):
    """It is wanted, so that memory comes for it."""
    scheduler, node = shrunken(world, overlap=overlap, work=[LONG])
    scheduler.turn()

    assert node.book()["wanted"] >= 25


@both
def test_a_request_never_waits_for_room_for_its_answer_that_nobody_was_asked_for(world, overlap):
    """SGLang lets nobody begin without room for all of its answer. Its prompt fits, and more is not in use: what is
    wanted must be what it needs, or it waits for ever.
    """
    work = ("waits", list(range(8)), 200)
    scheduler, node = shrunken(world, overlap=overlap, pages=12, work=[work])
    scheduler.turn()
    scheduler.turn()
    assert not scheduler.running_batch.reqs
    give(node, scheduler, list(range(12, node.book()["wanted"] + 1)))

    assert finish(scheduler, ["waits"]) == undisturbed([work])


def test_what_is_wanted_never_leaves_out_the_answers_of_those_that_run(world):
    """SGLang sets apart what it expects of them before it lets another one begin."""
    scheduler, node = shrunken(world, overlap=True, pages=30, work=[("runs", list(range(8)), 80)])
    for _ in range(3):
        scheduler.turn()
    scheduler.add("waits", list(range(20, 28)), 40)
    scheduler._valve.reconciler.publish()
    left = 80 - len(request_of(scheduler, "runs").output_ids)

    assert node.book()["wanted"] * 4 >= 8 + left + 8 + 40


@both
def test_an_engine_whose_cache_makes_room_for_a_request_never_asks_for_memory(world, overlap):
    """Offline work would be stopped for a request that begins at once: what is cached is not in anybody's way."""
    scheduler, node = shrunken(world, overlap=overlap, pages=30)
    cached = [(f"cached{number}", list(range(100 * number, 100 * number + 20)), 3) for number in range(4)]
    for request in cached:
        scheduler.add(*request)
    finish(scheduler, [name for name, _, _ in cached])
    assert scheduler.allocator.available_size() // 4 < 2 + 10 < 29  # its prompt and its answer
    scheduler.add("small", list(range(1000, 1008)), 40)
    scheduler._valve.reconciler.publish()
    assert node.book()["wanted"] <= 29
    finish(scheduler, ["small"])

    assert node.needs == []


@both
def test_valved_is_asked_for_a_single_page_that_is_short(world, overlap):
    """14 pages have memory, which would do for an answer of 40 tokens."""
    work = ("waits", list(range(8)), 44)
    scheduler, node = shrunken(world, overlap=overlap, pages=15, work=[work])
    scheduler.turn()
    assert not scheduler.running_batch.reqs
    wait_for(lambda: node.needs, "valved is asked")

    assert node.needs == [16]


@both
def test_a_request_that_stands_aside_for_a_single_token_never_waits_unheard(world, overlap):
    """Prompt, answer and a page make one token less than 14 pages: SGLang would let it begin."""
    work = ("waits", list(range(8)), 43)
    scheduler, _ = shrunken(world, overlap=overlap, pages=15, work=[work])

    assert finish(scheduler, ["waits"], max_turns=200) == undisturbed([work])


def test_an_answer_that_goes_on_past_its_end_is_never_counted_as_one_that_may_end_early(world):
    """SGLang sets apart all of it, where it expects of others a share."""
    scheduler, node = shrunken(world, overlap=True, pages=30, work=[("runs", list(range(8)), 80)])
    for _ in range(3):
        scheduler.turn()
    scheduler.new_token_ratio_tracker.current = 0.25
    scheduler.add("waits", list(range(20, 28)), 100)
    left = 80 - len(request_of(scheduler, "runs").output_ids)
    scheduler._valve.reconciler.publish()
    may_end = node.book()["wanted"]
    request_of(scheduler, "runs").sampling_params.ignore_eos = True
    scheduler._valve.reconciler.publish()

    assert node.book()["wanted"] - may_end in (int(left * 0.75 / 4), int(left * 0.75 / 4) + 1)
    assert node.book()["wanted"] * 4 >= 8 + left + 8 + 100
