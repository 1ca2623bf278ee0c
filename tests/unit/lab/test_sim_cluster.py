"""The mechanics of the cluster experiment, each on a fleet made by hand."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from reports import harvest_node
from valve_kube.objects import node_report
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.placement.rank import PlacementSettings
from valve_tools.sim.cluster import ClusterPlan, WeekResult, _model_error, claims_of, part_of, saved_over
from valve_tools.sim.cluster_jobs import MODELS, JobSettings, JobTable, Truth, draw_jobs
from valve_tools.sim.cluster_load import (
    MINUTES,
    ONLINE_8B,
    ONLINE_32B,
    STEPS,
    WINDOWS,
    FleetLoad,
    FleetService,
    LoadSettings,
    drawn_services,
    fleet_load,
    services_from,
)
from valve_tools.sim.cluster_reports import ReportHistory
from valve_tools.sim.cluster_run import ClusterRun, RunSettings, WeekTally
from valve_tools.sim.cluster_schedulers import SCHEDULERS, Foresight, NodeShares, Scheduler
from valve_tools.sim.traces import TraceError

from valved.kube.series import NodeSeries

EIGHT_B, TP2 = 0, 2


def fleet(idle_of_replica, free_of_replica=None, ranks=None, alignment=None, nodes=1):
    """One node; replicas in GPU order, one or two ranks each, constant over the week."""
    ranks = np.array(ranks or [1] * len(idle_of_replica))
    free_of_replica = free_of_replica or [1.0] * len(ranks)

    def bytes_of(values):
        return np.repeat(np.rint(np.array(values) * STEPS).astype(np.uint8)[:, None], MINUTES, axis=1)

    return FleetLoad(
        settings=LoadSettings(nodes=nodes),
        replica_of_gpu=np.repeat(np.arange(len(ranks)), ranks),
        rank_alignment=np.array(alignment or [1.0] * len(ranks)),
        ranks=ranks,
        idle=bytes_of(idle_of_replica),
        free=bytes_of(free_of_replica),
        borrowed=0,
    )


def share(load, members, model, recompute_s=0.0):
    achieved, ran = Truth(load, recompute_s).share(5, np.array([members]), model)
    return float(achieved[0]), float(ran[0])


def test_alone_on_an_idle_card_a_job_achieves_everything():
    assert share(fleet([1.0] * 8), [0], EIGHT_B) == (1.0, 1.0)


def test_a_job_runs_for_the_idle_share_of_its_gpu():
    achieved, ran = share(fleet([0.6] * 8), [3], EIGHT_B)

    assert ran == pytest.approx(0.6)
    assert achieved == pytest.approx(0.6)


def test_gpus_of_different_services_must_be_idle_at_once():
    _, ran = share(fleet([0.6, 0.6] + [1.0] * 6), [0, 1], TP2)

    assert ran == pytest.approx(0.36)


def test_ranks_of_one_service_are_idle_together_as_far_as_they_are_aligned():
    """Busy 0.4 each; overlap over union 0.6 makes the union 0.4 * 2 / 1.6 = 0.5."""
    aligned = fleet([0.6] * 4, ranks=[2] * 4)
    partly = fleet([0.6] * 4, ranks=[2] * 4, alignment=[0.6] * 4)

    assert share(aligned, [0, 1], TP2)[1] == pytest.approx(0.6)
    assert share(partly, [0, 1], TP2)[1] == pytest.approx(0.5)
    assert share(partly, [1, 2], TP2)[1] == pytest.approx(0.36)


def test_the_rank_with_least_memory_sets_the_pace():
    load = fleet([1.0] * 8, free_of_replica=[1.0, 0.5] + [1.0] * 6)
    half = float(MODELS[TP2].requests_per_s(np.array([round(0.5 * STEPS) / STEPS * 71.8]))[0])
    full = float(MODELS[TP2].requests_per_s(np.array([71.8]))[0])

    assert share(load, [0, 1], TP2)[0] == pytest.approx(half / full)


def test_too_little_memory_means_no_throughput():
    assert share(fleet([1.0] * 8, free_of_replica=[0.2] * 8), [0], EIGHT_B)[0] == 0.0


def test_memory_taken_back_costs_recomputation_in_proportion():
    """At one minute of window 5 the card loses 40 of 71.8 GiB, of the 53.8 GiB cache: 20 s * 40 / 53.8 of 600 s."""
    load = fleet([1.0] * 8)
    steps = round(40 / 71.8 * STEPS)
    load.free[0, 55:60] -= np.uint8(steps)
    lost_gib = steps / STEPS * 71.8
    without, _ = share(load, [0], EIGHT_B)
    with_loss, _ = share(load, [0], EIGHT_B, recompute_s=20.0)

    assert without - with_loss == pytest.approx(20 / 600 * lost_gib / (71.8 - 18.0))


def test_curves_rise_with_memory_and_start_at_the_smallest_cache():
    for model in MODELS:
        rates = model.requests_per_s(np.linspace(0, 71.8, 60))

        assert (np.diff(rates) >= 0).all()
        assert model.requests_per_s(np.array([model.fit_gib - 0.1]))[0] == 0


def test_reports_say_what_the_hour_and_the_day_before_were():
    load = fleet([0.25] * 4, ranks=[2] * 4, free_of_replica=[0.5] * 4, alignment=[0.7] * 4)
    seen = ReportHistory(load).fleet(180, np.ones((1, 8), dtype=bool))

    assert seen.idle == pytest.approx(np.full((1, 8), round(0.25 * STEPS) / STEPS), abs=1e-6)
    assert seen.histogram.sum(axis=2) == pytest.approx(np.ones((1, 8)))
    assert seen.histogram[0, 0].argmax() == 16
    assert seen.alignment[0, 0, 1] == pytest.approx(0.7)
    busy = 1 - round(0.25 * STEPS) / STEPS
    assert seen.alignment[0, 0, 2] == pytest.approx(busy**2 / (2 * busy - busy**2), abs=1e-5)


def test_told_the_hour_the_model_finds_what_a_steady_load_gives():
    """Two ranks, busy 0.4 each with overlap over union 0.6: idle together half of the time; half of the memory."""
    load = fleet([0.6] * 4, ranks=[2] * 4, free_of_replica=[0.5] * 4, alignment=[0.6] * 4)
    members = np.array([[2, 3]])
    said = ReportHistory(load).nowcast(42, members, MODELS[TP2].profile(71.8))

    assert said == pytest.approx(share(load, [2, 3], TP2)[0], rel=0.03)


def test_told_the_hour_the_model_follows_a_change_that_the_last_day_hides():
    load = fleet([1.0] * 8)
    load.idle[0, 30 * 60 :] = 0
    reports, members = ReportHistory(load), np.array([[0]])
    profile = MODELS[EIGHT_B].profile(71.8)

    assert reports.nowcast(174, members, profile)[0] == pytest.approx(1.0, abs=0.02)
    assert reports.nowcast(180, members, profile)[0] == 0.0
    assert reports.fleet(180, np.ones((1, 8), dtype=bool)).idle[0, 0] == pytest.approx(1.0, abs=0.01)


def test_the_simulated_scheduler_counts_on_what_the_product_s_would():
    """Published figures were of the last day's mean while the product went by the last hour."""
    load = fleet([1.0] * 8)
    load.idle[0, 29 * 60 :] = 0  # grew busy an hour ago
    load.idle[1, : 29 * 60] = 0  # fell idle an hour ago
    load.idle[2, 30 * 60 - 10 :] = 0  # grew busy ten minutes ago
    seen = ReportHistory(load).fleet(180, np.ones((1, 8), dtype=bool))

    node = harvest_node("n1", cards=3)
    shares = [(0.0, 0.0, 23 / 24), (1.0, 1.0, 1 / 24), (0.0, 5 / 6, 143 / 144)]
    for gpu, (recent, hour, day) in zip(node["status"]["gpus"], shares, strict=True):
        gpu["idle"] = {"10m": recent, "1h": hour, "24h": day}
    assert seen.idle[0, :3] == pytest.approx(node_report(node).idle[:3], abs=0.01)


def test_one_factor_a_workload_removes_an_error_that_all_its_instances_share():
    """Instances of two workloads on four nodes achieve 0.9 and 0.7 of what the model says."""
    tally = WeekTally()
    for node in range(4):
        tally.predictions += [(0.0, 0.45, 200, 8 * node, 0.5, 0), (0.0, 0.35, 200, 8 * node, 0.5, 1)]

    assert _model_error(tally, is_calibrated=False) == pytest.approx((0.05 / 0.45 + 0.15 / 0.35) / 2)
    assert _model_error(tally, is_calibrated=True) == pytest.approx(0.0)


def scheduler(name, load):
    truth = Truth(load, 0.0)
    foresight = Foresight(truth, load.settings.nodes) if name == "oracle" else None
    return Scheduler(name, ReportHistory(load), foresight, PlacementSettings(), 0), truth


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_offers_an_open_set_that_fits(name):
    load = fleet([0.5] * 4, ranks=[2] * 4)
    one, _ = scheduler(name, load)
    free = np.ones((1, 8), dtype=bool)
    free[0, :6] = False

    offer = one.offer(10, TP2, 0.2, frozenset(), free)

    assert offer.set_index[0] == 27  # {6, 7}, the last of the 28 pairs
    assert one.offer(10, TP2, 0.2, frozenset(), np.zeros((1, 8), dtype=bool)).set_index[0] == -1


def test_only_the_full_model_and_the_oracle_keep_ranks_together():
    """Idle 0.5 on GPUs 0 and 1 of one service, 0.6 on 2 and 3 of two services: the blind go where idle is highest."""
    load = fleet([0.5, 0.6, 0.6, 0.1, 0.1, 0.1, 0.1], ranks=[2] + [1] * 6)
    chosen = {}
    for name in ("most-idle", "full", "oracle"):
        one, _ = scheduler(name, load)
        chosen[name] = int(one.offer(10, TP2, 0.2, frozenset(), np.ones((1, 8), dtype=bool)).set_index[0])

    pairs = [(i, j) for i in range(8) for j in range(i + 1, 8)]
    assert {name: pairs[index] for name, index in chosen.items()} == {
        "most-idle": (2, 3),
        "full": (0, 1),
        "oracle": (0, 1),
    }


def jobs(*rows):
    """(arrival, model, gpus, sla, work) each."""
    arrival, model, gpus, sla, work = map(np.array, zip(*rows, strict=True))
    return JobTable(arrival=arrival, model=model, gpus=gpus, sla=sla.astype(np.float64), work=work.astype(np.float64))


def test_a_job_ends_when_its_instances_have_done_its_work():
    """Two instances at 0.5 do one GPU-hour in an hour: six windows."""
    load = fleet([0.5] * 8)
    one, truth = scheduler("full", load)
    run = ClusterRun(one, truth, jobs((0, EIGHT_B, 2, 0.2, 0.99)), 1, RunSettings(counted_from=0, start_s=0.0))
    for window in range(5):
        run.step(window)
    assert run.tally.finished == 0
    run.step(5)
    run.check_integrity()

    assert run.tally.finished == 1
    assert run.tally.occupied_gpus == 12
    assert run.tally.saved_gpus == pytest.approx(6, abs=0.05)


def test_a_gpu_takes_one_offline_instance():
    load = fleet([0.9] * 8)
    one, truth = scheduler("full", load)
    run = ClusterRun(one, truth, jobs((0, EIGHT_B, 64, 0.2, 1e9)), 1, RunSettings())
    run.step(0)
    run.check_integrity()

    assert len(run._running.job) == 8
    assert run.waiting == 1


class Optimist(Scheduler):
    """Promises anything, so that the monitor has work."""

    def offer(self, window, model, sla, avoid, open_gpus):
        self.avoided = avoid
        offer = super().offer(window, model, 0.0, avoid, open_gpus)
        return NodeShares(share=offer.share, set_index=offer.set_index, score=offer.score)


def test_a_job_below_its_sla_for_five_windows_moves_and_avoids_the_node():
    load = fleet([0.3] * 8)
    one = Optimist("full", ReportHistory(load), None, PlacementSettings(), 0)
    run = ClusterRun(
        one,
        Truth(load, 0.0),
        jobs((0, EIGHT_B, 1, 0.6, 1e9)),
        1,
        RunSettings(counted_from=0, monitor=MonitorSettings(windows=5)),
    )
    for window in range(6):
        run.step(window)
    assert (run.tally.violations, run.tally.moved) == (1, 1)

    run.step(6)
    assert one.avoided == frozenset({"node-0000"})
    assert len(run._running.job) == 0


def test_instances_may_move_before_a_violation_is_one():
    one = Optimist("full", ReportHistory(fleet([0.3] * 8)), None, PlacementSettings(), 0)
    settings = RunSettings(counted_from=0, monitor=MonitorSettings(windows=2))
    run = ClusterRun(one, Truth(fleet([0.3] * 8), 0.0), jobs((0, EIGHT_B, 1, 0.6, 1e9)), 1, settings)
    for window in range(3):
        run.step(window)

    assert (run.tally.violations, run.tally.moved) == (0, 1)


def test_a_fleet_moves_no_more_pods_at_once_than_the_product_s_budget_allows():
    """40 pods miss their SLA at once: five percent of them in ten minutes, where the simulation once moved all."""
    load = fleet([0.3] * 40, nodes=5)
    one = Optimist("full", ReportHistory(load), None, PlacementSettings(), 0)
    wanted = jobs(*((0, EIGHT_B, 1, 0.6, 1e9) for _ in range(40)))
    run = ClusterRun(one, Truth(load, 0.0), wanted, 5, RunSettings(counted_from=0))
    moved = []
    for window in range(8):
        before = run.tally.moved
        run.step(window)
        moved.append(run.tally.moved - before)

    assert sum(moved[:2]) == 0
    assert all(0 < count <= 2 for count in moved[2:])


def test_a_pod_that_starts_does_no_work_meanwhile():
    load = fleet([1.0] * 8)
    one, truth = scheduler("full", load)
    run = ClusterRun(one, truth, jobs((0, EIGHT_B, 1, 0.2, 1e9)), 1, RunSettings(counted_from=0, start_s=150.0))
    run.step(0)

    assert run.tally.saved_gpus == pytest.approx(0.75)
    run.step(1)
    assert run.tally.saved_gpus == pytest.approx(1.75)


def promised(idle, sla):
    """What is kept of a placement on GPUs that are idle so much from the first window on."""
    load = fleet([idle] * 8)
    one = Optimist("full", ReportHistory(load), None, PlacementSettings(), 0)
    run = ClusterRun(one, Truth(load, 0.0), jobs((0, EIGHT_B, 1, sla, 1e9)), 1, RunSettings(counted_from=0))
    for window in range(20):
        run.step(window)
    run.close()
    return run.tally.promises


def test_a_promise_is_kept_unless_the_monitor_would_move_the_pod():
    ((said, achieved, sla, kept),) = promised(0.6, 0.5)
    assert (said, achieved) == (pytest.approx(0.6, abs=0.01), pytest.approx(0.6, abs=0.01))
    assert (sla, kept) == (0.5, True)

    broken = promised(0.3, 0.5)
    assert len(broken) > 0
    assert not any(kept for *_, kept in broken)


def test_the_oracle_takes_what_keeps_its_word_for_the_hours_it_is_told():
    """GPU 0 is good for twenty minutes, GPU 1 for two hours and GPU 2, less so, for three."""
    load = fleet([1.0, 1.0, 0.6] + [0.0] * 5)
    load.idle[0, 20:] = 0
    load.idle[1, 120:] = 0
    foresight = Foresight(Truth(load, 0.0), 1)
    worth = foresight.share(EIGHT_B, 0, 0.5)[0]

    assert worth[0] == -1.0
    assert worth[1] == pytest.approx(12 / 14)  # it stays for the two windows by which it is judged
    assert worth[2] == pytest.approx(0.6, abs=0.01)
    assert (worth[3:] == -1.0).all()
    assert foresight.share(EIGHT_B, WINDOWS - 1, 0.0).shape == (1, 8)


def test_the_simulated_nodes_report_what_a_node_of_the_product_keeps():
    """The same busy seconds into the product's own series: hour, day and alignment are the report's."""
    rng = np.random.default_rng(3)
    busy = np.repeat(rng.random((2, WINDOWS)) < 0.4, 10, axis=1)  # whole windows, so that minutes need no dice
    load = fleet([1.0] * 8)
    load.idle[:2] = np.where(busy, 0, STEPS).astype(np.uint8)
    node = NodeSeries(2)
    for minute in range(300 * 10):
        node.beat(60.0 * minute, busy[:, minute].tolist())
        node.book(60.0 * minute, [60.0, 60.0], np.where(busy[:, minute], 0.0, 60.0).tolist())

    seen = ReportHistory(load).fleet(300, np.ones((1, 8), dtype=bool), lambda seen: seen.hour)
    day = ReportHistory(load).fleet(300, np.ones((1, 8), dtype=bool), lambda seen: seen.day)

    assert seen.idle[0, :2] == pytest.approx([node.idle(gpu, 3600) for gpu in (0, 1)], abs=1e-6)
    assert day.idle[0, :2] == pytest.approx([node.idle(gpu, 86400) for gpu in (0, 1)], abs=1e-6)
    assert seen.alignment[0, 0, 1] == pytest.approx(node.alignment()[0], abs=1e-4)


def test_the_demand_sets_the_rate_of_arrivals():
    table = draw_jobs(JobSettings(backlog_h=0.0), 1000.0, WINDOWS, 1)

    assert table.work.sum() == pytest.approx(1000 * 168, rel=0.15)


def constant_service(model, concurrency):
    rate = concurrency / (100 / model.prefill_tokens_per_s + 100 * model.token_s)
    return FleetService(
        name="constant",
        model=model,
        rate=np.full(WINDOWS, rate),
        cv=np.ones(WINDOWS),
        in_tokens=100.0,
        out_tokens=100.0,
    )


def test_replicas_are_sized_for_the_wanted_idle_share():
    settings = LoadSettings(nodes=4, fleet_idle=0.46)
    load = fleet_load([constant_service(ONLINE_8B, 40.0), constant_service(ONLINE_32B, 40.0)], settings, 1)
    idle = (load.idle.mean(axis=1) / STEPS)[load.replica_of_gpu].mean()

    assert len(load.replica_of_gpu) == 32
    assert idle == pytest.approx(0.46, abs=0.05)


def test_the_ranks_of_a_service_sit_side_by_side():
    load = fleet_load([constant_service(ONLINE_32B, 40.0)], LoadSettings(nodes=4), 1)

    assert (load.replica_of_gpu[0::2] == load.replica_of_gpu[1::2]).all()


def test_about_a_third_of_the_instances_overlap_only_partly():
    load = fleet_load([constant_service(ONLINE_32B, 400.0)], LoadSettings(nodes=200), 1)

    assert (load.rank_alignment < 0.96).mean() == pytest.approx(0.32, abs=0.05)


def test_services_are_read_by_shape_and_lengths_are_borrowed_by_seed(tmp_path: Path):
    rows = "".join(f"{600 * w},{c},2.0,1.1,Gamma,1,1\n" for w in range(WINDOWS) for c in (0, 1))
    (tmp_path / "svc_rates.csv").write_text("t,client,rate,cv,dist,a,b\n" + rows)
    (tmp_path / "svc_lengths.csv").write_text("client,win_s,kind,mean\n0,0,input,100\n0,0,output,20\n")

    services, borrowed = services_from(tmp_path, 0)

    assert (len(services), borrowed) == (2, 1)
    assert services[1].in_tokens == 100

    later = "".join(f"{604800 + 600 * w},{c},2.0,1.1,Gamma,1,1\n" for w in range(WINDOWS) for c in (0, 1))
    (tmp_path / "svc_rates.csv").write_text("t,client,rate,cv,dist,a,b\n" + later)
    assert (services_from(tmp_path, 0)[0][0].rate == services[0].rate).all()

    (tmp_path / "svc_rates.csv").write_text("t,client,rate,cv,dist,a,b\n0,0,many,1.1,Gamma,1,1\n")
    with pytest.raises(ValueError, match=r"svc_rates\.csv:2: column rate"):
        services_from(tmp_path, 0)


@pytest.mark.parametrize(
    ("rates", "lengths", "words"),
    [
        ("0,0,nan,1", "0,0,input,1", r"rates\.csv:2: column rate holds nan, it must be from 0"),
        ("0,0,-1,1", "0,0,input,1", r"rates\.csv:2: column rate holds -1"),
        ("0,0,1,inf", "0,0,input,1", r"rates\.csv:2: column cv holds inf"),
        ("nan,0,1,1", "0,0,input,1", r"rates\.csv:2: column t holds nan"),
        ("0,0,1", "0,0,input,1", r"rates\.csv:2: 3 cells where the header has 4"),
        ("604200,0,1,1\n0,0,1,1", "0,0,input,-5", r"lengths\.csv:2: column mean holds -5"),
        ("604200,0,1,1\n0,0,1,1", "0,0,input,5", r"lengths\.csv: no client with the mean of an input and of an output"),
    ],
)
def test_malformed_rates_and_lengths_are_refused_with_file_and_line(tmp_path: Path, rates, lengths, words):
    (tmp_path / "svc_rates.csv").write_text(f"t,client,rate,cv\n{rates}\n")
    (tmp_path / "svc_lengths.csv").write_text(f"client,win_s,kind,mean\n{lengths}\n")

    with pytest.raises(TraceError, match=words):
        services_from(tmp_path, 0)


def test_clients_have_names_and_numbers_come_in_their_order(tmp_path: Path):
    rows = "".join(f"{600 * w},{c},2.0,1.1\n" for w in range(WINDOWS) for c in ("chat", "10", "9.0"))
    (tmp_path / "svc_rates.csv").write_text("t,client,rate,cv\n" + rows)
    (tmp_path / "svc_lengths.csv").write_text("client,win_s,kind,mean\nchat,0,input,100\nchat,0,output,20\n")

    services, borrowed = services_from(tmp_path, 0)

    assert [one.name for one in services] == ["0-9", "0-10", "0-chat"]
    assert borrowed == 2


def test_an_archive_that_is_none_is_refused_by_name(tmp_path: Path):
    (tmp_path / "svc_rates.csv.gz").write_text("no archive")
    (tmp_path / "svc_lengths.csv.gz").write_text("no archive")

    with pytest.raises(TraceError, match=r"svc_rates\.csv\.gz: unreadable"):
        services_from(tmp_path, 0)


def test_services_are_drawn_for_a_folder_without_rates_of_a_week(tmp_path: Path):
    (tmp_path / "requests.csv").write_text("t_s,in_tok,out_tok\n0,1,1\n")
    (tmp_path / "short_rates.csv").write_text("t,client,rate,cv,dist,a,b\n0,0,2.0,1.1,Gamma,1,1\n")
    (tmp_path / "short_lengths.csv").write_text("client,win_s,kind,mean\n0,0,input,100\n0,0,output,20\n")

    part = part_of(tmp_path, 1, 1.0, ClusterPlan())

    assert [one.name for one in part.services] == [one.name for one in drawn_services(1)]
    assert part.source == "40 drawn services"


def week(scheduler, seed, saved, demand=1.0):
    zero = {figure.name: 0.0 for figure in fields(WeekResult)}
    return WeekResult(**zero | {"scheduler": scheduler, "seed": seed, "saved_of_fleet": saved, "demand": demand})


def test_a_rival_is_compared_seed_by_seed_and_not_where_it_saved_nothing():
    """Its fleet of that seed had no room for it: 0 / 0 is no level, and 0.2 / 0 no lead."""
    weeks = [week("full", 1, 0.2), week("oracle", 1, 0.4), week("full", 2, 0.0), week("oracle", 2, 0.0),
             week("full", 3, 0.3), week("oracle", 3, 0.0)]  # fmt: skip

    assert saved_over("oracle", weeks) == [0.5]
    assert saved_over("most-idle", weeks) == []


def test_claims_are_judged_at_one_demand_by_the_worse_end_over_the_seeds():
    """Saved 0.2 and 0.4 of the fleet: mean 0.3, half an interval 12.706 * 0.1."""
    weeks = (week("full", 1, 0.2), week("full", 2, 0.4), week("full", 1, 9.0, demand=0.6))
    claims = {one.claim: one for one in claims_of(1.0, weeks)}

    assert claims["GPUs saved over fleet"].value == pytest.approx(0.3 - 12.706 * 0.1)
    assert not claims["GPUs saved over fleet"].ok
    assert claims["SLA missed, share of job-hours"].ok
    assert claims["saved, full model over oracle"].verdict == "VOID"  # no week ran the oracle
    assert claims["GPUs saved over fleet"].note.startswith("saved of fleet, mean: full 0.3")
    assert claims["SLA missed, share of job-hours"].note == ""
