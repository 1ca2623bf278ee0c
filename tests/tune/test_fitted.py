"""A predictor that fits a line through measured steps, on a machine that keeps to no law it was told."""

from __future__ import annotations

import random
import statistics

import hook
import pytest

hook.lay_in()

from valve_hook.cotrain.interface import ALONE, Lane, Plan, State  # noqa: E402
from valve_hook.cotrain.laws import Laws  # noqa: E402
from valve_hook.cotrain.predictor import PlanPredictor  # noqa: E402
from valve_tune.engine.fitted import LEAST, FittedPredictor  # noqa: E402

LAWS = Laws(layers=8, layer_bytes=1e7, layer_work=5e6, bandwidth=1e10, speed=5e10, kv_bytes=8192.0, hidden=512)


def drawn(chance: random.Random) -> State:
    prompt = chance.choice([0, 0, 0, 16, 100, 300])
    running = chance.choice([1, 2, 3, 5, 8, 13])
    context = running * chance.randrange(20, 1500)
    return State(running=running, context=context, prompt_tokens=prompt, prompt_pairs=prompt * prompt / 2)


def measured(state: State) -> float:
    """ms on a machine whose prompts cost three times what the laws say, and its cache reads a tenth."""
    rows = state.running + state.prompt_tokens
    return 12.0 + 0.8 * rows + 0.9 * state.running + 2e-4 * state.context + 4e-5 * state.prompt_pairs


def taught(predictor: PlanPredictor, steps: int, *, odd_share: float = 0.0, seed: int = 1) -> PlanPredictor:
    chance = random.Random(seed)
    for _ in range(steps):
        state = drawn(chance)
        ms = measured(state) * chance.uniform(0.98, 1.02)
        predictor.observe(state, ALONE, ms * (6.0 if chance.random() < odd_share else 1.0))
    return predictor


def error(predictor: PlanPredictor) -> float:
    chance = random.Random(99)
    states = [drawn(chance) for _ in range(300)]
    return statistics.fmean(abs(predictor.ms(state, ALONE) / measured(state) - 1.0) for state in states)


def test_batches_that_were_never_measured_are_predicted_by_the_line_and_not_by_wrong_laws() -> None:
    fitted, by_laws = (error(taught(make(LAWS), 400)) for make in (FittedPredictor, PlanPredictor))
    assert fitted < 0.03
    assert fitted < by_laws / 2


def test_steps_that_others_on_the_machine_made_slow_never_drag_the_line_along() -> None:
    assert error(taught(FittedPredictor(LAWS), 600, odd_share=0.05)) < 0.3
    plain = FittedPredictor(LAWS)
    taught(plain, 600, odd_share=0.05)
    ratio = statistics.median(plain.laws.base_ms(state) / measured(state) for state in (drawn(random.Random(7)),) * 3)
    assert ratio == pytest.approx(1.0, abs=0.1)


def test_until_enough_was_measured_the_laws_are_believed() -> None:
    assert FittedPredictor(LAWS).ms(drawn(random.Random(0)), ALONE) == LAWS.base_ms(drawn(random.Random(0)))
    few, plain = (taught(make(LAWS), LEAST - 1) for make in (FittedPredictor, PlanPredictor))
    state = drawn(random.Random(5))
    assert few.ms(state, ALONE) == plain.ms(state, ALONE)


def test_no_step_is_predicted_to_take_less_than_nothing_where_nothing_was_measured() -> None:
    predictor = taught(FittedPredictor(LAWS), 200)
    for state in (State(), State(running=1, context=10_000_000), State(prompt_tokens=5000, prompt_pairs=1.25e7)):
        assert predictor.laws.base_ms(state) > 0.0
        assert predictor.ms(state, ALONE) > 0.0


def test_what_training_beside_a_step_costs_is_learnt_apart_from_the_line() -> None:
    predictor, chance = taught(FittedPredictor(LAWS), 300), random.Random(3)
    beside = Plan(Lane.STREAM, layers=2, tokens=64)
    for _ in range(200):
        state = drawn(chance)
        predictor.observe(state, beside, 1.5 * measured(state))
    chance = random.Random(4)
    states = [drawn(chance) for _ in range(100)]
    ratios = [predictor.ms(state, beside) / (1.5 * measured(state)) for state in states]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.15)
    assert error(predictor) < 0.03
