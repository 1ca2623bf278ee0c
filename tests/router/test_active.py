"""The advice on how many replicas should be awake: never below the floor, up at once, down one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valve_router.advice import Advice
from valve_router.plan.active import Active, ActiveSettings, Demand, advise, needed, predicted_p95_s
from valve_router.plan.profile import Law
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings

LAW = Law(fixed_s=0.05, per_token_s=0.0004)
TOKENS = st.lists(st.integers(1, 2000), min_size=1, max_size=60)


def demand(per_s, tokens=(100, 150, 200)):
    return Demand(per_s=per_s, tokens=tuple(tokens), law=LAW)


@given(st.floats(0, 500), TOKENS, st.integers(1, 12), st.integers(1, 20), st.integers(0, 20), st.floats(0, 1e4))
def test_the_advice_is_never_below_the_floor_nor_above_what_there_is(per_s, tokens, floor, there, wanted, now):
    rules = ActiveSettings(floor=floor)
    before = Active(wanted=wanted, p95_s=0.0, lower_since_s=0.0) if wanted else None

    found = advise(before, demand(per_s, tokens), there, now, rules)

    assert min(floor, there) <= found.wanted <= there


@given(st.floats(0.01, 200), st.floats(0, 200), TOKENS, st.integers(1, 20))
def test_more_requests_never_need_fewer_replicas(per_s, more, tokens, there):
    rules = ActiveSettings()
    assert needed(demand(per_s, tokens), there, rules) <= needed(demand(per_s + more, tokens), there, rules)


@given(st.floats(0.01, 200), TOKENS, st.integers(1, 19))
def test_another_replica_never_makes_the_prediction_worse(per_s, tokens, replicas):
    one = demand(per_s, tokens)
    assert predicted_p95_s(one, replicas + 1) <= predicted_p95_s(one, replicas) + 1e-9


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200)), min_size=1, max_size=60), st.integers(1, 4))
def test_replicas_go_to_sleep_one_by_one_and_never_sooner_than_was_held(rows, floor):
    rules, found, now, fell = ActiveSettings(floor=floor), None, 0.0, -1e9
    for gap, per_s in rows:
        now += gap
        before = found
        found = advise(found, demand(per_s), 8, now, rules)
        assert found.wanted >= needed(demand(per_s), 8, rules)
        if before is not None and found.wanted < before.wanted:
            assert found.wanted == before.wanted - 1
            assert now - fell >= rules.hold_s
            fell = now
        if before is not None and found.wanted > before.wanted:
            assert found.lower_since_s is None


def test_a_load_that_swings_within_the_hold_never_moves_the_advice():
    found, wanted = None, set()
    for turn in range(40):
        found = advise(found, demand(60.0 if turn % 2 else 1.0), 8, 60.0 * turn, ActiveSettings())
        wanted.add(found.wanted)
    assert len(wanted) <= 2  # the first looks may come from all that are there
    assert found.wanted == max(needed(demand(60.0), 8, ActiveSettings()), min(wanted))


@pytest.mark.parametrize("per_s", [3.0, 6.0])
def test_the_prediction_is_near_what_a_line_of_requests_does(per_s):
    draw = random.Random(2)
    tokens = [max(8, round(draw.lognormvariate(0, 0.6) * 100)) for _ in range(20_000)]
    now, free, seen = 0.0, 0.0, []
    for one in tokens:
        now += draw.expovariate(per_s)
        free = max(now, free) + LAW.fixed_s + one * LAW.per_token_s
        seen.append(free - now)
    seen.sort()

    predicted = predicted_p95_s(replace(demand(per_s), tokens=tokens[:2000]), 1)

    assert predicted == pytest.approx(seen[int(0.95 * len(seen))], rel=0.3)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ActiveSettings(floor=0)


def test_the_routers_advice_follows_what_came_lately_and_names_who_may_sleep():
    now = [0.0]
    rules = RouterSettings(replicas=tuple(f"http://r{number}:1" for number in range(4)))
    replicas = Replicas(rules, lambda: now[0])
    advice = Advice(rules, replicas, lambda: now[0])
    for _ in range(40):  # one every ten seconds, and a look every ten: one replica would do
        now[0] += 10.0
        replicas.ended(replicas.send("x" * 400), is_served=True, has_failed=False)
        advice.look()
    assert advice.active.wanted == 3
    busiest = max(replicas.all, key=lambda one: one.timeline.work_s)
    assert len(advice.surplus()) == 1
    assert busiest.name not in advice.surplus()

    for _ in range(9000):
        now[0] += 1 / 150
        replicas.ended(replicas.send("x" * 400), is_served=True, has_failed=False)
    advice.look()

    assert advice.active.wanted == 4
    assert not advice.surplus()
