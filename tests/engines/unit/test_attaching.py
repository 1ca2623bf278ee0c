"""When an engine attaches, and what its workers are told while it has not."""

from __future__ import annotations

import errno
import os
import struct
import threading

import pytest
import toy_engine
from kv_node import ACK, TABLE, KvNode, restart, send, wait_for
from toy_engine import ToyScheduler
from toy_world import close, hooked, prompts, run
from valve_hook import Refused
from valve_hook.link import Attach, Link
from valve_hook.sessions import Sessions
from valve_hook.shared import Region
from valve_hook.vllm import calls, check
from valve_hook.wire import Mode

from valved.abi.kv_files import KvTable

COLUMNS = 8


@pytest.fixture
def fresh(monkeypatch):
    """How many requests were open each time that a page was made fresh."""
    seen, renew = [], Region.renew
    monkeypatch.setattr(Region, "renew", lambda page: (seen.append(page._open[0]), renew(page)))
    return seen


def build(monkeypatch, link, **knobs):
    """As vLLM builds a scheduler that the plugin has wrapped."""
    scheduler = ToyScheduler(hooks=calls, **knobs)
    monkeypatch.setattr(calls, "process_link", lambda: link)
    monkeypatch.setattr(calls, "_make_hook", lambda each, to: calls.VllmHook(each, to, Mode.FULL, "toy 1.0"))
    calls.built(scheduler)
    return scheduler


def test_an_engine_without_requests_is_never_left_unattached(node, link, monkeypatch):
    """Else a service without traffic keeps the whole card, and an offline one behind a queue cannot lend any."""
    monkeypatch.setattr(toy_engine.ToyScheduler, "__module__", "vllm.toy")
    scheduler = build(monkeypatch, link, blocks=64)
    reconciler = scheduler._valve.reconciler
    wait_for(lambda: reconciler.session is not None and node.book()["mode"] == Mode.FULL, "attached, without a request")
    node.aim(40)
    wait_for(lambda: len(node.offered()) >= 24, "what valved asks for is offered")

    assert not scheduler.requests


def test_a_scheduler_of_another_class_attaches_and_is_left_alone_until_its_first_step(node, link, monkeypatch):
    """It may still be building itself, and take blocks meanwhile."""
    scheduler = build(monkeypatch, link, blocks=64)
    wait_for(lambda: node.attached, "attached")
    ticked = []
    idle = link.on_tick
    link.on_tick = lambda: (idle(), ticked.append(1))
    wait_for(lambda: len(ticked) > 2, "the link's thread has looked")
    assert scheduler._valve.reconciler.session is None

    run(scheduler, prompts(1, 3), depth=1)
    assert scheduler._valve.reconciler.session is not None


def test_blocks_that_have_no_memory_are_withheld_before_the_first_step(tmp_path, monkeypatch):
    node = KvNode(tmp_path, columns=8, backed=30)
    link = Link(build="test", path=node.path, retry_s=0.02)
    link.start()
    scheduler = build(monkeypatch, link, blocks=64)
    scheduler.schedule()

    assert scheduler._valve.engine.withheld == set(range(30, 64))
    link.close()
    node.stop()


def notes(scheduler):
    return getattr(scheduler.schedule(), calls.UNHEEDED, "none")


def test_workers_are_told_that_the_table_is_heeded_only_where_it_is(node, link, monkeypatch):
    attached = hooked(node)
    assert notes(attached) == ""
    node.detach()
    assert notes(attached) == ""  # what it learned until then, it keeps to
    close(attached)

    node.attach_status = 22
    refused = build(monkeypatch, link)
    assert "KV_ATTACH was refused" in notes(refused)


@pytest.mark.parametrize("error", [check.MemoryRefused("two groups"), Refused("two groups"), ValueError("two groups")])
def test_workers_are_told_why_nobody_heeds_the_table(link, monkeypatch, error):
    def make(scheduler, _):
        raise error

    scheduler = ToyScheduler(hooks=calls)
    monkeypatch.setattr(calls, "process_link", lambda: link)
    monkeypatch.setattr(calls, "_make_hook", make)

    assert "two groups" in notes(scheduler)


def test_a_hook_that_fails_in_its_first_look_never_passes_for_attached(node, link, monkeypatch):
    scheduler = build(monkeypatch, link)
    monkeypatch.setattr(scheduler._valve.reconciler.__class__, "sync", lambda _: 1 / 0)

    assert "not attached" in notes(scheduler)


def test_a_table_is_never_seen_before_a_look_would_take_it_up(node, link, monkeypatch):
    """Who waits for the new session takes memory at once: a step that ends just then must find the table."""
    seen, begin = [], Sessions.begin
    monkeypatch.setattr(Sessions, "begin", lambda queue, one: (seen.append(link.session), begin(queue, one)))
    wanted = Attach(engine="toy 1", mode=Mode.FULL, blocks=40, block_tokens=4, rows=8, row_blocks=16, ranks=1)
    first = link.attach(wanted, 200)
    node.stop()
    node.start()
    wait_for(lambda: link.session is not first, "attached again")

    assert seen == [None, first]


class LateToClear(threading.Event):
    """Its owner is off the CPU just when it forgets the last answer, for as long as the thread may answer meanwhile."""

    def clear(self):
        wait_for(lambda: self.link.wanted is None or self.is_set(), "answered")
        super().clear()


def test_an_answer_is_never_forgotten_because_it_came_at_once(node, link):
    """The first step then waits for half a minute for what it has."""
    link._answered = LateToClear()
    link._answered.link = link
    link.propose(Attach(engine="toy 1", mode=Mode.FULL, blocks=40, block_tokens=4, rows=8, row_blocks=16, ranks=1))

    wait_for(lambda: link.session is not None, "attached")
    assert link._answered.wait(200)


def middle_of_a_step(scheduler, node, fresh):
    """valved dies and comes back while the engine's thread is busy."""
    fresh.clear()
    restart(node, scheduler)
    before = len(fresh)
    wait_for(lambda: len(fresh) > before, "the new page is renewed")


@pytest.mark.parametrize("fails", [False, True])
def test_a_vllm_with_open_requests_never_passes_for_idle_in_a_new_connection(node, fresh, fails):
    scheduler = hooked(node, blocks=64)
    if fails:
        scheduler._valve.while_idle = scheduler._valve._tend = lambda: 1 / 0
    scheduler.add("a", range(6), 40)
    scheduler.add("b", range(20, 26), 40)
    scheduler.launch()
    middle_of_a_step(scheduler, node, fresh)

    assert set(fresh) == {2}
    close(scheduler)


def test_an_sglang_with_open_requests_never_passes_for_idle_in_a_new_connection(world, fresh):
    scheduler, node = world()
    scheduler.add("a", range(6), 40)
    scheduler.add("b", range(20, 26), 40)
    scheduler.turn()
    scheduler.turn()
    middle_of_a_step(scheduler, node, fresh)

    assert set(fresh) == {2}


def test_a_vllm_with_requests_before_its_first_step_never_passes_for_idle(node, fresh, monkeypatch):
    link = Link(build="test", path=node.path, retry_s=0.02)
    scheduler = build(monkeypatch, link, blocks=64)
    scheduler.add("a", range(6), 4)
    link.start()  # only now: a page of the time before the request is rightly at 0
    wait_for(lambda: len(fresh) > 1, "the page is renewed")

    assert set(fresh) == {1}
    link.close()


def test_a_mode_never_stands_in_a_book_that_no_step_has_told_of(node, monkeypatch):
    """valved maps memory at once for an engine without a step. This one is in the middle of one, and its hook fails
    between taking a new table over and the step that tells.
    """
    scheduler = hooked(node, blocks=64)
    scheduler.add("a", range(6), 40)
    scheduler.launch()
    restart(node, scheduler)
    with monkeypatch.context() as broken:
        broken.setattr(type(scheduler._valve.step_limit), "heed", lambda *_: 1 / 0)
        calls.before_schedule(scheduler)
    assert scheduler._valve.reconciler.session is scheduler._valve.link.session

    assert (node.book()["mode"], node.book()["steps"]) == (Mode.NONE, 0)
    scheduler.launch()
    assert node.book()["mode"] == Mode.COARSE
    close(scheduler)


def test_a_book_never_shows_a_mode_before_its_step(node):
    scheduler = hooked(node, blocks=64)
    seen = []

    class Words(list):
        def __setitem__(self, at, word):
            super().__setitem__(at, word)
            seen.append((self[0], self[3]))

    book = scheduler._valve.link.session.book
    book.gauges = Words([0] * 4)
    book.write_gauges(Mode.FULL, 1, 2, 3)

    assert seen[-1] == (Mode.FULL, 3)
    assert all(steps or not mode for mode, steps in seen)
    close(scheduler)


KV_MAKE, BROUGHT = 29, 0xFFFF | 1 << 17


class MakingNode(KvNode):
    """Of a valved that has hooks bring the memory of their tables."""

    def __init__(self, folder, features=BROUGHT, status=0):
        self.bare, self.status = [], status
        super().__init__(folder, features=features)

    def _answer(self, link, kind, seq, body):
        if kind == KV_MAKE and self.status:
            send(link, ACK, struct.pack("<II", self.status, 0), seq)
        elif kind == KV_MAKE:
            blocks, block_tokens = struct.unpack_from("<II", body, 8)
            self.bare.append(KvTable(blocks, block_tokens, is_bare=True))
            told = struct.pack("<HHIII", 1, 0, self.bare[-1].bytes, 0, 0)
            send(link, TABLE, told, seq, os.dup(self.bare[-1].fd))
        else:
            super()._answer(link, kind, seq, body)


def attached_by(node):
    link = Link(build="test", path=node.path, retry_s=0.02)
    link.start()
    wanted = Attach(engine="t", mode=Mode.FULL, blocks=1 << 19, block_tokens=16, rows=4, row_blocks=4, ranks=1)
    try:
        return link.attach(wanted, wait_s=200)
    finally:
        link.close()
        node.stop()


def test_a_hook_never_attaches_before_it_has_made_each_page_of_its_table(tmp_path):
    node = MakingNode(tmp_path)

    assert attached_by(node) is not None
    assert [table.take_pages() for table in node.bare] == [True]


def test_a_hook_that_gets_no_bare_table_never_stays_unattached(tmp_path):
    node = MakingNode(tmp_path, status=errno.EDQUOT)

    assert attached_by(node) is not None


def test_a_hook_never_asks_an_older_valved_for_a_bare_table(tmp_path):
    """It would end the connection: it knows no such message."""
    node = MakingNode(tmp_path, features=0xFFFF)

    assert attached_by(node) is not None
    assert not node.bare
