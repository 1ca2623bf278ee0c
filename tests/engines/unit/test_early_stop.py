"""The first open request stops offline work while the engine still plans its first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kv_node import KvNode, wait_for
from toy_world import close, hooked
from valve_hook.link import Link
from valve_hook.tensorrt_llm import calls as tensorrt_calls
from valve_hook.vllm.progress import Progress


def seen_by(scheduler, name, node):
    """What valved was told by the time at which the engine begins to choose a step."""
    seen = []
    choose = getattr(scheduler, name)

    def look_and_choose(*arguments):
        seen.append((node.region()["open"], node.rings()))
        return choose(*arguments)

    setattr(scheduler, name, look_and_choose)
    return seen


def idle(scheduler):
    while scheduler.in_flight or scheduler.finished_req_ids:
        if scheduler.in_flight:
            scheduler.believe()
        else:
            scheduler.launch()


@pytest.fixture
def toy(node):
    scheduler = hooked(node)
    yield scheduler
    close(scheduler)


def test_a_first_request_of_vllm_is_never_planned_beside_offline_work(node, toy):
    seen = seen_by(toy, "_schedule_running", node)

    toy.add("a", range(4), 2)
    toy.launch()

    assert seen == [(1, 1)]


def test_a_request_beside_others_never_rings_and_the_first_after_an_idle_time_always_does(node, toy):
    seen = seen_by(toy, "_schedule_running", node)
    toy.add("a", range(4), 3)
    toy.launch()
    toy.add("b", range(20, 24), 1)
    toy.launch()
    while toy.requests:
        toy.believe() if toy.in_flight else toy.launch()
    idle(toy)
    assert [rings for _, rings in seen] == [1, *[0] * (len(seen) - 1)]
    assert node.region()["open"] == 0

    toy.add("c", range(40, 44), 1)
    toy.launch()

    assert seen[-1] == (1, 1)


def test_an_engine_whose_memory_is_left_alone_never_plans_beside_offline_work_either(node, link):
    wait_for(lambda: node.hellos and link.lifecycle.page is not None, "connected")
    progress = Progress(SimpleNamespace(requests={"a": SimpleNamespace(num_prompt_tokens=4)}), link)

    progress.before_schedule()

    assert (node.region()["open"], node.rings()) == (1, 1)


def test_the_stop_is_never_measured_from_later_than_the_ring(node, link):
    wait_for(lambda: node.hellos and link.lifecycle.page is not None, "connected")

    link.lifecycle.tell(1, 0, 0)

    assert 0 < node.launch_ns() <= node.region()["hint_ns"]


def test_a_first_request_of_sglang_is_never_chosen_beside_offline_work(world):
    scheduler, node = world()
    scheduler.turn()
    seen = seen_by(scheduler, "prefill", node)

    scheduler.add("a", range(4), 2)
    scheduler.turn()

    assert seen == [(1, 1)]


def test_a_request_of_sglang_that_lacks_memory_never_asks_beside_offline_work(world, monkeypatch):
    """What it asks for is taken from work that stands by then."""
    scheduler, node = world(pages=60)
    node.take_columns(list(range(1, 10)))
    scheduler.turn()
    told, ask = [], Link.need

    def need(link, wanted_blocks):
        told.append((node.region()["open"], node.rings()))
        ask(link, wanted_blocks)

    monkeypatch.setattr(Link, "need", need)
    scheduler.add("a", range(40), 2)
    scheduler.turn()

    assert told[:1] == [(1, 1)]


def test_a_first_request_of_tensorrt_llm_is_never_scheduled_beside_offline_work(node, link):
    wait_for(lambda: node.hellos and link.lifecycle.page is not None, "connected")
    executor = SimpleNamespace(active_requests=[SimpleNamespace()], request_queue=SimpleNamespace(qsize=lambda: 0))
    executor = type("Executor", (), vars(executor))()

    tensorrt_calls.Counter(executor, link).write()

    assert (node.region()["open"], node.rings()) == (1, 1)


def test_a_new_valved_is_rung_for_what_is_open_by_then(tmp_path):
    """It may have begun beside offline work that runs."""
    node = KvNode(tmp_path)
    link = Link(build="test", path=node.path, retry_s=0.02)
    link.lifecycle.tell(2, 0, 0)
    link.start()

    wait_for(lambda: node.hellos and link.lifecycle.page is not None, "connected")

    assert (node.region()["open"], node.rings()) == (2, 1)
    link.close()
    node.stop()
