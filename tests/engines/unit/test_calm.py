"""A step in which nothing happens is told in a few stores: never less than the long way, never when something does."""

from __future__ import annotations

import pytest
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook.ledger import MOST_WAITING
from valve_hook.reconciler import STEPS_ROUND, Reconciler
from valve_hook.vllm import calls
from valve_hook.vllm.progress import Progress
from valve_hook.wire import Mode


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """So a table is waited for, however slow the machine is."""
    monkeypatch.setenv("VALVE_ROLE", "offline")


@pytest.fixture
def calm(node):
    """Three requests that decode, after a step that left nothing to do."""
    scheduler = hooked(node, blocks=60)
    for number in range(3):
        scheduler.add(f"r{number}", range(6), 60)
    for _ in range(3):
        scheduler.launch()
        scheduler.believe()
    assert scheduler._valve.calm is not None
    yield scheduler
    close(scheduler)


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "online"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_calm_step_never_tells_less_than_the_long_way(node, depth, is_offline):
    """Requests come, wait and end, memory is taken and given: after each step the book says what the engine says."""
    scheduler = hooked(node, is_offline=is_offline, blocks=60)
    hook, reclaimer = scheduler._valve, Reclaimer(node, scheduler, 5, every=9)
    told, was_calm = [], set()

    def look(step):
        used, wanted, running, waiting = hook.engine.gauges()
        book = node.book()
        told.append(tuple(book[name] for name in ("used", "wanted", "running", "waiting", "steps")))
        was_calm.add(hook.calm is not None)

        assert told[-1] == (used, wanted, running, waiting, step + 1)
        assert list(hook.ledger.in_flight)[-1:] == [each for each in [scheduler.last] if each.num_scheduled_tokens]
        reclaimer(step)

    schedule = scheduler.schedule

    def noted():
        scheduler.last = schedule()
        return scheduler.last

    scheduler.schedule = noted
    hook.reconciler.steps = 0
    done = run(scheduler, prompts(5, 12), depth=depth, reclaim=look)

    assert done == run(ToyScheduler(blocks=400), prompts(5, 12), depth=depth)
    assert was_calm == {False, True}
    close(scheduler)


@pytest.mark.parametrize("happens", ["a request comes", "one is aborted", "a loss", "a target", "a failure beside"])
def test_a_step_in_which_something_happens_is_never_told_as_a_calm_one(node, calm, happens, monkeypatch):
    long, publish = [], Reconciler.publish
    monkeypatch.setattr(Reconciler, "publish", lambda *told: long.append(1) or publish(*told))
    hook = calm._valve
    calm.launch()
    calm.believe()
    assert (long, hook.calm is not None) == ([], True)

    if happens == "a request comes":
        calm.add("late", range(6), 3)
    elif happens == "one is aborted":
        calm.abort("r1")
    elif happens == "a loss":
        node.take([3])
    elif happens == "a target":
        node.aim(30)
    else:
        hook.reconciler.fail("on purpose")
    calm.launch()

    assert len(long) == 1
    assert node.book()["mode"] == (Mode.COARSE if happens == "a failure beside" else Mode.FULL)
    assert node.book()["running"] == len(calm.running)


@pytest.mark.parametrize("happens", ["nothing else", "it does not fit", "a target"])
def test_one_that_ends_and_one_that_comes_with_a_step_are_never_lost_in_it(node, calm, happens, monkeypatch):
    """By the short way where nothing else happens: who it is, the link's thread finds; and a loss, if it is first."""
    long, publish, hook = [], Reconciler.publish, calm._valve
    monkeypatch.setattr(Reconciler, "publish", lambda *told: long.append(1) or publish(*told))
    monkeypatch.setattr(hook.link, "on_tick", None)
    calm.abort("r1")
    calm.add("late", range(100, 106 if happens != "it does not fit" else 500), 30)
    if happens == "a target":
        node.aim(30)
    calm.launch()
    told = node.book()

    assert bool(long) == (happens != "nothing else")
    assert (told["running"], told["waiting"]) == ((2, 1) if happens == "it does not fit" else (3, 0))
    assert told["used"] == hook.engine.gauges()[0]
    if happens == "it does not fit":
        return
    lost = [block.block_id for block in calm.req_to_blocks["late"]]
    node.take(lost)
    hook.before_schedule()

    assert hook.reconciler.receipts.hit_requests == 1
    assert "late" not in {each.request_id for each in calm.running}
    assert set(hook.ledger.held) == {"r0", "r2"}
    assert hook.progress.ended == 1


def test_what_calm_steps_note_never_piles_up_where_no_thread_takes_it_in(calm, monkeypatch):
    hook, longest = calm._valve, 0
    monkeypatch.setattr(hook.link, "on_tick", None)
    for number in range(3 * MOST_WAITING):
        calm.abort(calm.running[0].request_id)
        calm.add(f"another-{number}", range(100, 106), 60)
        calm.launch()
        calm.believe()
        longest = max(longest, len(hook.ledger.noted))

    assert MOST_WAITING <= longest <= MOST_WAITING + 1
    assert hook.progress.ended == 3 * MOST_WAITING
    assert hook.reconciler.receipts.failures == 0


@pytest.mark.parametrize(("last", "then"), [(STEPS_ROUND, 3), (STEPS_ROUND - 1, STEPS_ROUND + 2)])
def test_the_number_of_a_step_never_outgrows_its_word_in_the_book(node, calm, last, then):
    """Nor is it ever 0, which is that of an engine that made none: valved would give memory in the middle of a step."""
    hook = calm._valve
    hook.reconciler.steps, hook.calm = last, None
    for _ in range(3):  # the first by the long way
        calm.launch()
        calm.believe()
        assert node.book()["steps"] > 0

    assert hook.calm is not None
    assert (node.book()["steps"], hook.reconciler.receipts.failures) == (then, 0)


@pytest.mark.parametrize("place", ["a calm step", "a look", "the last output"])
def test_an_output_at_which_the_hook_fails_never_keeps_an_idle_engine_from_giving_back(node, calm, monkeypatch, place):
    places = {"a calm step": (Progress, "row"), "a look": (Reconciler, "sync"), "the last output": (Progress, "count")}
    owner, name = places[place]
    hook, original, fails = calm._valve, getattr(owner, name), [True]
    monkeypatch.setattr(hook.link, "on_tick", None)
    calm.launch()
    hook.progress.gone.add("an earlier one")
    if place == "a look":
        hook.calm, hook._looked = None, None
    monkeypatch.setattr(owner, name, lambda *given: 1 // 0 if fails and fails.pop() else original(*given))
    happens = [calm.believe, lambda: [calm.abort(f"r{number}") for number in range(3)], calm.schedule]
    for event in happens if place != "the last output" else [*happens[1:], calm.believe]:
        event()
    node.aim(20)
    hook.while_idle()

    assert not fails
    assert node.book()["mode"] == Mode.COARSE
    assert node.offered()


def test_a_step_that_schedules_nothing_is_never_in_flight(calm):
    """vLLM asks for no output of such a step: it would stay for ever."""
    output = calm.schedule()
    flying = list(calm._valve.ledger.in_flight)
    output.num_scheduled_tokens = {}
    assert calm._valve.calm is not None
    calls.after_schedule(calm, output)

    assert list(calm._valve.ledger.in_flight) == flying


def test_a_loss_before_a_calm_steps_output_is_never_believed(node, calm):
    calm.launch(lambda: node.take([block.block_id for block in calm.req_to_blocks["r1"]]))
    assert calm._valve.calm is not None
    before = len(calm.requests["r1"].output)
    calm.believe()

    assert len(calm.requests["r1"].output) == before
    assert node.book()["epoch_seen"] == node.epoch
