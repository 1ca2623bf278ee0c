"""The pages of the eviction and cluster experiments, from small runs of the experiments themselves."""

from __future__ import annotations

from valve_tools.replay import cluster as cluster_page
from valve_tools.replay import eviction as eviction_page
from valve_tools.replay import fleet as fleet_page
from valve_tools.replay.report import write
from valve_tools.sim.cluster import ClusterPlan, part_of, run_cluster
from valve_tools.sim.cluster_load import LoadSettings
from valve_tools.sim.eviction import EvictionPlan, run_eviction

SMALL = EvictionPlan(
    intervals_s=(30,), sizes=(0.3,), other_handles_mib=(), pool_mib=4096, churn_s=30, reclaims=2, min_s=60, max_s=60
)


def test_the_eviction_page_shows_every_policy_and_both_allocators(tmp_path):
    report = eviction_page.report(run_eviction(None, seeds=(1,), plan=SMALL))
    write(report, tmp_path)

    assert {"fifo", "selective"} <= {row[0] for row in report.tables[0].rows}
    assert len(report.charts) == 2
    assert "affine hand-out" in (tmp_path / "eviction.html").read_text()


def test_the_cluster_page_shows_every_scheduler_at_every_demand(tmp_path):
    plan = ClusterPlan(demands=(1.0,), judged_demand=1.0, load=LoadSettings(nodes=2))
    report = cluster_page.report(run_cluster(None, (1,), plan=plan), (1,))
    write(report, tmp_path)

    assert len(report.tables) == 2
    assert set(plan.schedulers) == {row[0] for row in report.tables[0].rows}
    assert (tmp_path / "cluster.html").read_text().count("<svg") == 3


def test_the_fleet_page_varies_theta_and_the_rules_for_slas():
    base = fleet_page.base_plan(nodes=1)
    everything = fleet_page.settings(base)
    tried = tuple(everything[:2])
    task = fleet_page.Task(part=part_of(None, 1, fleet_page.DEMAND, base), settings=tried)
    found = fleet_page.run_task(task)
    report = fleet_page.report(tried, [task, task], [found, found])

    assert {"default", "theta", "SLA asked for", "moves after"} <= {one.parameter for one in everything}
    assert [row[:2] for row in report.tables[0].rows] == [("default", "default"), ("theta", "0.5")]
    assert len(report.charts) == len(fleet_page.FIGURES)
    assert "theta = 0.5" in report.charts[0].svg
