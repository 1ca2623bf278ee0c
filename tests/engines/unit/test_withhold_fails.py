"""SGLang's `withhold` raises when its work is done, at one loss after another: pages without memory reach nobody."""

from __future__ import annotations

import numpy as np
import pytest
from sglang_world import Reclaimer, finish, give, lose, run, undisturbed
from toy_world import prompts
from valve_hook.sglang.engine import SglangEngine
from valve_hook.wire import Mode


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("nth", [1, 3, 8])
def test_pages_that_were_withheld_before_it_raised_never_reach_a_request(world, monkeypatch, nth, overlap):
    """The loss is handled a second time, the coarse way: what was taken off the free list stays off, once."""
    work = prompts(3, 16)
    scheduler, node = world(overlap=overlap)
    hook, calls = scheduler._valve, []
    reconciler, free_pages = hook.reconciler, hook.engine.free_pages
    withhold = SglangEngine.withhold

    def late(each, blocks):
        withhold(each, blocks)
        if len(blocks):
            calls.append(len(blocks))
            if len(calls) == nth:
                raise RuntimeError("on purpose")

    monkeypatch.setattr(SglangEngine, "withhold", late)
    done = run(scheduler, work, Reclaimer(node, scheduler, 3))
    expected = undisturbed(work)

    assert len(calls) > nth
    assert reconciler.receipts.failures == 1
    assert reconciler.told_mode is Mode.COARSE
    assert done == expected

    lose(node, scheduler, [1, 2, 3])
    scheduler.add("last", *work[0][1:])
    finish(scheduler, ["last"])
    off = np.flatnonzero(free_pages.taken)

    assert done | {"last": expected[work[0][0]]} == scheduler.done
    assert np.array_equal(reconciler.withheld, free_pages.withheld)
    assert np.array_equal(free_pages.taken, free_pages.withheld)
    assert not set(off.tolist()) & set(free_pages.numbers().tolist())
    give(node, scheduler, off.tolist())
    scheduler.add("again", *work[0][1:])
    finish(scheduler, ["again"])
    assert not free_pages.taken.any()
