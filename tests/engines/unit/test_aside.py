"""A request that the present memory cannot hold: it waits for itself, and stops nobody."""

from __future__ import annotations

import pytest
from faults import Fault
from kv_node import wait_for
from toy_world import close, hooked, run
from valve_hook.vllm.aside import Aside

FIT = [(f"short{number}", list(range(number, number + 12)), 6) for number in range(9)]
LONG = ("long", list(range(100)), 6)  # 25 blocks of 4 tokens, and two more for its answer


COLUMNS = 8


def shrunken(node, blocks=20):
    """64 blocks, of which the first few have memory."""
    scheduler = hooked(node, blocks=64, budget=200)
    node.take(list(range(blocks, 64)))
    return scheduler


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_one_request_that_does_not_fit_never_stops_the_others(node, depth):
    scheduler = shrunken(node)
    work = [LONG, *FIT]
    for name, prompt, tokens in work:
        scheduler.add(name, prompt, tokens)
    for _ in range(200):
        scheduler.launch()
        while len(scheduler.in_flight) >= depth:
            scheduler.believe()

    assert set(scheduler.done) == {name for name, _, _ in FIT}
    assert [request.request_id for request in scheduler.waiting] == ["long"]
    close(scheduler)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_it_goes_first_as_soon_as_it_fits_and_answers_as_undisturbed(node, depth):
    scheduler = shrunken(node)
    seen = []

    def between(step):
        seen.append(set(scheduler.done))
        if step == 5:
            node.give(list(range(20, 64)))

    done = run(
        scheduler, [LONG, *FIT, *((f"{name}+", prompt, 30) for name, prompt, _ in FIT)], depth=depth, between=between
    )
    order = list(done)

    assert order.index("long") < order.index("short8+")
    assert "long" not in seen[5]
    close(scheduler)
    alone = hooked(node, blocks=64, budget=200)
    assert run(alone, [LONG], depth=depth)["long"] == done["long"]
    close(alone)


def test_several_keep_their_order_and_their_place_between_steps(node):
    scheduler = shrunken(node)
    for number in range(3):
        scheduler.add(f"long{number}", list(range(number, number + 100)), 6)
    scheduler.add(*FIT[0])
    scheduler.launch()

    assert [request.request_id for request in scheduler.waiting] == ["long0", "long1", "long2"]
    assert [request.request_id for request in scheduler.running] == ["short0"]
    close(scheduler)


def test_a_request_that_stands_aside_can_be_aborted(node):
    scheduler = shrunken(node)
    scheduler.add(*LONG)
    scheduler.launch()
    scheduler.abort("long")
    scheduler.launch()

    assert not scheduler.requests
    close(scheduler)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_a_request_that_the_range_can_never_hold_does_not_wait_for_ever(node, depth, caplog):
    scheduler = shrunken(node)
    for name, prompt, tokens in [("huge", list(range(300)), 6), *FIT]:
        scheduler.add(name, prompt, tokens)
    for _ in range(60):
        scheduler.launch()
        while len(scheduler.in_flight) >= depth:
            scheduler.believe()

    assert scheduler.failed == {"huge"}
    assert set(scheduler.done) == {name for name, _, _ in FIT}
    assert [line for line in caplog.messages if "request huge ends with an error: it needs 75 KV blocks" in line]
    close(scheduler)


def test_valved_is_told_what_stands_aside(node):
    """It is wanted, so that memory comes for it."""
    scheduler = shrunken(node)
    scheduler.add(*LONG)
    scheduler.launch()

    assert node.book()["wanted"] >= 25
    close(scheduler)


@pytest.mark.parametrize("name", ["before_schedule", "after_schedule"])
def test_a_request_that_stands_aside_is_never_lost_when_that_fails(node, monkeypatch, name):
    """It was taken out of the queue, and then the hook fails once."""
    scheduler = shrunken(node)
    fault = Fault(is_late=name == "before_schedule", is_lasting=False)
    fault.put(monkeypatch, Aside, name)
    for request in (LONG, FIT[0]):
        scheduler.add(*request)
    fault.is_armed = True
    for _ in range(20):
        scheduler.launch()
        scheduler.believe()

    assert fault.raised == 1
    assert [request.request_id for request in scheduler.waiting] == ["long"]
    assert set(scheduler.done) == {FIT[0][0]}
    close(scheduler)


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "online"])
def test_one_that_grows_by_one_block_beyond_the_memory_never_waits_unheard(node, is_offline):
    """One block of those that have memory is handed out to nobody: 20 blocks hold 19, and it needs 20."""
    node.first_backed = 20
    scheduler = hooked(node, blocks=64, is_offline=is_offline)
    scheduler.add("grows", list(range(30)), 60)
    scheduler.launch()
    while scheduler.running:
        scheduler.believe()
        scheduler.launch()

    assert node.book()["wanted"] == 21
    wait_for(lambda: node.needs, "valved is asked")
    close(scheduler)


def test_a_smaller_need_after_one_that_went_away_never_waits_for_valveds_own_look(node):
    node.first_backed = 20
    scheduler = hooked(node, blocks=64)
    scheduler.add(*LONG)
    scheduler.launch()
    wait_for(lambda: len(node.needs) == 1, "valved is asked")
    scheduler.abort("long")
    scheduler.launch()
    scheduler.add("shorter", list(range(84)), 6)
    scheduler.launch()

    wait_for(lambda: len(node.needs) == 2, "valved is asked again")
    close(scheduler)


def test_what_vllm_keeps_free_beside_those_that_run_is_never_left_out_of_a_need(node):
    """--watermark: 19 blocks hold what runs and what waits, but vLLM lets it begin only if 5 more are free."""
    node.first_backed = 20
    scheduler = hooked(node, blocks=64, max_seqs=1)
    scheduler.kv_cache_manager.watermark_blocks = 5
    scheduler.add("runs", list(range(30)), 9)
    scheduler.launch()
    scheduler.add("waits", list(range(100, 132)), 9)
    scheduler.launch()

    assert node.book()["used"] + 8 < 20 < node.book()["wanted"]
    wait_for(lambda: node.needs, "valved is asked")
    close(scheduler)
