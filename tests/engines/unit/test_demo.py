"""`make demo-vllm` without its engines: the settings are ones that valved takes, and its arithmetic."""

from __future__ import annotations

import pytest
from valve_tools.engines.figures import (
    METRICS,
    Bench,
    Look,
    Outcome,
    Share,
    compare,
    keeps_latency,
    progress,
    share,
)
from valve_tools.engines.sides import CONFIG, POOL_MIB, batch_lines

from valved.config import load_config


def looks(*states):
    """One a second: (a request is open, tokens)."""
    return [
        Look(at_s=float(at), is_open=is_open, tokens=tokens, ran_s=at / 2)
        for at, (is_open, tokens) in enumerate(states)
    ]


def test_valved_takes_the_demos_settings(tmp_path):
    path = tmp_path / "valve.toml"
    path.write_text(CONFIG.format(pool_mib=POOL_MIB, remap="helper"))

    assert load_config(path, {}).memory.pool_mib == POOL_MIB


def test_the_batchs_share_begins_and_ends_with_the_benchmarks_requests():
    seen = share(looks((False, 0), (False, 90), (True, 100), (False, 100), (False, 140), (True, 180), (False, 900)))

    assert (seen.seconds, seen.idle_s, seen.tokens) == (3.0, 2.0, 80)
    assert seen.ran_s == pytest.approx(1.5)


def test_without_any_request_there_is_no_share():
    assert share(looks((False, 0), (False, 50))).seconds == 0.0


def outcome(**conditions):
    """Runs whose four metrics are alike: {condition: [milliseconds of each run]}."""
    part = Share(seconds=10.0, idle_s=5.0, ran_s=4.0, tokens=400)
    rest = {"completed": 30, "stops": 3, "reclaims": 2, "outlived": True, "share": part, "idle_rate": 100.0}
    return Outcome(
        benches=[
            Bench(condition=name, latency=dict.fromkeys(METRICS, value), **rest)
            for name, values in conditions.items()
            for value in values
        ]
    )


def test_what_is_added_is_told_of_means_beside_the_spread_alone():
    found = compare(outcome(alone=[90.0, 110.0], Valve=[105.0, 111.0]), "Valve", "mean_ttft_ms")

    assert found.added == pytest.approx(8.0)
    assert found.spread == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("alone", "valve", "ungated", "kept"),
    [
        ([100.0, 100.0], [100.9], [200.0], True),
        ([100.0, 100.0], [101.5], [200.0], False),  # TPOT may grow by one per cent
        ([98.0, 102.0], [103.0], [200.0], True),  # runs alone differ by more
        ([98.0, 102.0], [103.0], [102.5], False),  # nothing shows without Valve: the run says nothing
    ],
)
def test_latency_is_kept_within_the_bound_or_the_spread(alone, valve, ungated, kept):
    assert keeps_latency(outcome(alone=alone, Valve=valve, ungated=ungated)) is kept


def test_progress_is_of_what_the_idle_time_was_worth():
    assert progress(outcome(alone=[1.0], Valve=[1.0, 1.0])) == pytest.approx(0.8)


def test_a_batch_file_has_each_request_once_and_the_same_ones_every_time():
    lines = batch_lines(40)

    assert len({line["custom_id"] for line in lines}) == 40
    assert lines == batch_lines(40)
