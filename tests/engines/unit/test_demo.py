"""`make demo-vllm` without its engines: the settings are ones that valved takes, and its arithmetic."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from valve_tools.engines.figures import (
    METRICS,
    BatchRun,
    ClientRun,
    EngineOutcome,
    RuleResult,
    Share,
    StatusSample,
    compare,
    latency,
    progress,
    share,
    show,
    too_noisy,
)
from valve_tools.engines.sides import CONFIG, POOL_MIB, Sides, batch_lines

from valved.config import load_config


def looks(*states):
    """One a second: (a request is open, tokens)."""
    return [
        StatusSample(at_s=float(at), is_open=is_open, tokens=tokens, ran_s=at / 2)
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
    return EngineOutcome(
        benches=[
            ClientRun(condition=name, latency=dict.fromkeys(METRICS, value), **rest)
            for name, values in conditions.items()
            for value in values
        ]
    )


def test_what_is_added_is_told_of_medians_beside_the_spread_alone():
    found = compare(outcome(alone=[90.0, 100.0, 110.0], Valve=[105.0, 108.0, 300.0]), "Valve", "mean_ttft_ms")

    assert found.added == pytest.approx(8.0)
    assert found.spread == pytest.approx(20.0)


QUIET = [100.0, 100.2, 100.1, 99.9, 100.0]


@pytest.mark.parametrize(
    ("alone", "valve", "ungated", "verdict"),
    [
        (QUIET, [100.9] * 5, [200.0], RuleResult.KEPT),
        (QUIET, [101.5] * 5, [200.0], RuleResult.BROKEN),  # TPOT may grow by one per cent
        (QUIET, [100.9] * 5, [100.5], RuleResult.BROKEN),  # nothing shows without Valve
        (QUIET, [100.9] * 4 + [140.0], [200.0], RuleResult.KEPT),  # one disturbed run moves no median
    ],
)
def test_latency_is_judged_by_the_bound_alone(alone, valve, ungated, verdict):
    assert latency(outcome(alone=alone, Valve=valve, ungated=ungated)) is verdict


@pytest.mark.parametrize("valve", [100.0, 135.0])
def test_a_noisy_run_is_void_and_never_a_pass_nor_a_wider_bound(valve):
    """Runs alone 14 per cent apart: once that was what Valve was allowed to add."""
    found = outcome(alone=[100.0, 100.0, 114.0, 100.0, 100.0], Valve=[valve] * 5, ungated=[200.0])

    assert latency(found) is RuleResult.VOID
    assert set(too_noisy(found)) == set(METRICS)


def test_fewer_than_five_rounds_never_pass():
    assert latency(outcome(alone=[100.0] * 4, Valve=[100.0] * 4, ungated=[200.0])) is RuleResult.VOID


def test_a_batch_that_is_too_short_is_void_and_never_a_failure_of_valve():
    """Its length is chosen by whoever starts the demo."""
    found = outcome(alone=QUIET, Valve=[100.9] * 5, ungated=[200.0])
    answers = {"c0": ["a"]}
    found.undisturbed, found.batches = BatchRun(seconds=1.0, tokens=answers), [BatchRun(seconds=1.0, tokens=answers)]
    console = Console(quiet=True)
    assert show(console, found) is RuleResult.KEPT

    next(bench for bench in found.benches if bench.condition == "Valve").outlived = False
    assert show(console, found) is RuleResult.VOID

    found.batches = [BatchRun(seconds=1.0, tokens={"c0": ["another"]})]
    assert show(console, found) is RuleResult.BROKEN


def test_both_sides_keep_a_prefix_cache(tmp_path):
    sides = Sides(node=None, folder=tmp_path, python=tmp_path, port=1)

    assert "--enable-prefix-caching" in sides.engine_flags()


def test_progress_is_of_what_the_idle_time_was_worth():
    assert progress(outcome(alone=[1.0], Valve=[1.0, 1.0])) == pytest.approx(0.8)


def test_progress_is_void_and_never_a_pass_where_no_idle_time_was_seen():
    """valved showed requests as open that had ended: once that was a progress of 388900000000000 %."""
    found = outcome(alone=QUIET, Valve=[100.9] * 5, ungated=[200.0])
    answers = {"c0": ["a"]}
    found.undisturbed, found.batches = BatchRun(seconds=1.0, tokens=answers), [BatchRun(seconds=1.0, tokens=answers)]
    for bench in found.benches:
        bench.share = Share(seconds=10.0, idle_s=0.0, ran_s=4.0, tokens=400)
    console = Console(record=True, quiet=False, width=200, file=StringIO())

    assert show(console, found) is RuleResult.VOID
    assert "VOID offline progress of unknown worth: 2000 tokens in 0.0 idle of 50.0 s" in console.export_text()


def test_a_batch_that_did_nothing_in_idle_time_never_passes():
    found = outcome(alone=QUIET, Valve=[100.9] * 5, ungated=[200.0])
    for bench in found.benches:
        bench.idle_rate = 0.0

    assert progress(found) == 0.0
    assert show(Console(quiet=True), found) is RuleResult.BROKEN


def test_a_batch_file_has_each_request_once_and_the_same_ones_every_time():
    lines = batch_lines(40)

    assert len({line["custom_id"] for line in lines}) == 40
    assert lines == batch_lines(40)
