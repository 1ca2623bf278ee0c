"""The comparison of forecasts: what is compared, on which services, and what the page may claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from valve_scheduler.model import forecast
from valve_tools.replay import forecast as page
from valve_tools.replay.report import write
from valve_tools.replay.rerender import render
from valve_tools.sim import forecast as experiment
from valve_tools.sim.cluster_load import WINDOWS
from valve_tools.sim.cluster_reports import Seen
from valve_tools.sim.cluster_run import Tally


def test_the_rule_called_shipped_is_the_product_s() -> None:
    """Published figures were once of a forecast that the product did not have."""
    rng = np.random.default_rng(1)
    seen = Seen(hour=rng.random((3, 8)), day=rng.random((3, 8)), buckets=rng.random((144, 3, 8)).astype(np.float32))

    assert experiment.RULES[experiment.SHIPPED](seen) == pytest.approx(forecast(seen.buckets[-1], seen.hour, seen.day))


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
    tally = Tally()
    tally.promises = [(0.25, 0.3, 0.2, True), (0.29, 0.1, 0.2, False), (1.0, 0.9, 0.6, True)]
    tenths = experiment.tenths_of(tally)

    assert [one.placements for one in tenths] == [0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert (tenths[2].predicted, tenths[2].achieved, tenths[2].kept) == (pytest.approx(0.54), pytest.approx(0.4), 1)
    assert experiment.tenths_of(Tally())[0].placements == 0


def outcome(policy: str, missed: float, in_sla: float, seed: int = 1) -> experiment.Outcome:
    return experiment.Outcome(
        load=experiment.HELD_OUT,
        demand=experiment.AMPLE,
        seed=seed,
        policy=policy,
        missed=missed,
        saved=in_sla,
        saved_in_sla=in_sla,
        moves_per_job_day=1.0,
        kept=0.5,
        tenths=(),
    )


def claims(*, best: float) -> dict[str, bool]:
    found = [outcome(policy, 0.005, 0.30, seed) for policy in experiment.RULES for seed in (1, 2)]
    found += [outcome("most-idle", 0.2, 0.28, seed) for seed in (1, 2)]
    found += [outcome("random", 0.5, best, seed) for seed in (1, 2)]
    found += [outcome("oracle", 0.0, 0.31, seed) for seed in (1, 2)]
    return {one.claim: one.ok for one in page._claims(found, experiment.HELD_OUT)}


def test_an_oracle_that_a_policy_beats_is_no_bound() -> None:
    assert all(claims(best=0.2).values())
    assert [name for name, ok in claims(best=0.35).items() if not ok] == [
        "saved within SLA of the best policy over the oracle: a bound"
    ]


def test_a_small_run_has_every_policy_and_makes_the_same_page_again(tmp_path: Path) -> None:
    (task,) = experiment.tasks_of(None, (1,), experiment.plan_of(nodes=2))
    outcomes = experiment.run_task(task)
    made = page.report(outcomes, (1,), 2, "0" * 16)
    paths = write(made, tmp_path)

    named = {one.policy for one in outcomes if one.demand == experiment.AMPLE}
    assert named == {*experiment.RULES, *experiment.RIVALS}
    assert {path.name for path in paths} >= {"forecast-0.svg", "forecast-1.svg"}
    assert "![Frontier" in (tmp_path / "forecast.md").read_text()
    render(tmp_path / "forecast.json", tmp_path / "again")
    assert all((tmp_path / "again" / path.name).read_text() == path.read_text() for path in paths)
    assert experiment.run_task(replace(task)) == outcomes
