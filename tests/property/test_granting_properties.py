"""What granting promises for any history: every refusal holds, and a grant stays within its bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from valve_hook.policy.clients import ClientKind, ClientSettings
from valve_hook.policy.credits import PACE, Credits
from valve_hook.policy.granting import (
    LEAST_COSTS,
    MOST_COSTS,
    EngineFacts,
    GrantCost,
    GrantPolicy,
    GrantReason,
    GrantSettings,
    Target,
)
from valve_hook.policy.misses import MissSettings, MissStop, TimeReserve

STEP_MS = 6.0
milliseconds = st.floats(0.05, 10.0)
costs = st.builds(GrantCost, stop_ms=milliseconds, wake_ms=milliseconds, bubble_ms=milliseconds, damage_ms=milliseconds)
CHEAP = GrantCost(stop_ms=0.1, wake_ms=0.1, bubble_ms=0.05, damage_ms=0.05)
READY = MissSettings(trial=0)


def policy_of(target=None, cost=CHEAP, **more):
    """A policy that knows its step and has learnt that its service keeps the target."""
    settings = GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=READY, **more)
    policy = GrantPolicy(target or Target(tpot_ms=40.0, gap_ms=100.0), cost, settings=settings)
    for _ in range(8):
        policy.stepped(1, 100, STEP_MS, 0.5)
    return policy


def facts_of(**more):
    facts = {"running": 1, "context_tokens": 100, "kv_used": 100, "kv_pool": 10_000, "kv_mapped": 10_000}
    return EngineFacts(**{**facts, "max_num_seqs": 256, **more})


def ahead(policy, tokens=20, request=1, *, streamed=True, arrived_ms=-2_000.0):
    """One request that got `tokens` tokens at full speed; the time after them."""
    policy.arrived(request, arrived_ms)
    now = 10.0
    policy.first_token(request, now, streamed=streamed)
    for _ in range(tokens):
        now += STEP_MS
        policy.delivered(now)
    return now


REFUSING = {
    GrantReason.NO_REQUESTS: {"running": 0},
    GrantReason.PREFILL: {"prefilling": 1},
    GrantReason.WAITING: {"waiting": 1},
    GrantReason.RECLAIM: {"reclaim_pending": True},
    GrantReason.KV: {"kv_used": 2_501},
    GrantReason.SEQUENCES: {"running": 129},
    GrantReason.OTHERS: {"others_busy": True},
}


def test_a_service_that_is_ahead_is_granted_time():
    policy = policy_of()
    now = ahead(policy)
    assert policy.decide(now, facts_of()).reason is GrantReason.GRANTED


@pytest.mark.parametrize("reason", REFUSING)
def test_no_grant_against_a_fact_of_the_engine(reason):
    policy = policy_of()
    now = ahead(policy)
    decision = policy.decide(now, facts_of(**REFUSING[reason]))
    assert (decision.grant_ms, decision.reason) == (0.0, reason)


@given(st.sampled_from(sorted(REFUSING, key=str)), st.integers(0, 400), costs, st.floats(1.0, 500.0))
def test_no_credit_buys_off_a_refusal(reason, tokens, cost, gap_ms):
    policy = policy_of(Target(tpot_ms=40.0, gap_ms=gap_ms), cost)
    now = ahead(policy, tokens)
    assert policy.decide(now, facts_of(**REFUSING[reason])).grant_ms == 0.0


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 10_000))
def test_kv_in_use_beyond_its_bound_is_never_granted_beside(used, mapped, pool):
    policy = policy_of()
    now = ahead(policy)
    decision = policy.decide(now, facts_of(kv_used=used, kv_mapped=mapped, kv_pool=pool))
    assert (decision.grant_ms > 0) == (used <= min(0.25 * pool, mapped))


@given(
    st.floats(7.0, 100.0), st.floats(1.0, 500.0), costs, st.integers(0, 300), st.floats(0.0, 60.0), st.booleans(),
    st.floats(0.0, 300.0),
)  # fmt: skip
def test_a_grant_stays_within_credit_gap_and_cost(tpot_ms, gap_ms, cost, tokens, since_ms, streamed, burst_ms):
    policy = policy_of(Target(tpot_ms=tpot_ms, gap_ms=gap_ms), cost)
    policy.reserve.burst(burst_ms)
    now = ahead(policy, tokens, streamed=streamed) + since_ms
    decision = policy.decide(now, facts_of())
    event("granted" if decision.grant_ms else decision.reason.name)
    if decision.grant_ms == 0.0:
        return
    step_hi = STEP_MS + 0.5 + cost.after_ms
    due = 10.0 + PACE * tpot_ms * (tokens + 1)
    assert now + decision.grant_ms + step_hi + policy.reserve.ms <= due + 1e-6
    assert decision.grant_ms >= LEAST_COSTS * cost.total_ms
    if streamed:
        assert since_ms + decision.grant_ms + step_hi <= gap_ms + 1e-6
        assert decision.grant_ms >= min(MOST_COSTS * cost.total_ms, gap_ms - since_ms - step_hi) - 1e-6
    else:
        assert decision.grant_ms <= policy.settings.longest_ms


@given(st.integers(0, 200), st.integers(1, 30))
def test_nothing_is_granted_while_any_request_is_late(tokens, others):
    policy = policy_of()
    now = ahead(policy, tokens)
    for other in range(others):
        policy.first_token(100 + other, now)
    late = now + 41.0
    for request in (1, *(100 + other for other in range(1, others))):
        policy.credits.drop(request)
        policy.first_token(request, late)
    assert policy.decide(late, facts_of(running=others + 1)).grant_ms == 0.0


@given(st.floats(1.0, 90.0))
def test_no_grant_where_a_chunk_step_is_longer_than_the_gap(gap_ms):
    policy = policy_of(Target(tpot_ms=400.0, gap_ms=gap_ms))
    policy.stepped(1, 100, gap_ms + 1.0, 0.5, prefill=True)
    policy.stepped(1, 100, STEP_MS, 0.5)
    now = ahead(policy, 200)
    assert policy.decide(now, facts_of()).reason is GrantReason.CHUNK


@pytest.mark.parametrize("kind", [ClientKind.CLOSED_LOOP, ClientKind.BATCH])
def test_no_grant_to_clients_for_whom_latency_is_throughput(kind):
    policy = policy_of(clients=ClientSettings(declared=kind))
    now = ahead(policy)
    assert policy.decide(now, facts_of()).reason is GrantReason.CLIENTS


@given(st.integers(2, 12), st.floats(0.0, 40.0))
def test_clients_that_answer_every_end_are_a_closed_loop(open_requests, think_ms):
    policy = policy_of()
    now = 0.0
    for request in range(200):
        now += 300.0
        if request >= open_requests:
            policy.finished(request - open_requests, now)
        policy.arrived(request, now + think_ms)
    assert policy.clients.kind is ClientKind.CLOSED_LOOP


@given(st.lists(st.floats(60.0, 5_000.0), min_size=64, max_size=200))
def test_clients_that_come_apart_are_not_refused(gaps):
    policy = policy_of()
    now = 0.0
    for request, gap in enumerate(gaps):
        now += gap
        policy.arrived(request, now)
    assert policy.clients.kind is ClientKind.OPEN


def test_requests_that_come_in_one_clump_are_a_batch():
    policy = policy_of()
    for batch in range(3):
        for request in range(60):
            policy.arrived(100 * batch + request, 180_000.0 * batch + request)
    assert policy.clients.kind is ClientKind.BATCH


@given(st.lists(st.booleans(), max_size=3_000))
def test_too_many_misses_stop_granting_until_the_service_alone_is_clean(history):
    rules = MissSettings(window=100, share=0.02, trial=10, again=50)
    stop = MissStop(rules)
    clean, recent, needed = 0, [], rules.trial
    for missed in history:
        was_open = stop.is_open
        stop.finished(missed)
        if was_open:
            recent = [*recent, missed][-rules.window :]
            assert stop.is_open == (sum(recent) <= 2)
            if not stop.is_open:
                clean, needed = 0, rules.again
        else:
            clean = 0 if missed else clean + 1
            assert stop.is_open == (clean >= needed)
            if stop.is_open:
                recent = []


def test_nothing_is_granted_before_the_service_alone_has_kept_its_target():
    policy = GrantPolicy(Target(tpot_ms=40.0), CHEAP, settings=GrantSettings(least_worth=-1e9))
    for _ in range(8):
        policy.stepped(1, 100, STEP_MS, 0.5)
    now = ahead(policy, 100)
    assert policy.decide(now, facts_of()).reason is GrantReason.MISSES


@given(st.lists(st.one_of(st.floats(1.0, 1_000.0), st.booleans()), max_size=200))
def test_the_reserve_stays_between_its_floor_and_its_ceiling(events):
    rules = MissSettings()
    reserve = TimeReserve(rules)
    for seen in events:
        if isinstance(seen, bool):
            before = reserve.ms
            reserve.finished(seen)
            assert reserve.ms >= before if seen else reserve.ms <= before
        else:
            reserve.burst(seen)
        burst = reserve._bursts.value
        assert rules.floor * burst <= reserve.ms <= rules.ceiling * burst


def test_in_balance_the_reserve_lets_the_allowed_share_miss():
    rules = MissSettings(factor=1.0, up_ms=1.0)
    reserve = TimeReserve(rules)
    for _ in range(16):
        reserve.burst(100.0)
    start = reserve.ms
    reserve.finished(True)
    for _ in range(199):
        reserve.finished(False)
    assert reserve.ms == pytest.approx(start, abs=1e-9)


@given(st.floats(0.0, 45.0))
def test_the_gate_is_never_asked_for_more_grants_than_its_budget(step_ms):
    policy = policy_of()
    policy.settings = replace(policy.settings, grants_per_s=20.0)
    now = ahead(policy, 400)
    times = []
    for _ in range(60):
        if policy.decide(now, facts_of()).grant_ms > 0:
            times.append(now)
        now += 1.0 + step_ms
        policy.delivered(now)
    assert all(later - sooner >= 50.0 for sooner, later in pairwise(times))


def test_a_service_below_the_least_worth_is_not_asked():
    policy = policy_of()
    policy.settings = replace(policy.settings, least_worth=0.01)
    # A request a minute: the service is idle nearly always, and idle time is offline's already.
    for request in range(60):
        policy.arrived(request, 60_000.0 * request)
        policy.first_token(request, 60_000.0 * request + 10.0)
        policy.delivered(60_000.0 * request + 16.0)
        policy.finished(request, 60_000.0 * request + 16.0)
    assert policy.expected_worth() < 0.01
    policy.first_token(1_000, 4e6)
    now = 4e6
    for _ in range(50):
        now += STEP_MS
        policy.delivered(now)
    assert policy.decide(now, facts_of()).reason is GrantReason.WORTH


def test_no_grant_where_ending_it_would_delay_first_tokens_too_much():
    dear = GrantCost(stop_ms=2.0, wake_ms=0.1, bubble_ms=1.0, damage_ms=1.0)
    policy = policy_of(Target(tpot_ms=12.0, gap_ms=200.0), dear)
    now = ahead(policy, 100, arrived_ms=0.0)
    assert policy.decide(now, facts_of()).reason is GrantReason.TTFT


@given(st.floats(1.0, 4.0), st.floats(1.05, 3.0))
def test_no_target_up_to_three_times_what_prompts_make_of_a_token_is_taken_for_a_far_one(prompts, times):
    """Between the steps of a decode come prompts: its natural pace is that of whole requests, not that of its steps."""
    dear = GrantCost(stop_ms=3.0, wake_ms=0.1, bubble_ms=2.0, damage_ms=2.0)  # between 5 and 10 % of a first token
    alone_ms = (STEP_MS + 0.5) * prompts
    trial = MissSettings(trial=4)
    policy = GrantPolicy(
        Target(tpot_ms=times * alone_ms, gap_ms=400.0),
        dear,
        settings=GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=trial),
    )
    for _ in range(8):
        policy.stepped(1, 100, STEP_MS, 0.5)
    for request in range(5):
        now = 5_000.0 * request
        policy.arrived(request, now)
        now += 100.0
        policy.first_token(request, now)
        for _ in range(20):
            now += alone_ms
            policy.delivered(now)
        if request < 4:
            policy.finished(request, now)
    assert policy.decide(now, facts_of()).reason is GrantReason.TTFT


tokens_of = st.lists(
    st.tuples(st.floats(0.1, 50.0), st.lists(st.integers(0, 4), max_size=5, unique=True), st.integers(0, 3)),
    min_size=1,
    max_size=40,
)


@given(tokens_of, st.floats(5.0, 60.0))
def test_shared_due_times_equal_those_of_each_request_alone(steps, tpot_ms):
    """The shift that all requests share must give what the formula gives one by one."""
    credits = Credits(tpot_ms)
    now, first, tokens, last = 0.0, {}, {}, {}
    for number, (passed, skipped, more) in enumerate(steps):
        now += passed
        extra = {request: more for request in first if more and request not in skipped}
        credits.delivered(now, skipped, extra)
        for request in first:
            if request not in skipped:
                tokens[request] += 1 + extra.get(request, 0)
                last[request] = now
        if number < 5:
            credits.begin(number, now)
            first[number], tokens[number], last[number] = now, 0, now
        dues = [first[request] + PACE * tpot_ms * (tokens[request] + 1) for request in first]
        assert credits.least_due_ms() == pytest.approx(min(dues))
        assert credits.oldest_token_ms() == pytest.approx(min(last.values()))
    for request, first_ms in first.items():
        served = credits.end(request, now)
        assume(served is not None)
        assert served.tokens == tokens[request]
        assert served.tpot_ms == pytest.approx((now - first_ms) / tokens[request])
