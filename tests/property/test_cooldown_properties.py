"""What the cooldown promises for any sequence of gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.policy.cooldown import (
    MS,
    SECOND,
    CooldownObservation,
    CooldownSettings,
    covered_ns,
    first_cooldown,
    step_cooldown,
)

settings_of = st.builds(
    lambda floor, start, ceiling, factor, window: CooldownSettings(
        floor_ns=floor,
        start_ns=floor + start,
        ceiling_ns=floor + start + ceiling,
        factor=factor,
        window_ns=window,
    ),
    st.integers(MS // 10, 10 * MS),
    st.integers(0, 50 * MS),
    st.integers(0, SECOND),
    st.floats(1.01, 8.0),
    st.integers(SECOND, 3600 * SECOND),
)
steps_of = st.lists(
    st.tuples(st.integers(0, 60 * SECOND), st.lists(st.integers(0, 5 * SECOND), max_size=4).map(tuple), st.booleans()),
    max_size=30,
)


def play(settings, steps):
    """Every (state, decision) of a life."""
    now, state, seen = 0, first_cooldown(0, settings), []
    for wait, gaps, held in steps:
        now += wait
        state, decision = step_cooldown(state, CooldownObservation(gaps_ns=gaps, held=held), now, settings)
        seen.append((now, state, decision))
    return seen


@given(settings_of, steps_of)
def test_it_never_leaves_its_bounds(settings, steps):
    for _, _, decision in play(settings, steps):
        assert settings.floor_ns <= decision.cooldown_ns <= settings.ceiling_ns


@given(settings_of, steps_of)
def test_it_rises_only_when_a_gap_was_seen(settings, steps):
    last = settings.start_ns
    for (_, gaps, _), (_, _, decision) in zip(steps, play(settings, steps), strict=True):
        assert gaps or decision.cooldown_ns <= last + 1
        last = decision.cooldown_ns


@given(settings_of, steps_of, st.integers(1, 5 * SECOND), st.floats(0.0, 1.0))
def test_a_gap_stays_covered_while_the_promise_lasts(settings, steps, gap, share):
    """The once-per-request bound without hints: gaps up to the largest recent one never outlast the cooldown."""
    age = int(share * covered_ns(settings))

    _, _, decision = play(settings, [*steps, (0, (gap,), True), (age, (), True)])[-1]

    assert decision.cooldown_ns >= min(gap, settings.ceiling_ns / settings.factor) * 0.999


@given(settings_of, steps_of)
def test_a_window_of_held_time_without_gaps_forgets_everything(settings, steps):
    _, _, decision = play(settings, [*steps, (settings.window_ns, (), True)])[-1]

    assert decision.cooldown_ns <= settings.floor_ns * 1.000_1


@given(settings_of, steps_of, st.integers(2, 6))
def test_looking_more_often_changes_nothing(settings, steps, parts):
    """Ageing in small steps must not accumulate rounding."""
    whole = play(settings, [*steps, (60 * SECOND, (), True)])[-1]
    split = play(settings, [*steps, *[(60 * SECOND // parts, (), True)] * parts])
    missing = 60 * SECOND - 60 * SECOND // parts * parts
    last = play(settings, [*steps, *[(60 * SECOND // parts, (), True)] * parts, (missing, (), True)])[-1]

    assert len(split) == len(steps) + parts
    assert whole[1].mark_ns == last[1].mark_ns
    assert abs(whole[2].cooldown_ns - last[2].cooldown_ns) <= 1


@given(settings_of, st.lists(st.tuples(st.integers(0, 30 * SECOND), st.integers(0, SECOND)), min_size=1, max_size=20))
def test_one_mark_is_enough_to_remember_all_gaps(settings, gaps):
    """The decayed maximum over a list of gaps equals the one mark that the policy keeps."""
    played = play(settings, [(wait, (gap,), True) for wait, gap in gaps])
    now, _, decision = played[-1]
    ratio = settings.floor_ns / settings.ceiling_ns
    remembered = [
        (0, settings.start_ns / settings.factor),
        *((at, gap) for (at, _, _), (_, gap) in zip(played, gaps, strict=True)),
    ]
    cap = settings.ceiling_ns / settings.factor
    expected = max(min(gap, cap) * ratio ** ((now - at) / settings.window_ns) for at, gap in remembered)
    clamped = min(max(settings.factor * expected, settings.floor_ns), settings.ceiling_ns)

    assert abs(decision.cooldown_ns - clamped) <= settings.factor + 1 + clamped * 1e-9
