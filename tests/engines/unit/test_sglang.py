"""SGLang by a toy with its hazards: tokens are as in an undisturbed run; each trap alone, and what its fix is worth."""

from __future__ import annotations

import contextlib
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sglang_ablations as without
from faults import Fault, cases
from kv_node import restart
from sglang_world import Reclaimer, finish, give, lose, request_of, run, under_way, undisturbed
from toy_sglang import Scheduler
from toy_world import prompts
from valve_hook import Refused
from valve_hook.reconciler import Reconciler
from valve_hook.sglang import calls, engine, memory
from valve_hook.sglang.check import can_forget
from valve_hook.sglang.engine import SglangEngine
from valve_hook.sglang.free_pages import FreePages
from valve_hook.sglang.memory import layout_of
from valve_hook.sglang.ranks import Alone
from valve_hook.sglang.steps import StepLedger
from valve_hook.shared import Book, Table
from valve_hook.wire import Mode


def broken(story, *arguments, **options):
    """Whether a story does not end well: a wrong answer, a request that is lost, an engine that fails."""
    try:
        story(*arguments, **options)
    except (AssertionError, IndexError, KeyError, AttributeError, ValueError, TypeError):
        return True
    return False


def campaign(world, seed, remove=None, **knobs):
    """Random losses; every answer as undisturbed."""
    work = prompts(seed, 16)
    scheduler, node = world(**{"pages": 60, **knobs})
    if remove is not None:
        remove(scheduler._valve.engine)
    reclaimer = Reclaimer(node, scheduler, seed, most=10 if scheduler.page == 4 else 40)
    done = run(scheduler, work, reclaimer)
    assert reclaimer.events > 10
    assert done == undisturbed(work, page_size=scheduler.page, pages=1600 // scheduler.page)
    assert remove is not None or scheduler._valve.reconciler.receipts.failures == 0


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.COARSE])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 200), (4, 60)])
def test_tokens_are_identical_whatever_is_taken(world, mode, overlap, page_size, pages):
    for seed in range(2 if page_size > 1 else 1):
        campaign(world, seed, mode=mode, overlap=overlap, page_size=page_size, pages=pages)


@pytest.mark.parametrize(
    ("remove", "overlap"),
    [
        (without.forgetting, True),
        (without.withholding, True),
        (without.settling, True),
        (without.skipping_without_overlap, False),
    ],
)
def test_without_this_protection_a_campaign_goes_wrong(world, remove, overlap):
    assert any(broken(campaign, world, seed, remove, overlap=overlap) for seed in range(8))


def test_only_requests_that_lost_something_are_retracted_and_sound_pages_stay_cached(world):
    scheduler, node = world()
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        scheduler.add(name, range(start, start + 12), 30)
    for _ in range(8):
        scheduler.turn()
    b, others = request_of(scheduler, "b"), [request_of(scheduler, name) for name in "ac"]
    first, cached = scheduler.pages_of(b)[0], len(scheduler.tree.nodes)
    lose(node, scheduler, [first])
    scheduler.turn()
    scheduler.turn()

    assert not any(each.is_retracted or each in scheduler.waiting_queue for each in others)
    assert first not in {entry.page for entry in scheduler.tree.nodes.values()}
    assert cached - len(scheduler.tree.nodes) <= 3
    assert (node.book()["hit_requests"], node.book()["failures"], node.book()["mode"]) == (1, 0, Mode.FULL)


def test_a_finished_requests_cached_pages_are_forgotten_and_its_neighbours_are_not(world):
    scheduler, node = world()
    run(scheduler, [("a", list(range(12)), 4), ("b", list(range(50, 62)), 4)])
    of_a = [scheduler.tree.nodes[number].page for number in scheduler.tree.path(list(range(12)))]
    of_b = scheduler.tree.path(list(range(50, 62)))
    lose(node, scheduler, of_a[1:2])
    scheduler.turn()

    assert len(scheduler.tree.path(list(range(12)))) == 1
    assert scheduler.tree.path(list(range(50, 62))) == of_b


def a_page_is_lost_that_the_cache_has_replaced(world, remove=None):
    """y and x begin alike and are computed at the same time. y is cached first, so the cache's page takes the place of
    x's own while a step that reads x's own is in flight; that one is lost, and what the step writes from it is cached
    behind a sound page. (The toy's step is over when it is launched: its memory goes first, the table says so later.)
    """
    x = ("x", [*range(8), *range(200, 222)], 6)
    scheduler, node = world(chunk=12)
    if remove is not None:
        remove(scheduler._valve.engine)
    scheduler.add("y", range(12), 6)
    scheduler.turn()
    scheduler.add(*x)
    lost = []
    scheduler.turn(lambda: lost.extend(scheduler.pages_of(scheduler.chunked_req)[:1]) or scheduler.poison(lost))
    scheduler.turn(lambda: node.take(lost))
    done = finish(scheduler, "xy")
    again = run(scheduler, [("z", *x[1:])])

    assert done["x"] == again["z"] == undisturbed([x])["x"]


@pytest.mark.parametrize("remove", [without.taint, without.row_copies])
def test_what_a_step_wrote_from_a_page_that_was_replaced_meanwhile_is_spoilt(world, remove):
    a_page_is_lost_that_the_cache_has_replaced(world)

    assert broken(a_page_is_lost_that_the_cache_has_replaced, world, remove)


def a_step_still_runs_when_its_output_is_handed_over(world, remove=None):
    """Without overlap: the loss is told when the step is waited for, by us or by SGLang."""
    scheduler, node = world(overlap=False)
    if remove is not None:
        remove(scheduler._valve.engine)
    scheduler.add("a", range(10), 8)
    for _ in range(4):
        scheduler.turn()
    lost = scheduler.pages_of(request_of(scheduler, "a"))[:1]
    scheduler.device_module.synchronize = lambda: node.take(lost)
    scheduler.turn(lambda: scheduler.poison(lost))
    scheduler.device_module.synchronize = lambda: None
    if remove is not None:
        node.take(lost)
    assert finish(scheduler, "a") == undisturbed([("a", list(range(10)), 8)])


def test_a_step_is_waited_for_before_the_table_is_read(world):
    a_step_still_runs_when_its_output_is_handed_over(world)

    assert broken(a_step_still_runs_when_its_output_is_handed_over, world, without.waiting_for_the_step)


def the_last_token_is_in_flight(world, mode, remove=None):
    """Then the request stands in no queue and no batch any more, and its output is dropped."""
    scheduler, node = world(mode=mode)
    if remove is not None:
        remove(scheduler._valve.engine)
    losses = []

    def reclaim():
        if scheduler.result_queue and not scheduler.running_batch.reqs and not scheduler.waiting_queue and not losses:
            losses.append(scheduler.pages_of(scheduler.result_queue[0][0].reqs[0])[:1])
            lose(node, scheduler, losses[0])

    done = run(scheduler, [("a", list(range(10)), 5)], reclaim, max_turns=60)
    assert losses
    assert done == undisturbed([("a", list(range(10)), 5)])


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.COARSE])
def test_a_request_whose_last_token_was_in_flight_is_not_lost(world, mode):
    the_last_token_is_in_flight(world, mode)


def test_without_retracting_whose_output_was_dropped_it_is_lost(world):
    assert broken(the_last_token_is_in_flight, world, Mode.COARSE, without.retracting_the_dropped)


def the_engine_is_idle_with_pages_withheld(world, remove=None):
    scheduler, node = world()
    if remove is not None:
        remove(scheduler._valve.engine)
    lose(node, scheduler, [7, 8, 9])
    for _ in range(3):
        scheduler.turn()


def test_the_idle_leak_check_knows_what_is_withheld(world):
    the_engine_is_idle_with_pages_withheld(world)

    assert broken(the_engine_is_idle_with_pages_withheld, world, without.telling_the_leak_check)


def the_last_request_finds_no_memory(world, remove=None):
    work = [("a", list(range(10)), 40)]
    scheduler, node = world(pages=20)
    if remove is not None:
        remove(scheduler._valve.engine)
    scheduler.add(*work[0])
    for _ in range(4):
        scheduler.turn()
    held = scheduler.pages_of(request_of(scheduler, "a"))
    rest = [page for page in range(1, 20) if page not in held]
    lose(node, scheduler, rest)
    for _ in range(40):
        scheduler.turn()
    assert scheduler.done == {}
    give(node, scheduler, rest)
    assert finish(scheduler, "a") == undisturbed(work)


def test_the_last_request_waits_for_memory_and_is_not_aborted(world):
    the_last_request_finds_no_memory(world)

    assert broken(the_last_request_finds_no_memory, world, without.sparing_the_last)


def the_user_flushes(world, remove=None):
    scheduler, node = world()
    if remove is not None:
        remove(scheduler._valve.engine)
    lose(node, scheduler, [3, 4])
    scheduler.turn()
    assert scheduler.flush_cache()
    assert not {3, 4} & set(scheduler.allocator.free_pages.tolist())
    give(node, scheduler, [3, 4])
    scheduler.turn()
    assert {3, 4} <= set(scheduler.allocator.free_pages.tolist())


def test_a_flush_by_the_user_hands_out_no_page_without_memory(world):
    the_user_flushes(world)

    assert broken(the_user_flushes, world, without.filtering_after_a_flush)


def the_queue_is_full(world, remove=None):
    work = prompts(3, 8)
    scheduler, node = world()
    for request in work:
        scheduler.add(*request)
    scheduler.max_queued_requests = 1
    if remove is not None:
        remove(scheduler._valve.engine)
    assert finish(scheduler, [name for name, _, _ in work], Reclaimer(node, scheduler, 3)) == undisturbed(work)
    assert scheduler.max_queued_requests == 1


def test_a_full_queue_turns_away_newcomers_and_no_retracted_request(world):
    the_queue_is_full(world)

    assert broken(the_queue_is_full, world, without.lifting_the_queue_limit)


def test_a_page_in_hands_we_do_not_know_sends_everybody_back(world):
    scheduler, node = world()
    stolen = scheduler.allocator.alloc(1)
    lose(node, scheduler, stolen)
    scheduler.turn()

    assert scheduler._valve.reconciler.mode is Mode.COARSE
    assert node.book()["failures"] == 1


def the_hook_gives_up(world, overlap=True, remove=None):
    """Both ways to handle a loss fail. Who may have read it ends with an error, the rest and all who come have the
    tokens they would have had, and the cached beginning that lost a page is found by nobody.
    """
    work = [(name, [*range(10), number], 12) for number, name in enumerate("abcd", 30)]
    early, late = ("early", [*range(50, 62), 9], 4), ("late", [*range(50, 62), 7], 6)
    scheduler, node = world(overlap=overlap)
    run(scheduler, [early])
    without.acting_on_losses(scheduler._valve.engine)
    if remove is not None:
        remove(scheduler._valve.engine)
    for request in work:
        scheduler.add(*request)
    for _ in range(6):
        scheduler.turn()
    cached = [scheduler.tree.nodes[number].page for number in scheduler.tree.path(early[1])][:1]
    lost = [*cached, scheduler.pages_of(request_of(scheduler, "b"))[1]]
    scheduler.turn(lambda: lose(node, scheduler, lost))
    done = finish(scheduler, "abcd") | run(scheduler, [late])
    ended = {name for name, answer in done.items() if isinstance(answer, str)}

    assert "b" in ended
    assert {name: done[name] for name in done.keys() - ended} == {
        name: answer for name, answer in undisturbed([early, *work, late]).items() if name not in ended
    }
    assert late[0] not in ended
    assert node.book()["mode"] == Mode.NONE
    assert set(lost) == set(np.flatnonzero(scheduler._valve.engine.free_pages.taken).tolist())
    give(node, scheduler, lost)
    scheduler.turn()
    assert set(lost) <= set(scheduler.allocator.free_pages.tolist())


@pytest.mark.parametrize("overlap", [True, False])
def test_after_the_hook_gave_up_no_token_is_wrong_and_no_page_without_memory_is_used(world, overlap):
    the_hook_gives_up(world, overlap)

    assert broken(the_hook_gives_up, world, overlap, without.emptying_the_cache)


def a_page_without_memory_comes_back_from_hands_we_do_not_know(world, remove=None):
    scheduler, node = world()
    if remove is not None:
        remove(scheduler._valve.engine)
    stolen = scheduler.allocator.alloc(2)
    scheduler.check_idle = lambda: None  # it would miss them
    scheduler._valve.engine.reset = lambda: 1 // 0
    lose(node, scheduler, stolen)
    scheduler.turn()
    assert node.book()["mode"] == Mode.NONE
    give(node, scheduler, stolen[1:])
    scheduler.turn()
    scheduler.allocator.free(stolen)
    free = scheduler.allocator.free_pages.tolist()
    assert stolen[0] not in free
    assert free.count(stolen[1]) == 1


def test_after_the_hook_gave_up_a_page_without_memory_is_withheld_when_it_comes_back(world):
    a_page_without_memory_comes_back_from_hands_we_do_not_know(world)

    assert broken(a_page_without_memory_comes_back_from_hands_we_do_not_know, world, without.catching_what_comes_back)


def test_a_row_that_changed_unseen_sends_everybody_back(world):
    """What the hook cannot copy it does not vouch for, and SGLang, whose call it was, never notices."""
    scheduler, node = world()
    work = [("a", list(range(10)), 8), ("b", list(range(50, 60)), 3)]
    for request in work:
        scheduler.add(*request)
    for _ in range(4):
        scheduler.turn()
    scheduler._valve.engine.ledger.page_table = None
    scheduler.turn()
    scheduler._valve.engine.ledger.page_table = scheduler.table
    lose(node, scheduler, scheduler.pages_of(request_of(scheduler, "a"))[:1])

    assert finish(scheduler, "ab") == undisturbed(work)
    assert scheduler._valve.reconciler.mode is Mode.COARSE


def test_beam_search_ends_reclaiming_before_it_begins(world):
    scheduler, node = world()
    scheduler.add("a", range(10), 4)
    scheduler.waiting_queue[0].beam_group = object()
    scheduler.turn()

    assert node.book()["mode"] == Mode.NONE


def test_free_columns_are_offered_last_first_and_handed_out_again(world):
    """An engine that does not need its pages gives them back without a loss."""
    scheduler, node = world(pages=60, columns=10)
    node.aim(30)
    for _ in range(40):
        scheduler.turn()
    offered = node.offered()
    node.take(offered)
    scheduler.turn()

    assert 30 <= len(offered) < 40
    assert min(offered) > 15
    assert scheduler._valve.reconciler.receipts.lost_blocks == 0
    assert run(scheduler, [("a", list(range(10)), 8)]) == undisturbed([("a", list(range(10)), 8)])


def test_a_page_that_a_step_in_flight_uses_is_never_offered(world, monkeypatch):
    """valved unmaps what is offered at once. The client of its request has left, and the next step is under way."""
    scheduler, node, last = under_way(world, monkeypatch)
    scheduler.abort("a")
    for _ in range(8):
        scheduler.turn()

    assert last in node.offered()
    assert scheduler._valve.reconciler.receipts.failures == 0


def test_where_the_pages_lie_is_told(world):
    _, node = world(page_size=4, pages=60)
    blocks, tokens, total, first, count = struct.unpack_from("<IIIII", node.layouts[0])
    at = struct.calcsize("<IIIIII8I")
    runs = [struct.unpack_from("<QQQ", node.layouts[0], at + number * 72) for number in range(count)]

    assert (blocks, tokens, total, first) == (60, 4, 4, 0)
    assert runs == [(4096 * number, 32, 32) for number in range(4)]


def test_a_pool_that_keeps_something_else_is_refused():
    with pytest.raises(Refused, match="MLATokenToKVPool"):
        layout_of(type("MLATokenToKVPool", (), {})(), 60, 4)


def test_buffers_are_made_between_begin_and_end(monkeypatch):
    said = []
    names = {"valve_kv_begin": lambda flags: said.append(flags.value), "valve_kv_end": lambda: said.append("end")}
    monkeypatch.setattr(memory, "shim_call", names.get)
    monkeypatch.setattr(memory, "range_flags", lambda pool: 1)
    memory.around_create(lambda pool: said.append(pool.device), SimpleNamespace(device="cpu"))

    assert said == [1, "cpu", "end"]


@pytest.mark.parametrize("has_pools", [True, False])
def test_a_buffer_past_the_bracket_never_ends_sglang_and_is_said_to_be_ordinary(monkeypatch, caplog, has_pools):
    """backend:cudaMallocAsync has no pools; with one, an allocator may still not ask by cuMemAlloc."""
    made = []

    def pool():
        if not has_pools:
            raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool")

    cuda = SimpleNamespace(
        MemPool=pool,
        use_mem_pool=lambda _: contextlib.nullcontext(),
        memory=SimpleNamespace(_snapshot=lambda: {"allocator_settings": {}}),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    names = {"valve_kv_begin": lambda flags: made.append("begin"), "valve_kv_end": lambda: made.append("end")}
    monkeypatch.setattr(memory, "shim_call", names.get)
    monkeypatch.setattr(memory, "range_flags", lambda pool: 1)
    monkeypatch.setattr(memory, "kv_ranges", lambda: 0)

    memory.around_create(lambda pool: made.append(pool.device), SimpleNamespace(device="cuda:0"))

    assert made == (["begin", "cuda:0", "end"] if has_pools else ["cuda:0"])
    (line,) = caplog.messages
    assert "ordinary memory" in line


def test_a_tree_without_the_walk_is_handled_the_coarse_way():
    scheduler = Scheduler()

    assert can_forget(scheduler.tree)
    scheduler.tree.tree_core = object()
    assert not can_forget(scheduler.tree)


CALLED = {
    calls.SglangHook: ["before_choose", "after_choose", "_look", "_disbelieved", "_settle"],
    Reconciler: [
        *("sync", "peek", "hit", "publish", "_heed", "_adopt", "_safely", "_try", "_act", "_discard"),
        *("_offer", "_unoffer", "_call_off"),
    ],
    StepLedger: ["begin_step", "end_steps", "settle", "judge", "_keep", "_holders", "_others"],
    SglangEngine: [
        *("discard", "forget", "withhold", "release", "reset", "gauges", "free_columns", "launch", "wait", "come_in"),
        *(
            "disbelieve",
            "believe_again",
            "drop",
            "retract_dropped",
            "open_requests",
            "_retract",
            "_take_back",
            "arrange",
        ),
    ],
    engine: ["evict"],
    FreePages: ["withhold", "release", "columns", "in_use", "numbers", "_take_off", "_hand_out"],
    Alone: ["look", "next_session", "need", "agree"],
    Table: ["begin", "read", "accept", "changed"],
    Book: ["write_gauges", "write_receipts", "acknowledge", "offer"],
}
PLACES = [(owner, name) for owner, names in CALLED.items() for name in names]


FLAGS = ("before its work", "after its work"), ("once", "for ever"), ("no overlap", "overlap")


@pytest.mark.parametrize(("owner", "name", "is_late", "is_lasting", "overlap"), cases(PLACES, *FLAGS))
def test_no_answer_is_wrong_when_a_function_of_the_hook_fails(
    world, monkeypatch, owner, name, is_late, is_lasting, overlap
):
    """Requests may end with an error. Where the fault stays they may wait for ever, or the engine stops that could do
    nothing else but deliver wrong tokens.
    """
    work = prompts(3, 16)
    fault = Fault(is_late=is_late, is_lasting=is_lasting)
    fault.put(monkeypatch, owner, name)
    scheduler, node = world(overlap=overlap)
    reclaimer = Reclaimer(node, scheduler, 3)
    turns = iter(range(10**6))

    def reclaim():
        turn = next(turns)
        fault.is_armed = fault.is_armed or turn == 12
        node.aim(30 if turn % 8 == 4 else 60)
        if turn == 24:  # and in the new table a loss at once, in the step that is running
            restart(node, scheduler)
            lose(node, scheduler, [7, 8, 9])
            give(node, scheduler, [7, 8, 9])
        if turn < 150:  # the coarse way gets nowhere while memory goes in every third step
            reclaimer()

    scheduler.check_idle = lambda: None
    stopped = ""
    try:
        run(scheduler, work, reclaim, max_turns=800)
    except (RuntimeError, AssertionError) as error:
        stopped = str(error)
    expected = undisturbed(work)
    answered = {name: answer for name, answer in scheduler.done.items() if isinstance(answer, list)}

    assert answered == {name: expected[name] for name in answered}
    assert is_lasting or not stopped
    assert not stopped or any(words in stopped for words in ("on purpose", "could neither be sent back", "are lost"))
