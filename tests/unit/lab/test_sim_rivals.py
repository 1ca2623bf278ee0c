"""Rivals at their best: what is tried, what is chosen, and the mechanics of those that this room models alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_worlds import GAP_MS, MS, RESUME_MS, trace_of, world_of
from valve_tools.replay import rivals as page
from valve_tools.replay.report import write
from valve_tools.replay.rerender import render
from valve_tools.sim.combinations import BY_NAME, run_combination, run_solo
from valve_tools.sim.memory_policies import NoShare, Prism
from valve_tools.sim.ours import ProductWake
from valve_tools.sim.pairs import bind
from valve_tools.sim.rivals import PRISM, SWEEPS, TIME_SLICE, XSCHED
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Context, Tuning
from valve_tools.sim.world import Compute, run

ROWS = [(100.0, 100, 20), (600.0, 100, 20)]
CHATS = [(400.0 * i, 600, 30) for i in range(60)]


def shared(**changes):
    return run(world_of(ROWS, **changes), Prism(online_reserve=60), ProductWake(hinted=True))


def solo():
    return run(world_of(ROWS, compute=Compute.ALONE), NoShare())


def test_a_time_slice_costs_online_what_offline_has_between_two_of_its_own():
    slices = {"compute": Compute.TIME_SLICE, "slice_ns": MS, "offline_slice_ns": MS}
    sliced, alone = shared(**slices), solo()
    twice = sliced.tpot_ms - GAP_MS, alone.tpot_ms - GAP_MS

    assert (twice[0] / twice[1]) == pytest.approx([2.0, 2.0], abs=0.25)
    assert sliced.utilisation_gain > shared().utilisation_gain


def test_online_that_fits_into_one_slice_waits_for_the_slice_that_runs_and_no_more():
    slices = {"compute": Compute.TIME_SLICE, "slice_ns": 1000 * MS, "offline_slice_ns": 2 * MS}
    added = shared(**slices).tpot_ms - solo().tpot_ms

    assert ((added > 0.3) & (added < 2.0)).all()


def test_a_rival_that_has_not_gone_on_yet_never_pays_for_a_stop():
    """Edge after each launch: with 20 ms until it goes on, gaps of 1 ms find it still stopped."""
    stop = replace(world_of(ROWS).stop, resume_ns=round((RESUME_MS + 20) * MS))
    edge = shared(compute=Compute.EDGE, stop=stop)

    assert edge.gates_per_request.tolist() == [1, 1]


def bound_of(rows):
    return bind(Folder(traces=(trace_of(rows),), lengths=(), ignored=()))[0]


def test_fewer_commands_in_flight_are_over_sooner_and_cost_offline_more():
    bound = bound_of(CHATS)
    context = Context(bound=bound, seed=1, solo=run_solo(bound, 1))
    xsched = next(sweep for sweep in SWEEPS if sweep.rival == XSCHED)
    few, many = (run_combination(xsched.tried[f"{n}, at once, 40 %"], context) for n in (1, 4))

    assert few.gate_took_ns.mean() * 3 < many.gate_took_ns.mean()
    assert few.totals["offline_useful_tokens"] < many.totals["offline_useful_tokens"]


def test_what_online_is_given_to_keep_is_never_taken_by_the_job():
    bound = bound_of(CHATS)
    context = Context(bound=bound, seed=1, solo=run_solo(bound, 1))
    prism = next(sweep for sweep in SWEEPS if sweep.rival == PRISM)
    kept = {words: one.memory(context).online_reserve for words, one in prism.tried.items()}

    assert kept["40 %"] == round(0.4 * context.solo.handles)
    assert kept["10 pages"] == int(10 * 2 * 2 * 32 / Tuning().settings.handle_mib)


def test_the_pages_run_every_rival_at_the_value_that_was_found():
    for sweep in SWEEPS:
        assert BY_NAME[sweep.rival] is sweep.tried[sweep.best]
        assert len(sweep.tried) > 2
    assert {XSCHED, TIME_SLICE, PRISM} <= set(BY_NAME)


def test_a_rival_at_another_value_than_its_best_never_passes(tmp_path, monkeypatch):
    """The page of the sweep says so, and its claim is missed."""
    task = page.RivalTask(bound=bound_of(CHATS[:20]), seed=1)
    found = page.run_task(task)
    prism = {one.value: one for one in found if one.rival == PRISM}
    better = replace(
        prism["10 pages"].summary, share_of_alone=9.0, **dict.fromkeys(METRICS, dict.fromkeys(QUANTILES, 0.0))
    )
    changed = [replace(one, summary=better) if one is prism["10 pages"] else one for one in found]

    report = page.report(changed, [1])
    missed = [claim.pair for claim in report.claims if not claim.ok and claim.pair == PRISM]
    assert missed == [PRISM, PRISM]

    write(report, tmp_path)
    render(tmp_path / "rivals.json", tmp_path / "again")
    assert (tmp_path / "again" / "rivals.md").read_text() == (tmp_path / "rivals.md").read_text()


METRICS = ("own_ttft_increase", "own_tpot_increase")
QUANTILES = ("mean", "p50", "p95", "p99")
