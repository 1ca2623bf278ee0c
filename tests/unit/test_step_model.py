"""The step model on made-up machines and on recorded steps: what it says, how sure it is, and when it says nothing."""

from __future__ import annotations

import numpy as np
import pytest
from valve_hook.policy.step_model import Line, Roofline, Slowdown, Source, StepModel

FIXED_MS, BATCH_MS, CONTEXT_MS = 5.6, 0.011, 52e-6
RECORDED = (
    # (batch, context tokens, ms): decode steps of a made-up engine whose graphs are padded up to 4.
    (1, 512, 6.01), (2, 1_024, 6.05), (4, 2_048, 6.07), (8, 4_096, 6.30), (16, 8_192, 6.62), (32, 16_384, 7.18),
    (64, 32_768, 8.42), (128, 65_536, 10.91), (1, 4_096, 6.20), (4, 16_384, 6.86), (16, 65_536, 9.60),
)  # fmt: skip


def step_ms(batch, context):
    return FIXED_MS + BATCH_MS * batch + CONTEXT_MS * context


def observed(seed=1, steps=2_000, noise=0.02):
    """A model after `steps` steps, and fresh steps that it has not seen."""
    rng = np.random.default_rng(seed)
    model = StepModel()
    batches = rng.integers(1, 200, steps + 500)
    contexts = (batches * rng.integers(100, 3_000, steps + 500)).astype(int)
    rows = list(zip(batches.tolist(), contexts.tolist(), strict=True))
    for batch, context in rows[:steps]:
        model.observe(batch, context, step_ms(batch, context) * (1 + noise * rng.standard_normal()))
    return model, rows[steps:], rng


def test_the_line_is_found_within_five_percent_under_two_percent_noise():
    model, _, _ = observed()
    line = model._alone[1.0]
    assert line.fixed_ms == pytest.approx(FIXED_MS, rel=0.05)
    assert line.context_ms == pytest.approx(CONTEXT_MS, rel=0.05)
    assert line.batch_ms == pytest.approx(BATCH_MS, rel=0.25)  # a hundredth of a step: noise is twice that


def test_unseen_steps_are_predicted_within_three_percent_on_the_mean():
    model, fresh, _ = observed()
    errors = [abs(model.predict(b, c).ms / step_ms(b, c) - 1) for b, c in fresh]
    assert np.mean(errors) <= 0.03


def test_the_reported_error_covers_the_steps_that_follow():
    model, fresh, rng = observed()
    late = []
    for batch, context in fresh:
        ms = step_ms(batch, context) * (1 + 0.02 * rng.standard_normal())
        late.append(ms > model.predict(batch, context).ms + model.late_ms)
    assert np.mean(late) <= 0.08
    errors = model.errors()
    assert 0 < errors.p50 <= errors.p95 <= errors.p99
    assert errors.samples >= 1_900


def test_recorded_steps_are_remembered_and_the_line_goes_through_the_rest():
    model = StepModel()
    for _ in range(3):
        for batch, context, ms in RECORDED:
            model.observe(batch, context, ms)
    for batch, context, ms in RECORDED:
        found = model.predict(batch, context)
        assert found.source is Source.MEASURED
        assert found.ms == pytest.approx(ms, rel=1e-3)
    unseen = model.predict(48, 24_576)
    assert unseen.source is Source.FITTED
    assert unseen.ms == pytest.approx(7.8, rel=0.05)


def test_three_measurements_make_a_key_believed_not_two():
    model = StepModel()
    for _ in range(2):
        model.observe(100, 90_000, 50.0)
    assert model.predict(100, 90_000).source is not Source.MEASURED
    model.observe(100, 90_000, 50.0)
    assert model.predict(100, 90_000).source is Source.MEASURED


def test_nothing_measured_means_the_roofline_or_no_prediction_at_all():
    shape = Roofline(
        weights_bytes=16e9, kv_bytes_per_token=131_072, flops_per_token=16e9, bandwidth_bytes_s=3.2e12, flops_s=5e14
    )
    assert StepModel().predict(1, 100).source is Source.UNKNOWN
    assert StepModel().predict(1, 100).ms == float("inf")
    found = StepModel(shape).predict(1, 0)
    assert found.source is Source.ROOFLINE
    assert found.ms == pytest.approx(5.0)
    assert StepModel(shape).predict(1_000, 0).ms == pytest.approx(32.0)


def test_a_model_follows_a_machine_that_becomes_slower():
    model, fresh, _ = observed()
    batch, context = fresh[0]
    for _ in range(60):
        model.observe(batch, context, 2 * step_ms(batch, context))
    assert model.predict(batch, context).ms == pytest.approx(2 * step_ms(batch, context), rel=0.05)


def test_work_beside_ours_never_predicts_a_speed_up():
    beside = Slowdown()
    for own, other, factor in ((0.5, 0.5, 1.3), (0.6, 0.4, 1.2), (0.4, 0.6, 1.4), (0.9, 0.1, 0.9)):
        beside.add(own, other, factor)
    assert beside.factor(0.5, 0.5) > 1.2
    assert beside.factor(0.1, 0.0) == 1.0


def test_the_two_stages_give_back_the_law_they_were_made_of():
    model = StepModel()
    for share in (0.4, 0.6, 0.8):
        for batch, context, ms in RECORDED:
            for _ in range(3):
                model.observe(batch, context, ms / share, share)
    for own, other in ((0.4, 0.6), (0.6, 0.4), (0.4, 0.4), (0.8, 0.2)):
        for batch, context, ms in RECORDED[:4]:
            model.observe(batch, context, ms / own * max(1.0, 1.1 * own + 1.2 * other), own, other)
    found = model.predict(64, 32_768, 0.6, 0.4)
    assert found.source is Source.FITTED
    assert found.ms == pytest.approx(8.42 / 0.6 * 1.14, rel=0.05)


@pytest.mark.parametrize("wanted", [1, 4, 32])
def test_one_tile_at_a_time_until_its_kind_was_measured_three_times(wanted):
    model = StepModel()
    for _ in range(3):
        assert model.allowed(("backward", 4, 1024), wanted) == 1
        model.measured(("backward", 4, 1024))
    assert model.allowed(("backward", 4, 1024), wanted) == wanted
    assert model.allowed(("backward", 8, 1024), wanted) == 1
    assert model.allowed(("backward", 8, 1024), 0) == 0


def test_no_coefficient_of_the_line_is_negative():
    line = Line()
    rng = np.random.default_rng(3)
    for _ in range(200):
        batch = float(rng.integers(1, 64))
        line.add(batch, 100 * batch, 10.0 - 0.05 * batch + 0.1 * rng.standard_normal())
    line.fit()
    assert min(line.fixed_ms, line.batch_ms, line.context_ms) >= 0
    assert line.ms(32, 3_200) == pytest.approx(8.4, abs=1.5)
