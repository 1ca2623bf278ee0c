"""Granted time in the lab, loosely: P10 and its mark hold, the naive rule fails, the formula is right."""

from __future__ import annotations

import numpy as np
import pytest
from valve_hook.policy.granting import Decision, GrantReason, Target
from valve_hook.policy.worth import saved_share, steps_per_ms
from valve_tools.lab.granted import sweep
from valve_tools.lab.granted.alone import alone
from valve_tools.lab.granted.books import RULES
from valve_tools.lab.granted.engine import GAP_MEDIAN_MS, GAP_SIGMA, Bench, Engine, Load
from valve_tools.lab.granted.page import loosely
from valve_tools.lab.granted.parts import PARTS, Part, quick
from valve_tools.lab.granted.sweep import OURS, Bed, cost_of, run_cell, split
from valve_tools.sim.traces import Trace, TraceError

MINUTE_MS = 60_000.0


@pytest.fixture(scope="module")
def cells():
    return quick()


def poisson(requests_per_s, tokens, minutes=10, prompt=64, seed=4):
    """Clients that come at random; every answer is as long."""
    rng = np.random.default_rng(seed)
    arrive = np.sort(rng.uniform(0, minutes * MINUTE_MS, rng.poisson(requests_per_s * minutes * 60)))
    n = len(arrive)
    return Load(
        name="poisson",
        arrive_ms=tuple(arrive.tolist()),
        prompt=(prompt,) * n,
        answer=(tokens,) * n,
        duration_ms=minutes * MINUTE_MS,
    )


def test_p10_holds_in_every_cell_that_is_not_refused(cells):
    mine = [cell for cell in cells if cell.rule == "policy"]
    granted = [cell for cell in mine if not cell.is_refused]
    assert len(granted) >= 8
    assert all(cell.p10 for cell in granted), [cell for cell in granted if not cell.p10]
    assert all(cell.gain >= -0.005 for cell in mine)


def test_the_quick_check_never_asks_what_its_loads_cannot_tell(cells):
    """`make lab-quick` ended with 3 for a claim that no load of the quick sweep has a figure for."""
    assert [(one.claim, one.verdict) for one in loosely(cells) if not one.ok] == []


def test_the_gain_is_near_the_formula(cells):
    judged = [cell for cell in cells if cell.rule == "policy" and not cell.is_refused and cell.formula_own > 0.04]
    assert len(judged) >= 6
    assert all(cell.gain >= 0.75 * cell.formula_own for cell in judged)


def test_a_closed_loop_is_refused_in_every_cell(cells):
    rollout = [cell for cell in cells if cell.load == "rollout" and cell.rule == "policy"]
    assert len(rollout) == 8
    assert all(cell.is_refused for cell in rollout)


def test_the_naive_rule_misses_the_target_where_ours_keeps_it(cells):
    chat = {(cell.rule, cell.target, cell.cost_ms): cell for cell in cells if cell.load == "chat"}
    for target in (2.0, 3.0, 4.0):
        naive, ours = chat["due time", target, 0.5], chat["policy", target, 0.5]
        assert naive.misses > 5.0
        assert ours.misses <= 1.0
        assert not naive.p10


@pytest.mark.parametrize(
    ("rate", "tokens", "target"), [(0.5, 200, 2.0), (0.5, 200, 4.0), (1.5, 200, 3.0), (4.0, 100, 2.0)]
)
def test_the_formula_is_within_four_points_of_the_simulation(rate, tokens, target):
    cell = run_cell([Bed.of(poisson(rate, tokens), Bench.h100(), 0.5)], target, 100.0)
    assert cell.gain == pytest.approx(cell.formula_reached, abs=0.04)
    assert cell.gain > 0.02


def test_steps_alone_are_those_of_the_formula():
    load, bench = poisson(1.0, 200), Bench.h100()
    engine = Engine(load, bench, None, None)
    engine.run()
    natural = alone(load, bench).token_ms
    expected = steps_per_ms(natural, 1.0 / 1e3, 200) * load.duration_ms
    assert engine._step == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("arrive_ms", [60_000.0, 1_000.0])
def test_a_pause_over_the_begin_of_the_time_of_observation_is_never_lost_nor_counted_too_long(arrive_ms):
    """A service whose only request came late counted as busy nearly all the time; one whose only request came early as
    idle for longer than it was watched."""
    load = Load(name="one", duration_ms=100_000.0, arrive_ms=(arrive_ms,), prompt=(100,), answer=(10,))
    found = Engine(load, Bench.h100(), cost_of(0.5), None).run()
    assert 0.99 < found.offline_idle_ms / found.duration_ms <= 1.0


def test_no_pacing_saves_nothing_and_more_pacing_saves_more():
    saved = [saved_share(6.8, 7.0, paced, 1e-3, 200) for paced in (5.0, 7.0, 10.0, 20.0, 40.0)]
    assert saved[:2] == [0.0, 0.0]
    assert saved[2] < saved[3] < saved[4]


def test_every_token_of_every_request_is_delivered_whatever_is_granted():
    bed = Bed.of(poisson(2.0, 50, minutes=2), Bench.h100(), 1.0)
    cell = run_cell([bed], 3.0, 100.0)
    assert cell.grants_per_s > 0
    assert cell.tpot99_ms <= 3.0 * bed.solo.tpot_ms


def test_preempted_requests_are_recomputed_and_end():
    bench = Bench.h100()
    small = Bench(timing=bench.timing, pool_tokens=4_000)
    load = Load(
        name="tight",
        arrive_ms=tuple(float(i) for i in range(12)),
        prompt=(250,) * 12,
        answer=(400,) * 12,
        duration_ms=60_000.0,
    )
    outcome = Engine(load, small, None, None).run()
    assert outcome.preempted > 0
    assert not np.isnan(outcome.end_ms).any()


class Watched:
    """Sees when requests come, and grants as long as is asked."""

    def __init__(self, grant_ms=0.0):
        self.came, self._grant = [], Decision(grant_ms=grant_ms, reason=GrantReason.GRANTED)

    def arrived(self, request, now_ms):
        self.came.append((request, now_ms))

    def decide(self, now_ms, facts):
        return self._grant

    def first_token(self, request, now_ms): ...
    def delivered(self, now_ms, skipped): ...
    def finished(self, request, now_ms): ...
    def stepped(self, batch, context, ms, gap_ms, *, prefill): ...


def test_no_round_of_a_closed_loop_begins_before_the_round_before_is_served():
    load = Load(
        name="rollout",
        arrive_ms=(5.0, 6.0, 40_000.0, 40_001.0, 80_000.0),
        prompt=(100,) * 5,
        answer=(9_000, 50, 50, 20, 10),
        duration_ms=90_000.0,
        think_ms=7_000.0,
    )
    seen = Watched()
    outcome = Engine(load, Bench.h100(), cost_of(1.0), seen).run()
    assert [request for request, _ in seen.came] == [0, 1, 2, 3, 4]
    ends = outcome.end_ms
    assert ends[:2].max() > 40_000.0  # by the trace the second round would have come by now
    assert outcome.arrive_ms[2] >= ends[:2].max() + 7_000.0
    assert outcome.arrive_ms[3] == pytest.approx(outcome.arrive_ms[2] + 1.0)
    assert outcome.arrive_ms[4] >= ends[2:4].max() + 7_000.0
    assert outcome.duration_ms == pytest.approx(ends.max() - 0.1 * load.duration_ms, abs=25.0)


def test_no_first_token_comes_sooner_to_an_idle_engine_than_to_a_paused_one_but_by_the_cost_of_the_pause():
    """An idle engine that answered at once would make every grant look guilty of the host's time."""
    rng = np.random.default_rng(3)
    count, bench = 400, Bench.h100()
    every_ms = 1_000.0
    shape = {"prompt": (64,) * count, "duration_ms": count * every_ms}
    arrive = np.arange(count) * every_ms + rng.uniform(0, 1, count)
    idle = Load(name="idle", arrive_ms=tuple(arrive.tolist()), answer=(2,) * count, **shape)
    one_long = Load(
        name="paused",
        arrive_ms=(0.0, *(arrive + 500.0).tolist()),
        prompt=(64,) * (count + 1),
        answer=(count, *(2,) * count),
        duration_ms=shape["duration_ms"],
    )
    to_idle = Engine(idle, bench, cost_of(0.0), None).run()
    to_paused = Engine(one_long, bench, cost_of(0.0), Watched(grant_ms=1e6)).run()
    waits = [run.first_ms - run.arrive_ms for run in (to_idle, to_paused)]
    assert np.median(waits[1][1:]) == pytest.approx(np.median(waits[0]), abs=0.2)
    assert waits[1][1:].mean() == pytest.approx(waits[0].mean(), abs=0.3)


def test_the_time_of_a_rule_is_not_counted_as_open_because_a_prompt_hides_it():
    """The formula is for the time in which the policy may grant."""
    load, bench = poisson(4.0, 20, minutes=2, prompt=200), Bench.h100()
    outcome = Bed.of(load, bench, 8.0).run(Target(tpot_ms=14.0), OURS)
    assert outcome.grants == 0
    assert outcome.reason_ms.keys() <= RULES | {GrantReason.SHORT, GrantReason.LATE}
    assert outcome.open_ms.sum() < 0.1 * outcome.refused_ms.sum()


def test_each_seed_replays_other_requests_of_the_trace():
    for part in PARTS:
        assert part.label.startswith(part.trace)
    trace = Trace(
        name="t",
        arrive_ns=np.arange(1000) * 10**9,
        in_tok=np.arange(1000),
        out_tok=np.full(1000, 3),
    )
    shares = [Part(trace="t", thin=4, start_s=100, seconds=200).of(trace, seed) for seed in (1, 2)]
    stretches = [Part(trace="t", start_s=100, seconds=200).of(trace, seed) for seed in (1, 2)]
    for first, second in (shares, stretches):
        assert not set(first.prompt) & set(second.prompt)
        assert first.arrive_ms[0] < 10_000
        assert max(first.arrive_ms) < 200_000
    with pytest.raises(TraceError):
        Part(trace="t", start_s=900, seconds=200).of(trace, 2)


def test_a_first_reading_above_the_bound_is_never_what_the_cell_is_judged_by(monkeypatch):
    bed = Bed.of(poisson(2.0, 50, minutes=2), Bench.h100(), 0.5)
    monkeypatch.setattr(sweep, "TTFT_NEAR", -100.0)
    cell = sweep.judged_cell([bed], 2.0, 100.0, sweep.Fresh([bed.load], bed.bench))
    assert cell.ttft_first == pytest.approx(run_cell([bed], 2.0, 100.0).ttft_more)
    assert cell.ttft_more != cell.ttft_first
    assert (cell.seeds, cell.p10) == (sweep.FRESH, False)


@pytest.mark.parametrize("closed", [False, True])
def test_no_setting_that_is_not_simulated_would_have_been_granted_anything(closed):
    """What shuts a target and a gap shuts every smaller one; only then a run stands for another."""
    count = 150
    came = np.repeat(np.arange(3), 50) * 60_000.0 + np.tile(np.arange(50), 3) if closed else np.arange(count) * 900.0
    load = Load(
        name="shut",
        arrive_ms=tuple(came.tolist()),
        prompt=(100,) * count,
        answer=(60,) * count,
        duration_ms=180_000.0,
        think_ms=5_000.0 if closed else None,
    )
    bed = Bed.of(load, Bench.h100(), 8.0)
    wide = bed.run(bed.goal(4.0 if closed else 3.0, 200.0), OURS)
    assert len(bed.shut) == 1
    for target, gap in ((3.0, 200.0), (2.0, 200.0), (1.5, 50.0), (3.0, None)):
        assert bed.run(bed.goal(target, gap), OURS) is wide
        real = Bed.of(load, Bench.h100(), 8.0, bed.solo).run(bed.goal(target, gap), OURS)
        assert not real.reasons & {GrantReason.GRANTED}
        assert np.array_equal(real.end_ms, wide.end_ms)


def test_time_is_spent_once():
    """Steps, host gaps, pauses and idle time of a run without any grant add up to its duration."""
    load, bench = poisson(1.0, 100, minutes=2), Bench.h100()
    outcome = Engine(load, bench, None, None).run()
    mean_gap = GAP_MEDIAN_MS * np.exp(GAP_SIGMA**2 / 2)
    intervals = np.array(outcome.intervals_ms)
    assert outcome.offline_idle_ms < outcome.duration_ms
    assert np.median(intervals) == pytest.approx(bench.fixed_ms + mean_gap, rel=0.15)


def test_traces_are_split_by_what_they_hold_and_by_nothing_else(tmp_path):
    for name, rows in (("b", "0,10,5\n"), ("a", "0,11,5\n"), ("c", "1,10,5\n"), ("d", "2,10,5\n")):
        (tmp_path / f"{name}.csv").write_text("t_s,in_tok,out_tok\n" + rows)
    (tmp_path / "notes.csv").write_text("x\n1\n")
    tuning, claims = split(tmp_path)
    assert sorted(tuning + claims) == ["a.csv", "b.csv", "c.csv", "d.csv"]
    assert len(tuning) == 2
    before = {name: (tmp_path / name).read_bytes() for name in tuning + claims}
    for name, content in before.items():
        (tmp_path / f"z{name}").write_bytes(content)
        (tmp_path / name).unlink()
    assert split(tmp_path) == ([f"z{name}" for name in tuning], [f"z{name}" for name in claims])
