"""What SGLang's hook gives back: never what a step in flight may still touch, whatever has failed before."""

from __future__ import annotations

import pytest
from sglang_world import under_way
from valve_hook.sglang import calls, engine, free_pages
from valve_hook.sglang.calls import SglangHook
from valve_hook.sglang.steps import StepLedger

FAILS = [
    (engine, "launched"),
    (StepLedger, "begin_step"),
    (engine.SglangEngine, "launch"),
    (SglangHook, "after_choose"),
    (calls, "cannot_begin_again"),
]


def fail(*_, **__):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("owner", "name"), FAILS, ids=[name for _, name in FAILS])
def test_a_page_of_a_step_that_could_not_be_noted_is_never_offered_before_it_is_over(
    world, monkeypatch, owner, name, overlap
):
    """valved unmaps at once what is offered. The client of its request has left, and the next step is under way."""
    scheduler, node, last = under_way(world, monkeypatch, overlap=overlap)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        scheduler.add("d", range(300, 310), 20)
        scheduler.turn()
        scheduler.abort("a")
        for _ in range(3):
            scheduler.turn()
    for _ in range(12):
        scheduler.turn()

    assert last in node.offered()
    assert scheduler._valve.reconciler.receipts.failures > 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["come_in", "launch", "come_in launch"])
def test_a_step_whose_output_could_not_be_told_is_never_in_flight_for_ever(world, monkeypatch, name, overlap):
    """The engine has nothing left to do, and no later step tells that it is over: nothing would be offered."""
    monkeypatch.setattr(free_pages, "OFFER_EVERY", 1)
    scheduler, node = world(pages=60, columns=60, overlap=overlap)
    scheduler.add("a", range(10), 12)
    for _ in range(4):
        scheduler.turn()
    with monkeypatch.context() as patched:
        for each in name.split():
            patched.setattr(engine.SglangEngine, each, fail)
        scheduler.abort("a")
        scheduler.turn()
        scheduler.turn()
    while not scheduler.is_idle:
        scheduler.turn()
    node.aim(4)
    for _ in range(4):
        scheduler.turn()

    assert not scheduler._valve.engine.ledger.flying
    assert len(node.offered()) >= 40
