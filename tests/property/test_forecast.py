"""What a node keeps of its past, and what placement counts on because of it, for any past that a node can have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valve_scheduler.model import forecast, windows_of
from valve_scheduler.model.forecast import MOST_OVER_RECENT

from valved.kube import seriesfile
from valved.kube.series import NodeSeries

BOOK_S = 30  # the real one is a second
WINDOWS = {"10m": 600, "1h": 3600, "24h": 86400}
shares = st.floats(0, 1).map(lambda share: round(share, 3))
seen = st.one_of(st.just(float("nan")), shares)
starts = st.integers(0, 10**7)


def booked(series: NodeSeries, at_s: float, length_s: int, left: float, judged: float = 1.0) -> float:
    """So long a stretch of one load, ending at what is returned; `judged` 0: nobody could tell how idle it was."""
    for _ in range(0, length_s, BOOK_S):
        at_s += BOOK_S
        series.book(at_s, [BOOK_S * judged], [BOOK_S * judged * left])
    return at_s


def promised(series: NodeSeries) -> float:
    recent, hour, day = windows_of(series.windows(0))
    return float(forecast(np.array([recent]), np.array([hour]), np.array([day]))[0])


@given(recent=seen, hour=seen, day=seen)
def test_no_more_is_ever_promised_than_one_of_the_windows_left(recent: float, hour: float, day: float) -> None:
    (counted,) = forecast(np.array([recent]), np.array([hour]), np.array([day]))
    known = [share for share in (recent, hour, day) if not np.isnan(share)]

    assert 0 <= counted <= max(known, default=0.0) + 1e-12
    assert np.isnan(recent) or counted <= recent + MOST_OVER_RECENT + 1e-12


@given(recent=shares, hour=shares, less=shares)
def test_a_busier_past_is_never_promised_more(recent: float, hour: float, less: float) -> None:
    before = forecast(np.array([recent]), np.array([hour]), np.array([np.nan]))

    assert forecast(np.array([recent * less]), np.array([hour]), np.array([np.nan])) <= before
    assert forecast(np.array([recent]), np.array([hour * less]), np.array([np.nan])) <= before


@settings(max_examples=30, deadline=None)
@given(start=starts, before=shares, calm_h=st.integers(1, 25), left=shares, into_s=st.integers(60, 360))
def test_a_fresh_peak_is_never_promised_away_once_it_has_lasted_ten_minutes(
    start: int, before: float, calm_h: int, left: float, into_s: int
) -> None:
    """However quiet the hours before: 0.7 of a quiet hour was still promised while all of it was taken."""
    series = NodeSeries(1)
    at_s = booked(series, start, calm_h * 3600, max(before, left))
    booked(series, at_s, 10 * (60 + into_s // 10), min(before, left))

    assert promised(series) <= min(before, left) + MOST_OVER_RECENT + 0.01


@settings(max_examples=10, deadline=None)
@given(start=starts, calm=st.floats(0.5, 1), busy=st.floats(0, 0.3))
def test_a_daily_peak_is_never_promised_to_a_job_that_it_would_starve(start: int, calm: float, busy: float) -> None:
    """A day of quiet nights and busy days, seen every ten minutes of the second day."""
    series, at_s, left_then = NodeSeries(1), float(start), []
    for bucket in range(288):
        left = busy if 48 <= bucket % 144 < 108 else calm
        at_s = booked(series, at_s, 600, left)
        left_then.append(left)
        is_fresh = bucket > 0 and left_then[-2] != left  # no window is in it yet
        if not is_fresh and left == busy:
            assert promised(series) <= busy + MOST_OVER_RECENT + 0.01
    assert promised(series) == pytest.approx(calm, abs=0.01), "and the night is not given away for the day's sake"


@settings(max_examples=30, deadline=None)
@given(start=starts, minutes=st.integers(10, 70), left=shares)
def test_a_short_history_is_never_padded_with_idle_or_busy_time(start: int, minutes: int, left: float) -> None:
    """A node that has seen a service for an hour promises what that hour left: neither more nor less."""
    series = NodeSeries(1)
    booked(series, start, 60 * minutes, left)

    assert promised(series) == pytest.approx(left, abs=1e-3)
    assert ("1h" in series.windows(0)) == (minutes > 30)
    assert "24h" not in series.windows(0)


@settings(max_examples=30, deadline=None)
@given(start=starts, before=shares, gap_s=st.integers(0, 90_000), after=shares, after_s=st.integers(10, 1200))
def test_what_nobody_could_judge_is_never_idle_and_never_busy(
    start: int, before: float, gap_s: int, after: float, after_s: int
) -> None:
    """A pause, a guard or a brake: the promise stays between what was seen before and after it."""
    series = NodeSeries(1)
    at_s = booked(series, start, 7200, before)
    at_s = booked(series, at_s, gap_s, 0.0, judged=0.0)
    booked(series, at_s, after_s, after)

    assert min(before, after) - 1e-3 <= promised(series) <= max(before, after) + 1e-3
    assert all(series.seen_s(0, window_s) <= window_s for window_s in WINDOWS.values())


@settings(max_examples=50, deadline=None)
@given(start=starts, before=shares, jump_s=st.integers(61, 200_000), left=shares, after_s=st.integers(10, 3600))
def test_a_silence_or_a_jump_of_the_clock_is_never_booked_as_time_that_was_seen(
    start: int, before: float, jump_s: int, left: float, after_s: int
) -> None:
    """A daemon that was held up, a machine that slept: its hour came to stand for the last ten minutes."""
    series = NodeSeries(1)
    at_s = booked(series, start, 7200, before) + jump_s
    series.book(at_s, [float(jump_s)], [jump_s * before])
    booked(series, at_s, after_s, left)

    windows = series.windows(0)
    assert all(series.seen_s(0, window_s) <= window_s for window_s in WINDOWS.values())
    assert windows["1m"] == pytest.approx(left, abs=1e-3)
    if jump_s >= 600 and "10m" in windows:
        assert windows["10m"] == pytest.approx(left, abs=1e-3)
    assert promised(series) <= max(before, left) + 1e-3


@settings(max_examples=20, deadline=None)
@given(start=starts, past=st.lists(shares, min_size=1, max_size=5), away_s=st.integers(0, 30), later=shares)
def test_a_restart_in_between_never_changes_what_is_promised(
    tmp_path_factory: pytest.TempPathFactory, start: int, past: list[float], away_s: int, later: float
) -> None:
    """Through the file that a daemon really writes: ten minutes, hour and day are as if it had never been away."""
    path = tmp_path_factory.mktemp("series") / seriesfile.FILE
    through, ended = NodeSeries(1), NodeSeries(1)
    at_s = float(start)
    for left in past:
        booked(through, at_s, 6 * 3600, left)
        at_s = booked(ended, at_s, 6 * 3600, left)
    seriesfile.write(path, ended.saved(), "boot", ["GPU-a"])
    begun = NodeSeries(1)
    at_s += away_s

    assert seriesfile.read(path, begun, "boot", ["GPU-a"], at_s) == ""
    for series in (through, begun):
        booked(series, at_s, 1200, later)
    assert begun.windows(0) == through.windows(0)
    assert set(begun.windows(0)) >= {"10m", "1h"}
    assert promised(begun) == promised(through)
