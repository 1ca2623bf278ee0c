"""The pages of the eviction and cluster experiments, from small runs of the experiments themselves."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from valve_tools.replay import cluster as cluster_page
from valve_tools.replay import eviction as eviction_page
from valve_tools.replay import fleet as fleet_page
from valve_tools.replay import pairs as pairs_page
from valve_tools.replay import sensitivity as sensitivity_page
from valve_tools.replay.command import main
from valve_tools.replay.pair_results import PairOutcome, Results
from valve_tools.replay.report import claims_table, write
from valve_tools.replay.rerender import render
from valve_tools.replay.svg import grouped_bars, look_of, tornado
from valve_tools.sim.cluster import ClusterPlan, ClusterResult, part_of, run_cluster
from valve_tools.sim.cluster_load import LoadSettings
from valve_tools.sim.cluster_schedulers import SCHEDULERS
from valve_tools.sim.combinations import COMBINATIONS, OURS, SHIPPED
from valve_tools.sim.eviction import EvictionPlan, run_eviction
from valve_tools.sim.machine import MODEL_ERROR
from valve_tools.sim.metrics import Interval, Summary
from valve_tools.sim.pairs import PAIRS
from valve_tools.sim.rivals import PRISM
from valve_tools.sim.shape import LoadShape

SMALL = EvictionPlan(
    intervals_s=(30,), sizes=(0.3,), other_handles_mib=(), pool_mib=4096, churn_s=30, reclaims=2, min_s=60, max_s=60
)


def assert_rendered_alike(folder, name):
    """The page made again from its JSON is the page."""
    again = folder / "again"
    render(folder / f"{name}.json", again)

    for suffix in ("json", "md", "html"):
        assert (again / f"{name}.{suffix}").read_text() == (folder / f"{name}.{suffix}").read_text()


def test_the_eviction_page_shows_every_policy_and_both_allocators(tmp_path):
    report = eviction_page.report(run_eviction(None, seeds=(1,), plan=SMALL))
    write(report, tmp_path)

    assert {"fifo", "selective"} <= {row[0] for row in report.tables[0].rows}
    assert len(report.charts) == 2
    assert "affine hand-out" in (tmp_path / "eviction.html").read_text()
    assert_rendered_alike(tmp_path, "eviction")


SMALL_FLEET = ClusterPlan(demands=(1.0,), judged_demand=1.0, load=LoadSettings(nodes=2))


@pytest.fixture(scope="module")
def small_week() -> ClusterResult:
    return run_cluster(None, (1,), plan=SMALL_FLEET)


def test_a_small_week_runs_under_every_scheduler_and_is_the_same_again(small_week):
    again = run_cluster(None, (1,), plan=replace(SMALL_FLEET, schedulers=("full",)))

    def without_clock(result):
        return [
            replace(one, decision_p50_ms=0.0, decision_p99_ms=0.0) for one in result.weeks if one.scheduler == "full"
        ]

    assert without_clock(small_week) == without_clock(again)
    assert [one.scheduler for one in small_week.weeks] == list(SCHEDULERS)
    assert all(0 <= one.saved_of_fleet <= one.gain <= one.fleet_idle + 0.01 for one in small_week.weeks)


def test_the_cluster_page_shows_every_scheduler_at_every_demand(small_week, tmp_path):
    report = cluster_page.report(small_week, (1,))
    write(report, tmp_path)

    assert [table.title.split(" ")[0] for table in report.tables] == ["Demand", "GPUs", "Predicted"]
    assert report.title == "Cluster: a week of 16 GPUs"
    assert set(SCHEDULERS) == {row[0] for row in report.tables[0].rows}
    assert (tmp_path / "cluster.html").read_text().count("<svg") == 3
    assert_rendered_alike(tmp_path, "cluster")


def test_the_fleet_page_varies_theta_and_the_rules_for_slas(tmp_path):
    base = fleet_page.base_plan(nodes=1)
    everything = fleet_page.settings(base)
    tried = tuple(everything[:2])
    task = fleet_page.FleetTask(part=part_of(None, 1, fleet_page.DEMAND, base), settings=tried)
    found = fleet_page.run_task(task)
    report = fleet_page.report(tried, task.part.source, (1, 1), [found, found])

    assert {"default", "theta", "SLA asked for", "moves after"} <= {one.parameter for one in everything}
    assert [row[:2] for row in report.tables[0].rows] == [("default", "default"), ("theta", "0.5")]
    assert len(report.charts) == len(fleet_page.FIGURES)
    assert "theta = 0.5" in report.charts[0].svg


SHAPE = LoadShape(harvestable=0.5, idle_per_hour=100.0, kv_peak_tokens=7000.0)


def summary_of(**changes):
    flat = {"mean": 0.1, "p50": 0.1, "p95": 0.1, "p99": 0.1}
    fields = {
        "ttft_ms": flat, "tpot_ms": flat, "ttft_increase": flat, "tpot_increase": flat,
        "own_ttft_increase": flat, "own_tpot_increase": flat, "offline_tokens_per_s": 100.0,
        "share_of_alone": 0.5, "utilisation_gain": 0.5, "lost_tokens_per_s": 0.0, "max_preemptions": 1,
        "preemptions": (5, 5, 0, 0), "stop_ms": {"p50": 0.35, "p99": 0.9, "max": 1.0}, "reclaims_by_hour": (12,),
        "kills": 0, "refused": 0, "unserved": 0, "stalls": 0, "iterations": 10,
    }  # fmt: skip
    return Summary(**fields | changes)


def outcome_of(pair, seed, **summaries):
    """Every combination does the same little, but for those given."""
    summaries = {one.name: summary_of(offline_tokens_per_s=50.0) for one in COMBINATIONS} | summaries
    flat = {"mean": 4.0, "p50": 4.0, "p95": 4.0, "p99": 4.0}
    return PairOutcome(pair=pair, seed=seed, own_ttft_ms=flat, own_tpot_ms=flat, solo_ttft_ms=flat, solo_tpot_ms=flat,
                   alone_tokens_per_s=200.0, requests=10,
                   refused=0, handles=572, summaries=summaries)  # fmt: skip


def pairs_report(*outcomes):
    entries = [
        pairs_page.PairEntry(pair=pair, trace="made", hours=0.5, work="made", shape=SHAPE)
        for pair in PAIRS
        if pair.key in {one.pair for one in outcomes}
    ]
    return pairs_page.report(entries, Results(outcomes), [1, 2])


def test_the_pairs_page_carries_intervals_and_can_be_made_again_from_its_figures(tmp_path):
    report = pairs_report(
        *(
            outcome_of(key, seed, **{SHIPPED: summary_of(offline_tokens_per_s=98.0 + seed), PRISM: summary_of()})
            for key in ("P1", "P10")
            for seed in (1, 2)
        )
    )
    write(report, tmp_path)

    rows = {row[0]: row for row in report.tables[-1].rows}
    assert rows[SHIPPED][9] == "99.5 ± 6.35"
    assert "<line" in report.charts[-1].svg
    assert_rendered_alike(tmp_path, "pairs")


def test_level_is_not_ahead_and_the_page_says_which():
    report = pairs_report(
        *(
            outcome_of("P1", seed, **{SHIPPED: summary_of(offline_tokens_per_s=99.5), PRISM: summary_of()})
            for seed in (1, 2)
        )
    )
    ahead, _ = report.tables[1].rows

    assert ahead == ("P1", "ours", PRISM, "0.995 ± 0", "0.9950", "no", "yes", "yes")


def test_a_rival_that_is_ahead_under_its_own_papers_marks_is_never_left_out():
    looser = {"mean": 4.0, "p50": 4.0, "p95": 9.0, "p99": 9.0}
    rival = summary_of(offline_tokens_per_s=120.0, own_ttft_increase=looser)
    one = outcome_of("P1", 1, **{SHIPPED: summary_of(), "GPreempt+OurMem": rival})

    ours, papers = pairs_report(one).tables[1].rows

    assert ours[2] != "GPreempt+OurMem"
    assert papers[:4] == ("P1", "the papers'", "GPreempt+OurMem", "0.833")
    assert papers[5] == "no"


def test_what_sharing_the_memory_costs_is_never_hidden_by_a_reference_that_shares_it_too():
    """The service alone beside the job's weights has lost its cache already: a claim goes by its own GPU."""
    whole = {"mean": 22.7, "p50": 5.0, "p95": 60.0, "p99": 102.0}
    report = pairs_report(outcome_of("P4", 1, **{SHIPPED: summary_of(own_ttft_increase=whole)}))

    missed = [claim for claim in report.claims if claim.claim.startswith("TTFT")]
    assert [(claim.value, claim.ok) for claim in missed] == [(22.7, False), (102.0, False)]
    assert "over the same pool +0.10 %" in missed[0].note


def test_a_slice_without_a_second_hour_has_no_verdict_on_reclaims():
    one = pairs_report(outcome_of("P1", 1, **{SHIPPED: summary_of()}))
    two = pairs_report(outcome_of("P1", 1, **{SHIPPED: summary_of(reclaims_by_hour=(12, 24))}))

    def claim(report):
        return next(claim for claim in report.claims if claim.claim.startswith("reclaims"))

    assert json.loads(claim(one).line())["value"] is None
    assert claims_table([claim(one)]).rows[0][4] == "n/a"
    assert (claim(two).value, claim(two).ok) == (24, True)
    assert two.tables[2].rows == (("P1", 24, 12, "yes", "no"),)


def test_a_missed_latency_mark_says_what_a_stop_costs():
    late = {"mean": 9.0, "p50": 9.0, "p95": 9.0, "p99": 9.0}
    report = pairs_report(outcome_of("P6", 1, **{SHIPPED: summary_of(own_ttft_increase=late)}))

    (note,) = {claim.note for claim in report.claims if not claim.ok and claim.claim.startswith("TTFT")}
    assert "a stop takes 0.35 ms (P99 0.90) and meets 50% of the requests; alone the mean is 4 ms" in note


def test_the_sensitivity_page_can_be_made_again_from_its_figures(tmp_path):
    one = Interval(mean=1.0, low=0.9, high=1.1, n=2)
    keys = [
        ("default", "default", OURS),
        ("default", "default", sensitivity_page.WITHOUT_HINT),
        ("tau_min_ns", "1 s", OURS),
        ("cooldown floor_ns", "1 ms", sensitivity_page.WITHOUT_HINT),
    ]
    report = sensitivity_page.report(keys, {"a figure": dict.fromkeys(keys, one)}, [1, 2])
    write(report, tmp_path)

    assert [row[0] for row in report.tables[0].rows][2:] == ["least tau", "cooldown floor"]
    assert_rendered_alike(tmp_path, "sensitivity")


def test_what_is_no_result_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"experiment": "tp8"}')

    assert main(["render", str(tmp_path / "x.json")]) == 2
    assert "x.json: not the figures of one of pairs" in capsys.readouterr().err


def test_a_tornado_names_every_setting_that_can_be_seen():
    drawn = tornado([("headroom", [("32", 0.2), ("64", 0.5), ("512", 1.4), ("128", 1.0)])], centre=1.0, unit="u")

    assert "32 · 64<" in drawn
    assert ">512<" in drawn


def test_every_bar_carries_its_value_and_an_interval_its_whiskers():
    series = {"ours": [0.02], "other": [40.0], "cut": [400.0]}
    drawn = grouped_bars(["P1"], series, unit="%", cap=50.0, halves={"ours": [0.0], "other": [2.0], "cut": [0.0]})
    plain = grouped_bars(["P1"], series, unit="%", cap=50.0)

    assert all(f">{words}</text>" in drawn for words in ("0.02", "40", "400"))
    assert drawn.count("<line") == plain.count("<line") + 3


def test_no_two_series_of_a_chart_look_alike_not_even_without_colours():
    """By hatch where the eye or the print has one grey for two colours."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    looks = [look_of(i) for i in range(12)]
    assert len(set(looks)) == len(looks)
    for one, (colour, hatch) in enumerate(looks[:8]):
        for other, other_hatch in looks[one + 1 : 8]:
            assert hatch != other_hatch or abs(grey(colour) - grey(other)) > 0.1


def test_a_chart_fills_its_page():
    drawn = grouped_bars(["P1"], {"ours": [1.0]}, unit="%")

    assert 'width="100%"' in drawn
    assert "viewBox" in drawn


def test_a_small_page_has_claims_as_a_grid_and_charts_as_files_and_no_details(tmp_path):
    late = {"mean": 9.0, "p50": 9.0, "p95": 9.0, "p99": 9.0}
    report = pairs_report(*(outcome_of(f"P{i}", 1, **{SHIPPED: summary_of(own_ttft_increase=late)}) for i in (1, 2)))
    write(report, tmp_path)
    page = (tmp_path / "pairs.md").read_text()

    assert "| TTFT mean increase % | 2.50 | **9.00** | **9.00** |" in page
    assert "(pairs-0.svg)" in page
    assert (tmp_path / "pairs-0.svg").read_text().startswith("<svg")
    assert "Channel without hint+OurMem" not in page
    assert "Channel without hint+OurMem" in (tmp_path / "pairs.html").read_text()
    assert MODEL_ERROR in page


@pytest.mark.parametrize("groups", [5, 10])
def test_a_chart_of_few_groups_never_leaves_half_its_page_empty(groups: int) -> None:
    """The legend's width was the page's, and two rules for five loads stood in two fifths of it."""
    drawn = grouped_bars([f"P{g}" for g in range(groups)], {"ours": [1.0] * groups, "other": [2.0] * groups}, unit="%")

    width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', drawn)[0])
    ends = [float(x) + float(w) for x, w in re.findall(r'<rect x="([0-9.]+)" y="[^"]*" width="([0-9.]+)"', drawn)]
    assert max(ends) > 0.8 * width
