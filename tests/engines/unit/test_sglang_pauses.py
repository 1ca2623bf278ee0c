"""Where an SGLang's loop pauses: the plugin's own functions around a toy scheduler's."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from grant_valved import GAP_MS, TPOT_MS, Valved, stop_time
from sglang_world import undisturbed
from toy_sglang import Mode, Req
from valve_abi import GrantAnswer
from valve_hook.policy.granting import GrantSettings
from valve_hook.policy.misses import MissSettings
from valve_hook.sglang import pauses, plugin

HASTY = GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=MissSettings(trial=0))
PAGES = 400


def requests(count=5, tokens=30):
    chance = random.Random(4)
    return [(f"r{number}", [chance.randrange(1000) for _ in range(6)], tokens) for number in range(count)]


class Played:
    """The toy with the plugin around it, and a valved that gives what it is asked for."""

    def __init__(self, scheduler, node, valved):
        self.scheduler, self.node, self.valved, self.flown = scheduler, node, valved, []
        choose, process = scheduler.get_next_batch_to_run, scheduler.process_batch_result
        scheduler.hooks = None  # the plugin calls them

        def plan(_, *, running_batch, last_batch):
            chosen = choose(running_batch, last_batch)
            return SimpleNamespace(batch_to_run=chosen, running_batch=scheduler.running_batch)

        scheduler.get_next_batch_to_run = lambda running, last: (
            plugin.around_choose(plan, scheduler, running_batch=running, last_batch=last).batch_to_run
        )
        scheduler.process_batch_result = lambda batch, result: plugin.around_result(
            lambda _, *given: process(*given), scheduler, batch, result
        )
        scheduler._valve.link.grant = valved.grant
        self.pauses = pauses.pauses_of(scheduler)
        self.pauses.asking._settings = HASTY
        self.pauses.wait = self.wait

    def wait(self, seconds):
        if not self.flown or self.flown[-1][0] != self.valved.seq:
            self.flown.append((self.valved.seq, len(self.scheduler.result_queue)))
            self.valved.answer(GrantAnswer.GIVEN)
        time.sleep(seconds)
        return False

    def run(self, work):
        for request in work:
            self.scheduler.add(*request)
        for turn in range(600):
            if self.scheduler.done.keys() >= {name for name, _, _ in work} and self.scheduler.is_idle:
                return dict(self.scheduler.done)
            plugin.around_ingest(lambda _: [], self.scheduler)
            # Prompts wait at first: ending a grant is a small part of the time to a first token.
            time.sleep(0.0005 if turn else 0.3)
            self.scheduler.turn()
        raise AssertionError("some are lost")


@pytest.fixture(params=[False, True], ids=["no overlap", "overlap"])
def played(request, world, monkeypatch):
    stop_time(monkeypatch)
    monkeypatch.setattr(plugin, "is_patched", lambda: False)
    monkeypatch.setattr(plugin, "nothing", lambda running: SimpleNamespace(batch_to_run=None, running_batch=running))
    monkeypatch.setattr(Req, "stream", True, raising=False)
    monkeypatch.setattr(Mode, "is_decode", lambda mode: mode is Mode.DECODE, raising=False)
    scheduler, node = world(overlap=request.param, pages=PAGES)
    scheduler.max_running_requests, scheduler.is_generation = 64, True
    scheduler.request_receiver = SimpleNamespace(recv_from_tokenizer=SimpleNamespace(poll=None), recv_from_rpc=None)
    valved = Valved()
    valved.consent(1_000.0, 1_000.0)
    yield Played(scheduler, node, valved)
    valved.close()


def test_pauses_begin_with_nothing_in_flight_and_change_no_token(played):
    work = requests()
    overlap = played.scheduler.enable_overlap

    assert played.run(work) == undisturbed(work, overlap=overlap)
    assert not played.pauses.asking.refused
    assert played.pauses.asking.sums.given > 0, played.pauses.asking.reasons
    assert {flying for _, flying in played.flown} == {0}
    assert played.pauses.asking.readers == 0


def test_surplus_that_the_cache_keeps_never_keeps_an_engine_from_pausing(played):
    """valved would have memory back, and has all that is free in whole columns."""
    played.node.aim(1)
    played.run(requests())
    given = played.pauses.asking.sums.given
    played.run([(f"{name} again", prompt, tokens) for name, prompt, tokens in requests()])

    assert played.node.offered()
    assert played.pauses.asking.sums.given > given


def test_without_consent_the_loop_is_untouched(played):
    played.valved.consent(TPOT_MS, GAP_MS, consented=0)
    work = requests()

    assert played.run(work) == undisturbed(work, overlap=played.scheduler.enable_overlap)
    assert played.flown == []


def test_nothing_is_asked_while_a_request_waits(played):
    for request in requests(2, tokens=400):
        played.scheduler.add(*request)
    for _ in range(20):
        plugin.around_ingest(lambda _: [], played.scheduler)
        played.scheduler.turn()
    asked = len(played.flown)
    played.scheduler.add("new", [1, 2, 3], 5)
    played.pauses.guard(played.pauses.before_ingest)

    assert not played.pauses.drains
    assert len(played.flown) == asked


def test_a_hook_that_fails_never_stops_the_loop(played):
    played.pauses.facts = None
    work = requests()

    assert played.run(work) == undisturbed(work, overlap=played.scheduler.enable_overlap)
    assert played.pauses.asking.refused
    assert played.flown == []


def test_an_engine_of_several_ranks_never_asks(played):
    assert pauses.why_not(played.scheduler, 2)
    assert not pauses.why_not(played.scheduler, 1)
