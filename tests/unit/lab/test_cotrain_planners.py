"""Planners of training beside decode: each against its paper's formula or a search over all it may choose."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from valve_hook import cotrain
from valve_hook.cotrain.chunked import Chunked
from valve_hook.cotrain.flexllm_greedy import FlexllmGreedy, plans_of
from valve_hook.cotrain.gpreempt_paced import GpreemptPaced
from valve_hook.cotrain.harli import PAIRS, Harli
from valve_hook.cotrain.harli_closest import HarliClosest
from valve_hook.cotrain.harli_most_sm import HarliMostSm
from valve_hook.cotrain.idle import Idle
from valve_hook.cotrain.interface import ALONE, Direction, Goal, Lane, Plan, Planner, State, WhenIdle
from valve_hook.cotrain.laws import Laws
from valve_hook.cotrain.lithos import Lithos
from valve_hook.cotrain.llmstation import LlmStation, planned
from valve_hook.cotrain.ours import FLOOR, LEAST_MS, Ours
from valve_hook.cotrain.predictor import PlanPredictor
from valve_hook.cotrain.race import Race
from valve_hook.cotrain.separate import Separate
from valve_hook.cotrain.splits import SPLITS
from valve_hook.cotrain.static_share import StaticShare
from valve_hook.cotrain.temporal import Temporal
from valve_hook.policy.step_model import StepModel

TOKENS = 1024


def laws(**changed):
    """An 8B model on a card with 0.96 TB/s and half of 182 TFLOP/s."""
    facts = {
        "layers": 32,
        "layer_bytes": 2 * 218.1e6,
        "layer_work": 2 * 218.1e6,
        "bandwidth": 0.96e12,
        "speed": 91e12,
        "kv_bytes": 131072.0,
        "hidden": 4096,
        "copy_ms": 18.2,
    }
    return Laws(**{**facts, **changed})


def state(running=16, length=800, direction=Direction.FORWARD, tokens=TOKENS, left=None, **changed):
    whole = float(tokens * 32)
    return State(
        running=running,
        context=running * length,
        direction=direction,
        tokens=tokens,
        left=whole if left is None else left,
        **changed,
    )


def told(model, batches=(4, 16, 64), lengths=(128, 256, 512)):
    """A step model that has seen every pair of shares."""
    law = laws()
    for own, other in PAIRS:
        for batch in batches:
            for length in lengths:
                plan = Plan(Lane.PARTITION, own=own, other=other)
                at = state(batch, length)
                for way in (Plan(Lane.PARTITION, own=own), plan):
                    model.observe(batch, batch * length, law.step(at, way)[0], own, way.other)
    return model


def batches(seed=3, count=200):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        phase = Direction.FORWARD if rng.random() < 0.5 else Direction.BACKWARD
        left = float(rng.integers(1, 33)) * TOKENS
        yield state(int(rng.integers(1, 120)), int(rng.integers(50, 3000)), phase, left=left)


def test_a_layer_over_two_thousand_tokens_takes_the_ten_ms_of_the_paper():
    assert laws().unit_ms(2048) == pytest.approx(9.8, rel=0.02)


def test_decode_needs_no_more_processors_than_its_bandwidth_does():
    law = laws()
    assert law.alone_ms(8, 4000, 0.45) == law.alone_ms(8, 4000, 1.0)
    assert law.alone_ms(8, 4000, 0.225) == pytest.approx(2 * law.alone_ms(8, 4000, 1.0))


def test_a_partition_slows_decode_only_where_bandwidth_is_short():
    law = laws()
    assert law.slowdown(0.5, 0.5, 2048) == 1.0
    assert law.slowdown(0.5, 0.5, 64) > 1.2  # reading a layer for few tokens takes bandwidth
    assert laws(contention=0.4).slowdown(0.5, 0.5, 2048) == pytest.approx(1.2)


def test_a_layer_that_is_not_on_the_card_takes_its_copy():
    assert laws().unit_ms(512, 1.0, 0.0) == 18.2
    assert laws().unit_ms(512, 1.0, 0.5) == 9.1


def test_the_trained_base_may_be_another_one():
    small = laws(layer_work=1e8, layer_bytes=1e8)
    pair = laws(job=small)
    assert pair.unit_ms(2048) == small.unit_ms(2048)
    assert pair.alone_ms(8, 4000) == laws().alone_ms(8, 4000)


def test_fused_rows_below_the_ridge_cost_no_more_than_the_fixed_part():
    law, at = laws(), state(4)
    ms, units = law.step(at, Plan(Lane.FUSED, layers=32, tokens=8))
    assert ms == pytest.approx(law.step(at, ALONE)[0] + law.fused_ms, rel=0.01)
    assert units == 256


def test_a_second_stream_waits_for_the_slower_of_the_two():
    law, at = laws(), state(4, direction=Direction.BACKWARD)
    alone_ms = law.step(at, ALONE)[0]
    few = law.step(at, Plan(Lane.STREAM, layers=1, tokens=TOKENS))[0]
    many = law.step(at, Plan(Lane.STREAM, layers=32, tokens=TOKENS))[0]
    assert alone_ms < few < law.stretch * alone_ms + law.stream_ms
    assert many > 32 * law.unit_ms(TOKENS)


@pytest.mark.parametrize("shape", [HarliClosest, HarliMostSm])
def test_harli_plans_what_a_search_over_all_pairs_finds(shape):
    goal = Goal(step_ms=40.0)
    for at in batches():
        model = told(StepModel()) if at.running == 1 else MODEL
        said = {
            (own, other): model.predict(at.running, at.context, own, other).ms
            for own in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
            for other in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
            if own + other <= 1.0 + 1e-9
        }
        assert len(said) == 45
        kept = {pair: ms for pair, ms in said.items() if ms <= 40.0}
        plan = shape(goal, model).plan(at)
        if not kept:
            assert plan == ALONE
            continue
        chosen = kept[plan.own, plan.other]
        if shape is HarliClosest:
            assert chosen == max(kept.values())
        else:
            assert plan.other == max(other for _, other in kept)


MODEL = told(StepModel())


def test_harli_keeps_its_plan_until_it_would_miss_the_target():
    planner = HarliClosest(Goal(step_ms=40.0), MODEL)
    first = planner.plan(state(16))
    assert planner.plan(state(2)) == first
    later = planner.plan(state(120, 3000))
    assert MODEL.predict(120, 360_000, first.own, first.other).ms > 40.0
    assert later != first


def test_llmstation_admits_what_an_exhaustive_search_admits():
    rng = np.random.default_rng(5)
    for _ in range(500):
        alone_ms, unit_ms = rng.uniform(0.1, 1.0), rng.uniform(0.1, 5.0)
        beside_ms, slack = alone_ms * rng.uniform(1.01, 2.0), rng.uniform(1.0, 120.0)
        fits = [n for n in range(33) if n * beside_ms + (32 - n) * alone_ms <= slack]
        most = max((int(n * beside_ms / unit_ms) for n in fits), default=0)
        assert planned(slack, 32, alone_ms, beside_ms, unit_ms) == most


def test_llmstation_never_plans_more_than_decode_has_layers_where_nothing_is_slowed():
    assert planned(1e6, 32, 0.2, 0.2, 0.2) == 32
    assert planned(5.0, 32, 0.2, 0.2, 0.2) == 0  # decode alone misses the target


def test_flexllm_takes_the_largest_size_that_is_predicted_to_fit():
    predictor = PlanPredictor(laws())
    planner = FlexllmGreedy(Goal(step_ms=60.0), predictor)
    for at in batches():
        fits = [plan for plan in plans_of(at, 32) if predictor.ms(at, plan) <= 60.0]
        assert planner.plan(at) == (fits[-1] if fits else ALONE)


@pytest.mark.parametrize("tile", [Lane.FUSED, Lane.STREAM])
def test_no_tile_is_planned_beyond_its_phase(tile):
    phase = Direction.FORWARD if tile is Lane.FUSED else Direction.BACKWARD
    predictor = PlanPredictor(laws())
    for make in (FlexllmGreedy, LlmStation):
        planner = make(Goal(step_ms=1e5), predictor)
        for left in (1, 3, 17, 32):
            plan = planner.plan(state(direction=phase, left=left * TOKENS))
            assert plan.layers * plan.tokens <= left * TOKENS
            assert plan.lane is tile


@pytest.mark.parametrize("name", ["llmstation", "chunked", "harli", "race", "ours", "lithos", "gpreempt_paced"])
def test_nothing_is_trained_beside_a_prompt_nor_while_the_job_is_parked(name):
    goal, predictor = Goal(step_ms=60.0), PlanPredictor(laws())
    planner = {
        "llmstation": lambda: LlmStation(goal, predictor),
        "chunked": lambda: Chunked(goal, predictor),
        "harli": lambda: HarliClosest(goal, MODEL),
        "race": lambda: Race(goal, predictor),
        "ours": lambda: Ours(goal, predictor),
        "lithos": lambda: Lithos(predictor),
        "gpreempt_paced": lambda: GpreemptPaced(goal, predictor),
    }[name]()
    planner.first_token(1, 0.0)
    assert planner.plan(state(prompt_tokens=100)) == ALONE
    assert planner.plan(state(is_ready=False)) == ALONE


def test_who_leaves_the_engine_alone_says_what_happens_while_it_is_idle():
    assert [planner.idle for planner in (Separate(), Idle(), Temporal(), StaticShare())] == [
        WhenIdle.NOTHING,
        WhenIdle.STOPPED,
        WhenIdle.STEP,
        WhenIdle.LAYER,
    ]
    assert not Idle.needs_engine
    assert Separate().gpus == 2


def test_ours_never_plans_beyond_the_credit_of_any_reader():
    predictor = PlanPredictor(laws())
    planner = Ours(Goal(step_ms=60.0), predictor)
    planner.first_token(1, 1000.0)
    for now_ms in (1000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1058.0):
        at = state(16, now_ms=now_ms)
        plan = planner.plan(at)
        due_ms = 1000.0 + 0.98 * 60.0
        taken = plan.pause_ms + predictor.ms(at, plan)
        assert taken <= max(due_ms - now_ms, 1.0) + 1e-6 or plan == ALONE


def learned(law, rng, count=300):
    """A predictor that has measured some kinds and not others, on a machine that is not what it was told."""
    predictor = PlanPredictor(law)
    for at in batches(seed=11, count=count):
        for plan in (ALONE, SPLITS[int(rng.integers(len(SPLITS)))], *plans_of(at, 32)[:2]):
            predictor.observe(at, plan, law.step(at, plan)[0] * rng.uniform(0.7, 1.6))
    return predictor


def any_state(rng):
    at = state(int(rng.integers(1, 120)), int(rng.integers(50, 3000)), left=float(rng.integers(1, 33)) * TOKENS)
    at.direction = Direction.FORWARD if rng.random() < 0.5 else Direction.BACKWARD
    at.resident, at.cache_layers = float(rng.uniform(0.01, 1.0)), float(rng.uniform(0.0, 0.6))
    return at


@pytest.mark.parametrize("job", [None, laws(layer_work=1e8, layer_bytes=1e8, copy_ms=9.0)])
def test_the_table_of_splits_never_says_other_than_the_laws_to_the_bit(job):
    rng = np.random.default_rng(13)
    law = laws(job=job, contention=0.4)
    predictor = learned(law, rng)
    for _ in range(200):
        at = any_state(rng)
        assert predictor.table.ms(at) == [law.step(at, plan)[0] for plan in SPLITS]
        assert predictor.splits_ms(at) == [predictor.ms(at, plan) for plan in SPLITS]


def searched(ours, at, limit_ms):
    """Ours without tables: every offer by the laws, one after another."""
    predictor, law = ours._predictor, ours._predictor.laws
    alone_ms = predictor.ms(at, ALONE)
    offers = [(limit_ms, alone_ms, Plan(Lane.PAUSE))]
    for plan in [*SPLITS, *plans_of(at, law.layers)]:
        ms = predictor.ms(at, plan)
        offers += [(length_ms, ms, plan) for length_ms in {ms: 0, limit_ms: 0} if ms <= limit_ms]
    best = None
    for cycle_ms, ms, plan in offers:
        pause_ms = cycle_ms - ms
        if plan.lane is not Lane.PAUSE and cycle_ms != ms and pause_ms < LEAST_MS:
            continue
        resident = min(1.0, max(0.0, at.resident - at.cache_layers * (cycle_ms / ours._cycle_ms - 1.0)))
        full = at.tokens / law.unit_ms(at.tokens, 1.0, resident)
        work = 0.0
        if plan.lane is Lane.PARTITION:
            work = at.tokens / law.unit_ms(at.tokens, plan.other, resident) * ms
        elif plan.lane is not Lane.PAUSE:
            work = min(law.step(at, plan)[1], at.left)
        work += full * pause_ms
        gain = work / cycle_ms if work >= FLOOR * full * (cycle_ms - alone_ms) else 0.0
        if best is None or gain > best[0]:
            best = gain, plan, pause_ms
    return best[1], best[2]


def test_ours_decides_what_a_plain_search_over_all_it_may_choose_decides():
    rng = np.random.default_rng(17)
    ours = Ours(Goal(step_ms=60.0, gap_ms=200.0), learned(laws(), rng), lanes=frozenset(Lane))
    ours._cycle_ms = 35.0
    lanes = set()
    for _ in range(300):
        at = any_state(rng)
        limit_ms = ours._predictor.ms(at, ALONE) + LEAST_MS + float(rng.uniform(0.0, 120.0))
        plan, pause_ms = searched(ours, at, limit_ms)
        found = ours._choose(at, limit_ms)
        assert (found.lane, found.own, found.layers, found.tokens) == (plan.lane, plan.own, plan.layers, plan.tokens)
        assert found.pause_ms == pause_ms
        lanes.add(found.lane)
    assert len(lanes) >= 3


def test_a_slow_step_is_not_said_to_train_less_than_it_lasts():
    """Contention that nobody told of stretches a step; the trainer runs beside all of it."""
    predictor = PlanPredictor(laws())
    ours = Ours(Goal(step_ms=200.0), predictor)
    at = state(16)
    split = SPLITS[8]
    for _ in range(5):
        predictor.observe(at, split, 1.5 * predictor.laws.step(at, split)[0])
    ms = predictor.ms(at, split)
    units = TOKENS / predictor.laws.unit_ms(TOKENS, split.other) * ms
    assert ours._worth(at, predictor.ms(at, ALONE)).split(ms, ms, split.other) == pytest.approx(units / ms)


def test_ours_trains_beside_a_prompt_only_while_whoever_waits_has_time():
    goal = Goal(step_ms=100.0, ttft_ms=1000.0)
    ours = Ours(goal, PlanPredictor(laws()), lanes=frozenset({Lane.FUSED, Lane.STREAM}))
    ours.arrived(7, 0.0)
    beside = ours.plan(state(0, prompt_tokens=256, now_ms=100.0))
    assert beside.lane is Lane.FUSED
    assert not beside.pause_ms
    assert ours.plan(state(0, prompt_tokens=256, now_ms=501.0)) == ALONE
    ours.first_token(7, 501.0)
    ours.finished(7, 501.0)
    assert ours.plan(state(0, prompt_tokens=256, now_ms=1500.0)).lane is Lane.FUSED


def test_missed_targets_take_the_steady_share_away_and_one_in_two_hundred_leaves_it():
    ours = Ours(Goal(step_ms=50.0), PlanPredictor(laws()))
    first = ours._steady

    def served(request, step_ms, at_ms):
        ours.first_token(request, at_ms)
        ours.delivered(at_ms + step_ms)
        ours.finished(request, at_ms + step_ms)

    for request in range(3):
        served(request, 80.0, 1000.0 * request)
    assert ours._steady == pytest.approx(first - 0.3)
    held = ours._steady
    for request in range(200):
        served(request, 80.0 if request == 0 else 10.0, 1e5 + 1000.0 * request)
    assert ours._steady == pytest.approx(held, abs=1e-3)


def test_lithos_leaves_the_service_the_fewest_processors_within_its_slip():
    predictor = PlanPredictor(laws())
    for slip in (1.05, 1.1, 1.5):
        for at in batches(count=50):
            fits = [one for one in SPLITS if predictor.ms(at, one) <= slip * predictor.ms(at, ALONE)]
            assert Lithos(predictor, slip).plan(at) == (min(fits, key=lambda one: one.own) if fits else ALONE)


def test_gpreempt_paced_pauses_for_what_a_step_leaves_of_the_target_and_never_for_more():
    predictor = PlanPredictor(laws())
    planner = GpreemptPaced(Goal(step_ms=40.0), predictor, margin=0.1)
    for at in batches(count=50):
        left_ms = 36.0 - predictor.ms(at, ALONE)
        plan = planner.plan(at)
        assert plan == (Plan(Lane.PAUSE, pause_ms=left_ms) if left_ms > 0 else ALONE)


@pytest.mark.parametrize("base", [Planner, Harli])
def test_a_planner_without_a_rule_can_never_be_made(base):
    class Nothing(base):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_ours_pays_no_fixed_cost_for_a_few_tokens():
    """Greedy buys eight tokens for eleven ms and more; that time does more when the card is idle."""
    law = laws(fused_ms=11.0, speed=20e12)
    at = state(60, 50)
    goal = Goal(step_ms=law.step(at, ALONE)[0] + 18.0)
    greedy = FlexllmGreedy(goal, PlanPredictor(law)).plan(at)
    ours = Ours(goal, PlanPredictor(law), lanes=frozenset({Lane.FUSED, Lane.STREAM}))
    ours.first_token(1, 0.0)
    assert greedy.lane is Lane.FUSED
    assert greedy.tokens == 8
    assert ours.plan(at).lane is not Lane.FUSED


def test_the_predictor_unlearns_a_wrong_data_sheet():
    truth, rng = laws(), np.random.default_rng(7)
    predictor = PlanPredictor(laws(bandwidth=1.2e12, speed=70e12))
    plans = [ALONE, Plan(Lane.PARTITION, own=0.5, other=0.5), Plan(Lane.STREAM, layers=4, tokens=TOKENS)]
    before = abs(predictor.ms(state(), plans[1]) / truth.step(state(), plans[1])[0] - 1)
    for at in batches(count=1000):
        for plan in plans:
            ms = truth.step(at, plan)[0] * (1 + 0.02 * rng.standard_normal())
            predictor.observe(at, plan, ms)
    off = [
        abs(predictor.ms(at, plan) / truth.step(at, plan)[0] - 1) for at in batches(seed=8, count=100) for plan in plans
    ]
    assert before > 0.15
    assert np.mean(off) < 0.04
    assert predictor.errors().samples == 3000
    assert 0.0 < predictor.errors().p50 < 0.05


def test_a_kind_is_believed_after_three_measurements_and_not_before():
    predictor = PlanPredictor(laws())
    plan, at = Plan(Lane.STREAM, layers=4, tokens=TOKENS), state()
    said = predictor.ms(at, plan)
    other = Plan(Lane.STREAM, layers=32, tokens=TOKENS)
    for _ in range(2):
        predictor.observe(at, plan, 2 * said)
        predictor.observe(at, other, predictor.laws.step(at, other)[0])
    assert predictor.ms(at, plan) < 1.9 * said
    predictor.observe(at, plan, 2 * said)
    assert predictor.ms(at, plan) == pytest.approx(2 * said)


def test_no_planner_looks_at_the_clock_or_the_system():
    folder = Path(cotrain.__file__).parent
    found = {
        name.split(".")[0]
        for path in folder.glob("*.py")
        for name in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
    }
    assert found - {"", "__future__"} <= {"abc", "dataclasses", "enum", "math", "numpy", "collections"}
