"""Whatever memory is taken and given back, and whenever: every request ends with the very tokens it would have had."""

from __future__ import annotations

import pytest
from kv_node import KvNode
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook.wire import Mode


def undisturbed(work, depth, **knobs):
    return run(ToyScheduler(**knobs), work, depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [34, 60])
def test_tokens_are_the_same_after_any_reclaims(node, depth, seed, blocks):
    """Synchronous, async and deeper; prefix sharing, chunked prefill and preemption for want of memory."""
    work = prompts(seed, 24)
    expected = undisturbed(work, depth, blocks=400)
    scheduler = hooked(node, blocks=blocks)
    reclaimer = Reclaimer(node, scheduler, seed)

    done = run(scheduler, work, depth=depth, reclaim=reclaimer)

    assert reclaimer.events > 5
    assert expected == done
    reclaimer.give_all()
    scheduler.schedule()
    scheduler.check_integrity()
    assert node.book()["failures"] == 0
    close(scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_without_the_hook_the_same_reclaims_change_tokens(tmp_path, depth):
    """The control: the campaign above can fail."""
    node = KvNode(tmp_path, columns=10)
    work = prompts(1, 24)
    hooked_one = hooked(node, blocks=60)
    scheduler = ToyScheduler(blocks=60)
    reclaimer = Reclaimer(node, scheduler, 1)

    done = run(scheduler, work, depth=depth, reclaim=reclaimer)

    assert sum(done[name] != tokens for name, tokens in undisturbed(work, depth, blocks=400).items()) > 5
    close(hooked_one)
    node.stop()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_coarse_way_keeps_tokens_too(node, depth):
    work = prompts(3, 24)
    scheduler = hooked(node, Mode.COARSE, blocks=60)
    reclaimer = Reclaimer(node, scheduler, 3, every=10)

    done = run(scheduler, work, depth=depth, reclaim=reclaimer)

    assert reclaimer.events > 3
    assert undisturbed(work, depth, blocks=400) == done
    close(scheduler)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_are_aborted_and_sent_again_get_their_tokens(node, depth, seed):
    """An aborted request's blocks are hashed and free before its last step's output is in."""
    work = prompts(seed, 24)
    expected = undisturbed(work, depth, blocks=400)
    scheduler = hooked(node, blocks=60)
    reclaimer = Reclaimer(node, scheduler, seed, every=3)
    again = {name: (prompt, tokens) for name, prompt, tokens in work}

    def abort_some(step: int) -> None:
        for request in list(scheduler.running)[: reclaimer.chance.randrange(3)] if step % 3 == 0 and step < 60 else []:
            name = request.request_id
            scheduler.abort(name)
            scheduler.add(f"{name}+", *again[name.rstrip("+")])

    done = run(scheduler, work, depth=depth, reclaim=reclaimer, between=abort_some)

    assert any(name.endswith("+") for name in done)
    assert expected == {name.rstrip("+"): tokens for name, tokens in done.items()}
    close(scheduler)
