"""The hook lets go of valved, or looks at an idle engine: what was under way by then is not lost on anybody."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest
from faults import Fault
from kv_node import KvNode, wait_for
from toy_engine import ToyScheduler
from toy_world import close, hooked, prompts, run
from valve_hook.ledger import MOST_STEPS, Ledger
from valve_hook.shared import Book, Table
from valve_hook.vllm.engine import VllmEngine
from valve_hook.wire import Mode


@pytest.mark.parametrize("depth", [1, 2])
def test_after_the_second_failure_no_token_is_wrong_and_no_block_without_memory_is_handed_out(node, depth):
    """Who may have read a loss ends with an error; who began later has the tokens it would have had."""
    work = prompts(2, 12)
    scheduler = hooked(node, blocks=60)
    scheduler.schedule()
    bare = list(range(40, 60))
    scheduler.poison(bare)
    node.take(bare)
    scheduler.schedule()
    hook = scheduler._valve

    def broken(*_):
        raise RuntimeError("on purpose")

    hook.engine.forget = hook.engine.reset = broken

    def rob(step):
        if step in (4, 9):  # the second time valved had begun before it heard
            scheduler.poison([step])
            node.take([step])

    done = run(scheduler, work, depth=depth, reclaim=rob)
    expected = run(ToyScheduler(blocks=400), work, depth=depth)

    assert node.book()["mode"] == Mode.NONE
    assert scheduler.failed
    assert done.keys() == expected.keys() - scheduler.failed
    assert all(expected[name] == tokens for name, tokens in done.items())
    assert hook.engine.withheld == {4, 9, *bare}

    scheduler.back(bare)
    node.give(bare)
    run(scheduler, [("late", list(range(12)), 4)], depth=depth)

    assert hook.engine.withheld == {4, 9}
    scheduler.check_integrity([4, 9])
    close(scheduler)


def test_a_table_that_cannot_be_taken_up_is_heeded_all_the_same(tmp_path):
    """An elastic engine begins without memory: that something else failed does not give it any."""
    node = KvNode(tmp_path, columns=10, backed=30)
    scheduler = hooked(node, blocks=60)
    scheduler._valve.engine.arrange = None
    scheduler.schedule()
    work = prompts(1, 8)

    assert run(ToyScheduler(), work, depth=1) == run(scheduler, work, depth=1)
    assert scheduler._valve.engine.withheld == set(range(30, 60))
    assert node.book()["mode"] == Mode.NONE
    close(scheduler)
    node.stop()


def test_a_streaming_session_ends_lending_and_what_was_under_way_is_still_acted_on(node):
    """While it waits for input it holds blocks and stands in no queue that a loss looks through."""
    work = prompts(1, 6)
    expected = run(ToyScheduler(blocks=400), work, depth=2)
    scheduler = hooked(node, blocks=60)

    def streams_then_is_robbed(step):
        if step == 3:
            assert node.book()["mode"] == Mode.NONE
            lost = [table[0].block_id for table in scheduler.req_to_blocks.values()]
            scheduler.poison(lost)
            node.take(lost)

    scheduler.add("stream", range(500, 506), 9)
    scheduler.requests["stream"].resumable = True
    done = run(scheduler, work, depth=2, reclaim=streams_then_is_robbed)

    assert {name: done[name] for name in expected} == expected
    assert node.book()["hit_requests"] > 0
    assert node.book()["failures"] == 0

    node.stop()
    node.start()
    wait_for(lambda: node.attached, "attached again")
    scheduler.schedule()
    node.aim(10)
    scheduler.schedule()

    assert node.book()["mode"] == Mode.NONE
    assert node.offered() == []
    close(scheduler)


@pytest.mark.parametrize("how", ["aborted", "stopped"])
def test_an_engine_that_is_idle_after_an_unforeseen_end_gives_back(node, how):
    """Async: the last request ends while one more step of it is in flight; nothing is scheduled after that."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("a", range(10), 30)
    for _ in range(4):
        scheduler.launch()
        while len(scheduler.in_flight) > 1:
            scheduler.believe()
    scheduler.launch()
    if how == "stopped":
        scheduler.requests["a"].max_tokens = len(scheduler.requests["a"].output) + 1
        scheduler.believe()
    else:
        scheduler.abort("a")
    scheduler.launch()  # tells who ended
    while scheduler.in_flight:
        scheduler.believe()
    node.aim(10)

    wait_for(lambda: len(node.offered()) >= 40, "columns are offered")
    close(scheduler)


def test_what_waits_for_an_engines_next_step_need_not_wait_for_an_idle_engine(node):
    """Memory is moved between two steps; an engine without requests makes none. Never while it has one."""
    scheduler = hooked(node, blocks=60)
    had_requests = []
    scheduler._valve._between_steps = lambda: had_requests.append(bool(scheduler.requests))
    run(scheduler, prompts(1, 6), depth=2)
    scheduler.launch()  # schedules nothing: idle from here on
    seen = len(had_requests)

    wait_for(lambda: len(had_requests) > seen, "the link's thread stands in for the engine's")
    assert not any(had_requests)
    close(scheduler)


@pytest.mark.parametrize("what", ["believe its empty step", "reset the prefix cache"])
def test_an_idle_engine_is_acted_on_by_one_thread_at_a_time(node, what):
    """The link's thread is in the middle of withholding when the engine's comes."""
    scheduler = hooked(node, blocks=60)
    run(scheduler, prompts(1, 3), depth=1)
    hook, pool = scheduler._valve, scheduler._valve.engine.pool
    hook.link.on_tick = None
    scheduler.launch()  # schedules nothing: idle from here on
    inside, go_on, hold = threading.Event(), threading.Event(), hook.engine._hold

    def slow(*blocks):
        hold(*blocks)
        if threading.current_thread().name == "link":
            inside.set()
            go_on.wait(60)

    if what == "reset the prefix cache":
        scheduler.believe()
    node.take(list(range(1, 50)))
    hook.engine._hold = slow
    link = threading.Thread(target=hook.while_idle, name="link")
    link.start()
    assert inside.wait(60)
    node.take([50])
    answers = []
    comes = scheduler.believe if what == "believe its empty step" else pool.reset_prefix_cache
    engine = threading.Thread(target=lambda: answers.append(comes()))
    engine.start()
    engine.join(0.2)
    go_on.set()
    link.join()
    engine.join()
    scheduler.launch()

    assert answers == [None if what == "believe its empty step" else True]
    assert node.book()["failures"] == 0
    assert [block.ref_cnt for block in pool.blocks[1:]] == [block in hook.engine.withheld for block in range(1, 60)]
    close(scheduler)


def test_an_offer_that_was_half_made_never_keeps_blocks_from_anybody(node, monkeypatch):
    """Each part of an offer fails, before its work or after it: what is withheld is what valved was told."""
    for owner, name in ((VllmEngine, "withhold"), (Book, "offer")):
        for is_late in (False, True):
            scheduler = hooked(node, blocks=60)
            reconciler = scheduler._valve.reconciler
            with monkeypatch.context() as patches:
                fault = Fault(is_late=is_late, is_lasting=False)
                fault.put(patches, owner, name)
                fault.is_armed = True
                node.aim(20)
                scheduler.add("a", range(12), 8)
                scheduler.launch()
            node.aim(60)
            scheduler.believe()

            assert fault.raised
            assert scheduler._valve.engine.withheld == set(np.flatnonzero(reconciler.withheld)) == set(node.offered())
            close(scheduler)


@pytest.mark.parametrize("mode", [Mode.COARSE, Mode.NONE])
def test_a_lowered_mode_is_never_left_untold_where_publishing_fails_too(node, monkeypatch, mode):
    """The step that would tell it fails, or never comes: valved would go on choosing by the finer mode."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("a", range(10), 30)
    scheduler.launch()
    assert node.book()["mode"] == Mode.FULL
    hook = scheduler._valve

    def broken(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(hook.engine, "gauges", broken)
    if mode is Mode.NONE:
        monkeypatch.setattr(Table, "read", broken)
        node.take([scheduler.req_to_blocks["a"][0].block_id])
    scheduler.add("b", range(50, 60), 30)
    scheduler.launch()

    assert hook.reconciler.told_mode is mode
    assert node.book()["mode"] == mode
    close(scheduler)


def test_a_failure_beside_the_steps_is_told_before_the_next_one(node, monkeypatch):
    """The link's thread fails while the engine is in a step, or stopped in its middle."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("a", range(10), 30)
    scheduler.launch()
    monkeypatch.setattr(Ledger, "tend", lambda _: 1 // 0)

    wait_for(lambda: node.book()["mode"] == Mode.COARSE, "told")
    close(scheduler)


@pytest.mark.parametrize("is_none", [False, True])
def test_an_attachment_never_says_a_finer_mode_than_the_hook_has_by_then(node, is_none):
    """The link that knew the first mode was cut; the next contact, with whichever valved, says what holds now."""
    scheduler = hooked(node, blocks=60)
    hook = scheduler._valve
    scheduler.add("a", range(10), 30)
    scheduler.launch()
    node.stop()
    hook.reconciler.fail("on purpose")
    if is_none:
        hook.reconciler.give_up("on purpose")
    before = hook.link.session
    node.start()
    wait_for(lambda: hook.link.session is not before and node.attached, "attached again")

    assert node.attached[0] == Mode.COARSE  # NONE is the book's word: what has no memory is withheld as ever
    scheduler.launch()
    assert node.book()["mode"] == (Mode.NONE if is_none else Mode.COARSE)
    close(scheduler)


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_block_that_a_step_in_flight_uses_is_never_offered(node, depth, is_offline):
    """valved unmaps what is offered at once. Its request has ended, and a kernel may still read and write there."""
    scheduler, used = hooked(node, blocks=60, is_offline=is_offline), deque()

    def step():
        scheduler.launch()
        used.append({block.block_id for table in scheduler._tables.values() for block in table})
        assert not set(node.offered()) & set().union(*used)
        while len(scheduler.in_flight) >= depth:
            scheduler.believe()
            used.popleft()

    scheduler.add("long", range(80), 40)
    scheduler.add("short", range(200, 212), 40)
    for _ in range(8):
        step()
    held = {block.block_id for block in scheduler.req_to_blocks["long"]}
    node.aim(10)

    scheduler.abort("long")
    for _ in range(6):
        step()

    assert set(node.offered()) & held
    assert scheduler._valve.reconciler.receipts.failures == 0
    close(scheduler)


def _frees_while_a_step_is_in_flight(node, make_it_fail=None):
    """What two requests hold; the longer one has ended, and the last step launched for it is still in flight."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("long", range(80), 40)
    scheduler.add("short", range(200, 212), 40)
    for _ in range(4):
        scheduler.launch()
        while len(scheduler.in_flight) > 1:
            scheduler.believe()
    held = {block.block_id for block in scheduler.req_to_blocks["long"]}
    while scheduler.in_flight:
        scheduler.believe()
    if make_it_fail is not None:
        make_it_fail(scheduler)
    scheduler.launch()
    scheduler.abort("long")
    node.aim(10)
    return scheduler, held


def test_a_block_of_a_step_that_could_not_be_noted_is_never_offered_before_it_is_over(node, monkeypatch):
    """The hook failed in the step that it was launched in, and goes on the coarse way."""
    with monkeypatch.context() as patched:

        def fail(scheduler):
            scheduler.add("new", range(300, 306), 40)
            patched.setattr(VllmEngine, "record", lambda *_: 1 // 0)

        scheduler, held = _frees_while_a_step_is_in_flight(node, fail)
        assert scheduler._valve.reconciler.receipts.failures > 0
    scheduler.launch()

    assert not set(node.offered()) & held
    while scheduler.in_flight:
        scheduler.believe()
    scheduler.launch()
    scheduler.believe()
    scheduler.launch()
    assert set(node.offered()) & held
    close(scheduler)


def test_a_step_that_found_no_place_among_those_in_flight_never_counts_as_over():
    """The engine was slow to tell of outputs. Those of the steps that are noted say nothing of this one."""
    ledger, steps = Ledger(block_tokens=4), [object() for _ in range(MOST_STEPS + 1)]
    for step in steps[:-1]:
        ledger.launch(step)
    with pytest.raises(RuntimeError, match="did not tell of their output"):
        ledger.launch(steps[-1])
    launched = ledger.launched
    for step in steps[:-1]:
        ledger.believe(step)

    assert not ledger.is_over(launched)


def test_a_step_that_found_no_place_never_keeps_blocks_for_ever():
    """Steps end in their order: the output of one that was launched later says that it is over."""
    ledger, steps = Ledger(block_tokens=4), [object() for _ in range(MOST_STEPS + 2)]
    for step in steps[:-2]:
        ledger.launch(step)
    with pytest.raises(RuntimeError, match="did not tell of their output"):
        ledger.launch(steps[-2])
    for step in steps[:-2]:
        ledger.believe(step)
    ledger.launch(steps[-1])
    launched = ledger.launched

    assert not ledger.is_over(launched - 1)
    ledger.believe(steps[-1])
    assert ledger.is_over(launched)


def test_blocks_that_valved_was_not_told_of_are_never_withheld_once_it_takes_none(node):
    scheduler, _ = _frees_while_a_step_is_in_flight(node)
    scheduler.launch()
    reconciler = scheduler._valve.reconciler
    assert reconciler.offers.unsaid

    reconciler.give_up("on purpose")
    for _ in range(3):
        scheduler.launch()
        while len(scheduler.in_flight) > 1:
            scheduler.believe()

    assert scheduler._valve.engine.withheld == set(node.offered()) == set()
    assert reconciler.backed == 60
    close(scheduler)


def test_an_offer_that_valved_declines_never_stays_withheld(node):
    """It tells the blocks as changed and there again, and nothing was unmapped."""
    scheduler = hooked(node, blocks=60)
    scheduler.add("a", range(10), 30)
    node.aim(20)
    for _ in range(3):
        scheduler.launch()
        scheduler.believe()
    offered = node.offered()
    assert offered

    node.aim(60)
    node.take(offered)
    node.give(offered)
    scheduler.launch()

    assert node.offered() == []
    assert scheduler._valve.engine.withheld == set()
    assert scheduler._valve.reconciler.receipts.hit_requests == 0
    close(scheduler)
