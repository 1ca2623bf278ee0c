"""A toy SGLang hooked to a fake node, for tests: `world` makes one, `run` takes its requests to their end."""

from __future__ import annotations

import random
import sys

import pytest
from kv_node import KvNode, wait_for
from sglang_modules import sglang_modules
from toy_sglang import Scheduler
from valve_hook.link import Link
from valve_hook.sglang import calls, free_pages
from valve_hook.sglang.ranks import Alone
from valve_hook.wire import Mode

ALL = 400


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Makes schedulers with the hook attached to a node of their own."""
    schedulers, nodes = {}, []

    def make(*, mode=Mode.FULL, columns=10, **knobs):
        (tmp_path / str(len(nodes))).mkdir()
        nodes.append(KvNode(tmp_path / str(len(nodes)), columns=columns))
        scheduler = Scheduler(hooks=calls, **knobs)
        schedulers[id(scheduler.tree)] = scheduler
        link = Link(build="test", path=nodes[-1].path, retry_s=0.02, gone_s=0.0)
        link.start()
        scheduler._valve = calls._current = calls.SglangHook(scheduler, Alone(link), mode)
        scheduler._valve.attach("toy")
        wait_for(lambda: link.session is not None, "attached")
        return scheduler, nodes[-1]

    monkeypatch.setattr(calls, "sparing", calls.sparing)  # what a test may replace is put back
    for name, module in sglang_modules(lambda tree: schedulers[id(tree)]).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(calls, "_current", None)
    yield make
    for scheduler in schedulers.values():
        scheduler._valve.link.close()
    for node in nodes:
        node.stop()


def run(scheduler, work, reclaim=None, max_turns=3000):
    """All requests to their end, and then until the engine is idle; `reclaim` is called in the middle of each step."""
    for request in work:
        scheduler.add(*request)
    return finish(scheduler, [name for name, _, _ in work], reclaim, max_turns)


def finish(scheduler, names, reclaim=None, max_turns=3000):
    for _ in range(max_turns):
        if scheduler.done.keys() >= set(names) and scheduler.is_idle:
            return dict(scheduler.done)
        scheduler.turn(reclaim)
    raise AssertionError(f"{set(names) - scheduler.done.keys()} are lost")


def undisturbed(work, **knobs):
    return run(Scheduler(**{"pages": ALL, **knobs}), work)


class Reclaimer:
    """Takes and gives random pages in the middle of steps, in memory and in the table."""

    def __init__(self, node, scheduler, seed, *, every=3, most=10):
        self.node, self.scheduler, self.chance = node, scheduler, random.Random(seed)
        self.every, self.most, self.events, self.taken = every, most, 0, []

    def __call__(self):
        if self.chance.randrange(self.every):
            return
        self.events += 1
        pages = len(self.scheduler.memory)
        rest = [page for page in range(1, pages) if page not in self.taken]
        if self.taken and (self.chance.random() < 0.5 or len(rest) < pages // 2):
            back = self.chance.sample(self.taken, self.chance.randrange(1, len(self.taken) + 1))
            give(self.node, self.scheduler, back)
            self.taken = [page for page in self.taken if page not in back]
            return
        lost = self.chance.sample(rest, self.chance.randrange(1, self.most))
        lose(self.node, self.scheduler, lost)
        if self.chance.random() < 0.3:
            give(self.node, self.scheduler, lost)
        else:
            self.taken += lost


def lose(node, scheduler, pages):
    scheduler.poison(pages)
    node.take(pages)


def give(node, scheduler, pages):
    scheduler.back(pages)
    node.give(pages)


def under_way(world, monkeypatch, **knobs):
    """Three requests are decoded, and pages are wanted back. No page of a step in flight is ever offered: valved unmaps
    at once what is. With the last page of request a."""
    monkeypatch.setattr(free_pages, "OFFER_EVERY", 1)
    scheduler, node = world(pages=60, columns=60, **knobs)
    used, run_step, choose = [], scheduler.run, scheduler.get_next_batch_to_run

    def noting(batch, reclaim):
        used.append({page for each in batch.reqs for page in scheduler.pages_of(each)})
        return run_step(batch, reclaim)

    def looking(*batches):
        chosen = choose(*batches)
        if scheduler.result_queue:
            assert not set(node.offered()) & used[-1]
        return chosen

    monkeypatch.setattr(scheduler, "run", noting)
    monkeypatch.setattr(scheduler, "get_next_batch_to_run", looking)
    for rid, start in (("a", 0), ("b", 100), ("c", 200)):
        scheduler.add(rid, range(start, start + 10), 40)
    for _ in range(6):
        scheduler.turn()
    node.aim(4)
    return scheduler, node, scheduler.pages_of(request_of(scheduler, "a"))[-1]


def request_of(scheduler, rid):
    batches = [each for each in (scheduler.running_batch, scheduler.last_batch) if each is not None]
    found = [each for batch in batches for each in batch.reqs] + scheduler.waiting_queue + [scheduler.chunked_req]
    return next(each for each in found if each is not None and each.rid == rid)
