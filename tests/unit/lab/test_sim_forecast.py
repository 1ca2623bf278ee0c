"""The comparison of forecasts: what is compared, on which services, and what the page may claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from valve_kube import objects
from valve_scheduler import model
from valve_scheduler.model.forecast import HOUR_WEIGHT, MOST_OVER_RECENT
from valve_scheduler.report import worth
from valve_tools.replay import forecast as page
from valve_tools.replay.report import write
from valve_tools.replay.rerender import render
from valve_tools.sim import cluster_reports
from valve_tools.sim import forecast as experiment
from valve_tools.sim.cluster_load import WINDOWS
from valve_tools.sim.cluster_reports import KeptIdle
from valve_tools.sim.cluster_run import WeekTally
from valve_tools.sim.cluster_schedulers import PRODUCT

PAGES = Path(__file__).parents[3] / "docs" / "results" / "cluster"


def test_a_published_figure_is_never_of_a_forecast_that_the_product_does_not_have() -> None:
    """It once was: the lab had the mean of a day, placement the last hour. One function for all who ask."""
    assert cluster_reports.forecast is model.forecast
    assert objects.forecast is model.forecast
    assert worth.forecast is model.forecast

    rng = np.random.default_rng(1)
    seen = KeptIdle(hour=rng.random((3, 8)), day=rng.random((3, 8)), buckets=rng.random((144, 3, 8)).astype(np.float32))
    said = experiment.RULES[experiment.SHIPPED](seen)
    assert said == pytest.approx(model.forecast(seen.buckets[-1], seen.hour, seen.day))
    assert said == pytest.approx(experiment.blend(HOUR_WEIGHT, MOST_OVER_RECENT)(seen), abs=1e-6)
    assert f"{HOUR_WEIGHT:g} hour" in experiment.SHIPPED
    assert f"at most {MOST_OVER_RECENT:g} over" in experiment.SHIPPED


def test_lab_node_and_report_never_count_on_different_shares_of_one_past() -> None:
    """The same hours as a node tells them, as the lab plays them and as Prometheus hands them to the report."""
    left = np.repeat([0.9, 0.3], [24, 2])
    buckets = np.repeat(left, 6)[-144:]
    node = {"gpuModel": "H100", "memoryMiB": 81920, "observedAt": "2026-01-01T00:00:00Z", "gpus": [{}]}
    node["gpus"] = [{"uuid": "a", "idle": {"1h": 0.3, "24h": buckets.mean()}, "freeMemory": [1] * 32}]
    told = objects.node_report({"metadata": {"name": "n"}, "status": node}).idle[0]
    week = worth.GpuHours(node="n", uuid="a", idle=np.append(left, 0.3), free_mib=np.full(27, 1.0), full_mib=2.0)

    assert told == pytest.approx(0.3)
    assert worth.counted_on(week)[-1] == told
    seen = KeptIdle(hour=np.full((1, 1), 0.3), day=np.full((1, 1), buckets.mean()), buckets=buckets[:, None, None])
    assert experiment.RULES[experiment.SHIPPED](seen)[0, 0] == pytest.approx(told)


def test_the_published_page_is_never_of_other_settings_than_the_shipped_ones() -> None:
    """Red after a change of forecast, placement or monitor defaults: `valve replay forecast` makes it again."""
    published = (PAGES / "forecast.md").read_text()

    assert f"`{experiment.settings_digest()}`" in published
    assert experiment.SHIPPED in published


def test_services_are_halved_by_what_the_files_hold_and_never_by_what_comes_out(tmp_path: Path) -> None:
    rows = "".join(f"{600 * w},{c},2.0,1.1\n" for w in range(WINDOWS) for c in range(12))
    (tmp_path / "svc_rates.csv").write_text("t,client,rate,cv\n" + rows)
    (tmp_path / "svc_lengths.csv").write_text("client,win_s,kind,mean\n0,0,input,100\n0,0,output,20\n")
    plan = experiment.plan_of(nodes=1)

    loads = {task.load: task.part.services for task in experiment.tasks_of(tmp_path, (1,), plan)}
    again = {task.load: task.part.services for task in experiment.tasks_of(tmp_path, (2,), plan)}

    chosen, held = ({one.name for one in loads[name]} for name in (experiment.CHOSEN_ON, experiment.HELD_OUT))
    assert chosen
    assert held
    assert not chosen & held
    assert chosen | held == {f"0-{client}" for client in range(12)}
    assert {one.name for one in again[experiment.HELD_OUT]} == held


def test_placements_are_counted_by_the_tenth_that_they_were_promised() -> None:
    tally = WeekTally()
    tally.promises = [(0.25, 0.3, 0.2, True), (0.29, 0.1, 0.2, False), (1.0, 0.9, 0.6, True)]
    tenths = experiment.tenths_of(tally)

    assert [one.placements for one in tenths] == [0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert (tenths[2].predicted, tenths[2].achieved, tenths[2].kept) == (pytest.approx(0.54), pytest.approx(0.4), 1)
    assert experiment.tenths_of(WeekTally())[0].placements == 0


def outcome(policy: str, missed: float, in_sla: float, seed: int = 1) -> experiment.WeekOutcome:
    return experiment.WeekOutcome(
        load=experiment.HELD_OUT,
        demand=experiment.AMPLE,
        seed=seed,
        policy=policy,
        missed=missed,
        saved=in_sla,
        saved_in_sla=in_sla,
        bound=0.33,
        moves_per_job_day=1.0,
        kept=0.5,
        tenths=(),
    )


def claims(*, best: float, missed: float = 0.005) -> dict[str, bool]:
    """Of two seeds, of which the second missed so much."""
    found = [outcome(policy, (0.005, missed)[seed - 1], 0.30, seed) for policy in experiment.RULES for seed in (1, 2)]
    found += [outcome("most-idle", 0.2, 0.28, seed) for seed in (1, 2)]
    found += [outcome("random", 0.5, best, seed) for seed in (1, 2)]
    found += [outcome("oracle", 0.0, 0.31, seed) for seed in (1, 2)]
    return {one.claim: one.ok for one in page._claims(found, experiment.HELD_OUT)}


def test_an_oracle_is_no_bound_and_a_bound_that_a_policy_beats_is_none() -> None:
    assert all(claims(best=0.2).values())
    assert all(claims(best=0.32).values())
    assert [name for name, ok in claims(best=0.35).items() if not ok] == [
        "saved of the best policy over what idle time and memory held"
    ]


def test_a_seed_that_misses_the_mark_is_never_hidden_by_the_others() -> None:
    assert [name for name, ok in claims(best=0.2, missed=0.012).items() if not ok] == ["SLA missed, share of job-hours"]


def test_a_small_run_has_every_policy_and_makes_the_same_page_again(tmp_path: Path) -> None:
    """Of the rules only the first two have a week of their own here; the others' rows are copies of it."""
    first, *_ = experiment.tasks_of(None, (1,), experiment.plan_of(nodes=1))
    told = replace(first.part.plan, schedulers=(PRODUCT, *experiment.RIVALS))
    rivals = [run for run in experiment.RUNS if run[0] in experiment.RIVALS or run[1] == experiment.SCARCE]
    own = (*first.runs[:2], *rivals)
    outcomes = experiment.run_task(replace(first, part=replace(first.part, plan=told), runs=own))
    outcomes += [replace(outcomes[0], policy=policy) for policy in list(experiment.RULES)[2:]]
    made = page.report(outcomes, (1,), 2, experiment.settings_digest(), "0" * 16)
    paths = write(made, tmp_path)

    named = {one.policy for one in outcomes if one.demand == experiment.AMPLE}
    assert named == {*experiment.RULES, *experiment.RIVALS}
    assert all(0 < one.saved <= one.bound for one in outcomes if one.demand == experiment.AMPLE)
    assert {path.name for path in paths} >= {"forecast-0.svg", "forecast-1.svg"}
    assert "![Frontier" in (tmp_path / "forecast.md").read_text()
    render(tmp_path / "forecast.json", tmp_path / "again")
    assert all((tmp_path / "again" / path.name).read_text() == path.read_text() for path in paths)
    assert experiment.run_task(replace(first, runs=first.runs[:1])) == outcomes[:1]


@pytest.mark.parametrize("policy", experiment.RULES)
def test_every_rule_says_a_share_for_every_gpu_and_has_a_week(policy: str) -> None:
    rng = np.random.default_rng(1)
    seen = KeptIdle(hour=rng.random((3, 8)), day=rng.random((3, 8)), buckets=rng.random((144, 3, 8)).astype(np.float32))
    said = experiment.RULES[policy](seen)

    assert said.shape == (3, 8)
    assert said.dtype == np.float64
    assert ((said >= 0) & (said <= 1)).all()
    weeks = [run for task in experiment.tasks_of(None, (1,), experiment.plan_of(nodes=1)) for run in task.runs]
    assert weeks.count((policy, experiment.AMPLE)) == 1
