"""The fleet in the lab: replicas that are not the planner's, claims that can fail, and a page that goes stale."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from valve_router.plan.task import Task, TaskKind
from valve_tools.lab.fleet import __main__ as fleet_lab
from valve_tools.lab.fleet import cells, claims, freed
from valve_tools.lab.fleet import reading as reading_module
from valve_tools.lab.fleet.load import STOP_S, Arrivals, FleetShape
from valve_tools.lab.fleet.page import Found, page
from valve_tools.lab.fleet.policies import POLICIES
from valve_tools.lab.fleet.proofs import proofs
from valve_tools.lab.fleet.reading import reading
from valve_tools.lab.fleet.run import FleetRun, FleetWorld
from valve_tools.lab.fleet.stages import FOREVER, Stages
from valve_tools.lab.granted.engine import Bench, Load
from valve_tools.replay import provenance


@pytest.fixture(scope="module")
def quick():
    return [cell for setting in cells.quick()[:3] for cell in cells.work(setting)]


def train(at):
    return Task(arrival_s=at, tokens=150, kind=TaskKind.TRAINING)


def test_a_request_stops_training_and_training_loses_no_work():
    fleet = FleetShape(stages=1)
    forward_s, backward_s = fleet.profile.forward.seconds(train(0.0)), fleet.profile.backward.seconds(train(0.0))
    node = Stages(fleet.profile)
    training = node.take(train(0.0), 0.0)

    request = node.take(Task(arrival_s=0.05, tokens=150), 0.05)
    node.advance(FOREVER)

    assert request.response_s == pytest.approx(STOP_S + forward_s)
    assert training.end_s == pytest.approx(2 * forward_s + backward_s + 0.0, abs=2 * STOP_S)


def test_without_a_gate_a_request_waits_for_all_of_it():
    fleet = FleetShape(stages=1, has_gate=False)
    node = Stages(fleet.profile)
    training = node.take(train(0.0), 0.0)

    request = node.take(Task(arrival_s=0.05, tokens=150), 0.05)

    assert request.forward_end_s == pytest.approx(training.end_s + fleet.profile.forward.seconds(request.task))


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("name", ["pack", "printed", "separate"])
def test_every_task_runs_and_none_waits_longer_than_the_age_limit(has_gate, name):
    world = FleetWorld(
        fleet=FleetShape(has_gate=has_gate), arrivals=Arrivals(per_s=20.0, training=0.5, count=150), seed=3
    )
    run = FleetRun(world, POLICIES[name])

    found = run.figures()

    assert found.unserved == 0
    assert found.oldest_s <= 62.0
    assert all(ran.end_s < FOREVER for _, ran in run.ran)
    assert sorted(ran.task.tokens for _, ran in run.ran) == sorted(task.tokens for task in run.tasks)


def test_the_same_seed_gives_the_same_figures():
    world = FleetWorld(fleet=FleetShape(), arrivals=Arrivals(per_s=8.0, training=0.3, count=80), seed=3, noise=0.2)
    assert FleetRun(world, POLICIES["pack"]).figures() == FleetRun(world, POLICIES["pack"]).figures()
    other = replace(world, seed=4)
    assert FleetRun(world, POLICIES["pack"]).figures() != FleetRun(other, POLICIES["pack"]).figures()


def test_the_proofs_hold():
    assert [claim.claim for claim in proofs(12) if not claim.ok] == []


def test_with_a_gate_pack_is_within_a_point_of_every_rival_and_a_worse_one_would_be_missed(quick):
    assert claims.missed(quick, "gate") == []
    swapped = [
        replace(cell, figures=tuple(replace(one, attainment=one.attainment - 0.05) for one in cell.figures))
        if cell.policy == "pack"
        else cell
        for cell in quick
    ]
    assert {one.rival for one in claims.missed(swapped, "gate")} == {"least response", "round robin", "separate"}
    assert any(not claim.ok for claim in claims.claims(swapped))


def test_packing_and_granting_free_the_most_and_keep_the_target():
    found = [freed.work(one) for one in freed.quick()]
    assert all(claim.ok for claim in freed.claims(found))
    assert found[0].gpus["packed, granted"] > found[0].gpus["spread, idle"] + 0.1


def test_a_replica_is_never_filled_where_a_long_prompt_makes_a_short_answer_late():
    """Full by the mean alone, one in ten answers of long prompts and few tokens was late."""
    arrive, bench = tuple(float(one) for one in range(100)), Bench.h100()
    chat = Load(name="chat", duration_ms=1e5, arrive_ms=arrive, prompt=(200,) * 100, answer=(200,) * 100)
    code = replace(chat, prompt=(2000,) * 100, answer=(20,) * 100)
    assert freed.full_at(chat, bench, 8.0) > 10
    assert freed.full_at(code, bench, 8.0) == 1


def test_one_table_alone_is_run_and_kept_whichever_it_is(tmp_path, monkeypatch):
    """`--table freed` has no cell of the grid, and ended in a traceback."""
    monkeypatch.setattr(freed, "parts", lambda folder, seeds: freed.quick())
    monkeypatch.setattr(fleet_lab, "proofs", list)
    assert fleet_lab.main(["--traces", str(tmp_path), "--table", "freed", "--out", str(tmp_path), "--jobs", "1"]) == 0
    assert len(fleet_lab.joined([tmp_path / "freed.json"]).freed) == 1


def test_no_number_of_the_reading_is_ever_typed():
    """The page was made again once, and its words kept the numbers of before."""
    tree = ast.parse(Path(reading_module.__file__).read_text())
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    formats = re.compile(r"[.][0-9][f%]")
    assert [one for one in texts if any(sign.isdigit() for sign in one) and not formats.fullmatch(one)] == []


def test_what_is_said_of_the_runs_follows_the_cells(quick):
    found = Found(cells=quick, proofs=[], freed=[])
    assert "within a point of every rival in 3" in reading(found)
    worse = [
        replace(cell, figures=tuple(replace(one, attainment=one.attainment - 0.05) for one in cell.figures))
        if cell.policy == "pack"
        else cell
        for cell in quick
    ]
    text = " ".join(reading(replace(found, cells=worse)).split())
    assert "within a point of every rival in 0" in text
    assert all(f"{name} (5" in text for name in {cell.name for cell in quick})
    assert "GPUs freed" not in text


def test_the_page_names_what_is_missed_and_goes_stale_with_the_planner(quick, tmp_path, monkeypatch):
    made = page(Found(cells=quick, proofs=[], freed=[]), "said\n")
    (tmp_path / "README.md").write_text(made["README.md"])
    assert provenance.stale(tmp_path) == []

    told = provenance.source
    monkeypatch.setattr(provenance, "source", lambda name: told(name) + ("x" if name.endswith("score") else ""))

    assert len(provenance.stale(tmp_path)) == 1
