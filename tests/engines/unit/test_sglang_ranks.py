"""Two ranks of SGLang, each with a scheduler of its own (the toy) in a thread of its own: they decide alike, or differ.

The collectives are those of `ranks.Group` between threads; a real SGLang makes them by gloo (tests/engines).
"""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from kv_node import KvNode, wait_for
from sglang_modules import sglang_modules
from toy_sglang import Scheduler
from toy_world import prompts
from valve_hook import Refused
from valve_hook.link import Link
from valve_hook.sglang import calls
from valve_hook.sglang.check import refuse_configuration
from valve_hook.sglang.ranks import Alone, Ranks
from valve_hook.wire import Mode

HUNG_S = 200  # only ends a test that hangs


class Meeting:
    """Where the ranks of one engine bring their arrays."""

    def __init__(self, size):
        self.size, self.barrier, self.brought = size, threading.Barrier(size, timeout=HUNG_S), {}


class Seat:
    """`ranks.Group` of one of them."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.is_first, self.size = meeting, rank, rank == 0, meeting.size
        self.collectives = 0

    def greatest(self, words):
        words[:] = np.max([*self._all(words).values()], axis=0)

    def from_first(self, array):
        array[:] = self._all(array)[0]

    def _all(self, mine):
        self.collectives += 1
        self.meeting.brought[self.rank] = mine.copy()
        self.meeting.barrier.wait()
        found = dict(self.meeting.brought)
        self.meeting.barrier.wait()
        return found


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Two ranks; joined, rank 0 alone knows the node; apart, each is attached to a node of its own."""
    schedulers, nodes, links = [], [], []

    def make(*, joined=True, mode=Mode.FULL, **knobs):
        meeting = Meeting(2)
        for rank in range(2):
            if rank == 0 or not joined:
                (tmp_path / str(len(nodes))).mkdir()
                nodes.append(KvNode(tmp_path / str(len(nodes)), columns=10))
            links.append(Link(build="test", path=nodes[-1].path, retry_s=0.02, gone_s=0.0))
            scheduler = Scheduler(hooks=calls, **knobs)
            scheduler.batches = []
            schedulers.append(scheduler)
            links[-1].start()
            ranks = Ranks(links[-1], Seat(meeting, rank)) if joined else Alone(links[-1])
            scheduler._valve = calls.SglangHook(scheduler, ranks, mode)
            scheduler._valve.attach("toy")
        wait_for(lambda: all(link.session for link in links[-2:] if not joined or link is links[-2]), "attached")
        return schedulers[-2:], nodes

    for name, module in sglang_modules(lambda tree: next(s for s in schedulers if s.tree is tree)).items():
        monkeypatch.setitem(sys.modules, name, module)
    # the hook is one per process, and here are two: whom SGLang aborts waits
    monkeypatch.setattr(calls, "sparing", lambda batch: lambda retracted, aborted: ([*retracted, *aborted], []))
    yield make
    for link in links:
        link.close()
    for node in nodes:
        node.stop()


def together(*actions):
    with ThreadPoolExecutor(len(actions)) as pool:
        return [each.result(timeout=HUNG_S) for each in [pool.submit(action) for action in actions]]


def turns(scheduler, until, reclaim=None, most=3000):
    """What each turn launched, by name, until all of `until` are done."""
    seen = []
    for _ in range(most):
        if scheduler.done.keys() >= set(until) and scheduler.is_idle:
            return seen
        scheduler.turn(reclaim)
        batch = scheduler.last_batch
        seen.append(tuple(each.rid for each in batch.reqs) if batch is not None else ())
    raise AssertionError(f"{set(until) - scheduler.done.keys()} are lost")


def undisturbed(work):
    scheduler = Scheduler(pages=400)
    for request in work:
        scheduler.add(*request)
    turns(scheduler, [name for name, _, _ in work])
    return dict(scheduler.done)


def lots(scheduler, seed, node):
    """In the middle of each step: the same pages on every rank, spoilt on one of them, told by the first."""
    chance, taken, events = np.random.default_rng(seed), [], []

    def reclaim():
        if chance.integers(3):
            return
        events.append(1)
        pages = len(scheduler.memory)
        if len(taken) > pages // 3 or (taken and chance.integers(2)):
            scheduler.back(taken)
            if node is not None:
                node.give(taken)
            taken.clear()
            return
        lost = chance.choice(np.arange(1, pages), 8, replace=False).tolist()
        lost = [page for page in lost if page not in taken]
        if node is not None:
            node.take(lost)
        if lost and lost[0] % 2 == (node is None):
            scheduler.poison(lost)
        taken.extend(lost)

    reclaim.events = events
    return reclaim


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.COARSE])
@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_launch_the_same_batches_and_answer_as_undisturbed(engine, overlap, mode):
    (first, second), (node,) = engine(mode=mode, overlap=overlap, pages=60, page_size=4)
    work = prompts(5, 16)
    for request in work:
        first.add(*request)
        second.add(*request)
    names = [name for name, _, _ in work]
    reclaim = lots(first, 5, node)
    ours, theirs = together(lambda: turns(first, names, reclaim), lambda: turns(second, names, lots(second, 5, None)))

    assert len(reclaim.events) > 10
    assert ours == theirs
    assert (first._valve.reconciler.withheld == second._valve.reconciler.withheld).all()
    assert first.done == undisturbed(work)
    assert (node.book()["failures"], node.book()["mode"]) == (0, mode)


def a_loss_between_two_looks(engine, joined):
    """Rank 0 has looked and rank 1 has not when a page goes: what each withholds and who waits, after each of three."""
    (first, second), nodes = engine(joined=joined, pages=60)
    for scheduler in (first, second):
        for name, start in (("a", 0), ("b", 100)):
            scheduler.add(name, range(start, start + 12), 30)
    together(*(lambda each=each: [each.turn() for _ in range(6)] for each in (first, second)))
    lost = first.pages_of(first.running_batch.reqs[0])[:1]
    has_looked = threading.Event()
    if joined:
        together(
            lambda: looked_then(first, has_looked, nodes[0], lost), lambda: (has_looked.wait(HUNG_S), second.turn())
        )
    else:
        first.turn()
        for node in nodes:
            node.take(lost)
        second.turn()
    states = [state_of(first, second)]
    for _ in range(2):
        together(first.turn, second.turn)
        states.append(state_of(first, second))
    return lost, states


def state_of(*schedulers):
    return [
        (np.flatnonzero(each._valve.reconciler.withheld).tolist(), [request.rid for request in each.waiting_queue])
        for each in schedulers
    ]


def looked_then(scheduler, has_looked, node, lost):
    """A turn in which the pages go as soon as rank 0 has read the table."""
    seat = scheduler._valve.ranks._group
    greatest = seat.greatest

    def lose_then_meet(words):
        if not has_looked.is_set():
            node.take(lost)
            has_looked.set()
        greatest(words)

    seat.greatest = lose_then_meet
    scheduler.turn()


def test_a_loss_between_two_looks_is_heeded_by_all_ranks_at_the_same_step(engine):
    lost, states = a_loss_between_two_looks(engine, joined=True)

    assert all(ours == theirs for ours, theirs in states)
    assert states[-1][0][0] == lost


def test_ranks_that_look_each_for_itself_differ(engine):
    _, states = a_loss_between_two_looks(engine, joined=False)

    assert any(ours != theirs for ours, theirs in states)


def test_a_step_without_an_event_costs_one_collective(engine):
    (first, second), _ = engine(pages=60)
    for scheduler in (first, second):
        scheduler.add("a", range(10), 30)
    together(*(lambda each=each: [each.turn() for _ in range(4)] for each in (first, second)))
    before = second._valve.ranks._group.collectives
    together(*(lambda each=each: [each.turn() for _ in range(10)] for each in (first, second)))

    assert second._valve.ranks._group.collectives - before == 10


def test_a_failure_on_one_rank_sends_everybody_back_on_all(engine):
    (first, second), (node,) = engine(pages=60)
    for scheduler in (first, second):
        scheduler.add("a", range(10), 12)
        scheduler.add("b", range(50, 60), 12)
    together(*(lambda each=each: [each.turn() for _ in range(6)] for each in (first, second)))
    second._valve.engine.forget = lambda blocks: 1 // 0
    node.take(first.pages_of(first.running_batch.reqs[0])[:1])
    ours, theirs = together(*(lambda each=each: turns(each, "ab") for each in (first, second)))

    assert ours == theirs
    assert first.done == second.done == undisturbed([("a", list(range(10)), 12), ("b", list(range(50, 60)), 12)])
    assert [each._valve.reconciler.mode for each in (first, second)] == [Mode.COARSE, Mode.COARSE]


def test_a_rank_that_failed_elsewhere_makes_all_let_go(engine):
    (first, second), (node,) = engine(pages=60)
    for scheduler in (first, second):
        scheduler.add("a", range(10), 12)
    second._valve.engine.launch = lambda batch: 1 // 0
    together(*(lambda each=each: turns(each, "a") for each in (first, second)))

    assert node.book()["mode"] == Mode.NONE
    assert [each._valve.reconciler.mode for each in (first, second)] == [Mode.NONE, Mode.NONE]


def test_no_rank_attaches_where_one_cannot(engine, monkeypatch):
    meeting = Meeting(2)
    (first, second), _ = engine(pages=60)
    monkeypatch.setattr(calls, "judge", lambda version, scheduler: Mode.FULL)
    monkeypatch.setattr(calls, "ranks_of", lambda scheduler, link: Ranks(link, Seat(meeting, int(scheduler is second))))
    second.token_to_kv_pool_allocator.get_kvcache = object
    link = first._valve.link

    def made(scheduler):
        with pytest.raises(Refused) as refused:
            calls._make(scheduler, link, "toy")
        return str(refused.value)

    ours, theirs = together(functools.partial(made, first), functools.partial(made, second))

    assert "another rank" in ours
    assert "object" in theirs


def test_ranks_that_could_find_a_valved_each_for_itself_are_refused(monkeypatch):
    alone = dict.fromkeys(("pp_size", "dp_size", "nnodes", "ep_size", "attn_cp_size", "dcp_size"), 1)
    rest = {"enable_hierarchical_cache": False, "disaggregation_mode": "null", "speculative_algorithm": None}
    config = SimpleNamespace(tp_size=2, enable_streaming_session=False, **alone, **rest)
    monkeypatch.setenv("VALVE_RUN_DIR", "/run/valve")
    refuse_configuration(config)
    monkeypatch.delenv("VALVE_RUN_DIR")

    with pytest.raises(Refused, match="tensor parallelism without VALVE_RUN_DIR"):
        refuse_configuration(config)


def test_a_restart_of_valved_gives_all_ranks_the_next_table(engine):
    (first, second), (node,) = engine(pages=60)
    for scheduler in (first, second):
        scheduler.add("a", range(10), 40)
    together(*(lambda each=each: [each.turn() for _ in range(4)] for each in (first, second)))
    node.take([50])
    node.stop()
    node.start()
    link = first._valve.link
    wait_for(lambda: link.session.number == 2, "attached again")
    node.take([51, 52])
    together(*(lambda each=each: [each.turn() for _ in range(4)] for each in (first, second)))

    assert [np.flatnonzero(each._valve.reconciler.withheld).tolist() for each in (first, second)] == [[50, 51, 52]] * 2
    assert [each._valve.reconciler.session.number for each in (first, second)] == [2, 2]
