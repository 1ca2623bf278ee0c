"""A process has one link to valved, and may build several engines: one after another, or beside one another."""

from __future__ import annotations

import gc
import weakref

import pytest
from kv_node import wait_for
from toy_engine import ToyScheduler
from valve_hook.link import Attach, BlockLayout, Link, Tensor
from valve_hook.shared import Lifecycle
from valve_hook.vllm import calls, check
from valve_hook.vllm.progress import Progress
from valve_hook.wire import Mode

COLUMNS = 8


def layout(blocks, base=0):
    return BlockLayout(blocks=blocks, block_tokens=4, tensors=[Tensor(base=base, block_stride=16, block_bytes=16)])


def make(scheduler, link):
    """`calls._make_hook` without a vLLM to judge."""
    try:
        check.refuse_second(link)
    except check.MemoryRefused:
        return Progress(scheduler, link)
    return calls.VllmHook(scheduler, link, Mode.FULL, "toy 1.0")


def build(monkeypatch, link, blocks):
    """A worker asks, makes its cache and tells where it lies; then the scheduler is built."""
    monkeypatch.setattr(calls, "process_link", lambda: link)
    monkeypatch.setattr(calls, "_make_hook", make)
    if not link.is_taken():
        link.register_layout(layout(blocks, base=4096 * blocks))
    scheduler = ToyScheduler(hooks=calls, blocks=blocks)
    calls.built(scheduler)
    return scheduler


@pytest.mark.parametrize("blocks", [64, 80])
def test_an_engine_that_is_built_anew_never_heeds_its_predecessor_s_table(node, link, monkeypatch, blocks):
    first = build(monkeypatch, link, 64)
    calls.before_schedule(first)
    node.take(list(range(1, 40)))
    calls.before_schedule(first)
    node.give(list(range(1, 40)))
    gone = weakref.ref(first)
    del first

    second = build(monkeypatch, link, blocks)
    calls.before_schedule(second)

    assert gone() is None
    assert second._valve.unheeded == ""
    reconciler = second._valve.reconciler
    assert reconciler.mode is Mode.FULL
    assert len(reconciler.withheld) == blocks
    assert not reconciler.withheld.any()
    node.take([7])
    calls.before_schedule(second)
    assert reconciler.withheld.nonzero()[0].tolist() == [7]


def test_two_engines_of_a_process_never_heed_one_table(node, link, monkeypatch):
    first = build(monkeypatch, link, 64)
    calls.before_schedule(first)
    node.take(list(range(1, 40)))
    calls.before_schedule(first)
    second = build(monkeypatch, link, 80)
    calls.before_schedule(second)
    calls.before_schedule(first)

    assert isinstance(second._valve, Progress)
    assert first._valve.reconciler.session.number == 1
    assert first._valve.reconciler.withheld.nonzero()[0].tolist() == list(range(1, 40))


class LateLock:
    """A lock that was another thread's until now."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def __enter__(self):
        self.meanwhile()

    def __exit__(self, *_):
        pass


def test_the_end_of_an_engine_never_takes_the_wishes_of_the_next_one(tmp_path):
    """Built anew while the link's thread waits for the lock to forget the first: it had no table ever after."""
    link, first, second = Link(build="test", path=tmp_path / "nobody"), Engine(), Engine()
    wanted = Attach(engine="toy", mode=Mode.FULL, blocks=64, block_tokens=4, rows=1, row_blocks=1, ranks=1)
    link.owner = weakref.ref(first)
    del first
    gc.collect()

    def build_second():
        link.owner, link.wanted = weakref.ref(second), wanted

    link._lock = LateLock(build_second)
    link._bury()

    assert link.owner() is second
    assert link.wanted is wanted


class Page:
    def __init__(self):
        self.seen = ()

    def write(self, *numbers):
        self.seen = numbers

    def write_tokens(self, tokens):
        self.seen = (*self.seen[:2], tokens)

    def renew(self):
        pass


class Engine:
    """Something to refer to."""


def test_an_idle_engine_never_hides_what_another_one_of_its_process_has_open():
    page, lifecycle = Page(), Lifecycle()
    lifecycle.begin(page)
    one, other = Engine(), Engine()

    lifecycle.tell(5, 1, 10, one)
    lifecycle.tell(0, 7, 20, other)
    lifecycle.tell_beside(9, 7, 25, other)

    assert page.seen == (5, 8, 35)
    lifecycle.begin(fresh := Page())
    assert fresh.seen == (5, 8, 35)


def test_an_engine_that_is_gone_never_holds_a_gpu_and_never_takes_back_what_it_counted():
    page, lifecycle = Page(), Lifecycle()
    lifecycle.begin(page)
    one = Engine()
    lifecycle.tell(5, 1, 10, one)

    del one
    gc.collect()
    lifecycle.renew()

    assert page.seen == (0, 6, 10)
    lifecycle.tell(1, 0, 0, other := Engine())
    assert page.seen == (1, 6, 10)
    assert other is not None


def test_a_link_never_keeps_an_engine_alive(node, link, monkeypatch):
    scheduler = build(monkeypatch, link, 64)
    calls.before_schedule(scheduler)
    gone = weakref.ref(scheduler)
    del scheduler
    gc.collect()

    assert gone() is None
    wait_for(lambda: link.wanted is None and link.session is None, "its wishes are forgotten")
