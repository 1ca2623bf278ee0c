"""Training beside decode in the lab, loosely: targets kept, books that balance, and claims that can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from valve_hook.cotrain.interface import ALONE, Goal, Lane, Plan, Planner, WhenIdle
from valve_hook.cotrain.static_share import StaticShare
from valve_hook.cotrain.temporal import Temporal
from valve_tools.lab.cotrain import harli, llmstation, shared
from valve_tools.lab.cotrain.__main__ import main
from valve_tools.lab.cotrain.cells import MAKERS, Cell, dedicated, drawn, run
from valve_tools.lab.cotrain.engine import Engine, Memory, Setting
from valve_tools.lab.cotrain.machines import A100_40, ADA, LLAMA8B, QWEN7B, roofline
from valve_tools.lab.cotrain.page import llmstation_page

ADA8B = roofline(ADA, LLAMA8B)
SETTING = Setting(micro_tokens=1024)


@pytest.fixture(scope="module")
def cells():
    (task,) = shared.quick()
    return shared.work(task)


class Greedy(Planner):
    """Trains beside every step, whatever it costs."""

    copies = 1

    def plan(self, state):
        if state.prompt_tokens:
            return ALONE
        return Plan(Lane.PARTITION, own=0.1, other=0.9)


def test_every_token_of_every_request_is_made_once():
    load = drawn(1.0, 60.0)
    engine = Engine(load, ADA8B, Greedy(), SETTING)
    outcome = engine.run()
    assert not np.isnan(outcome.end_ms).any()
    assert (outcome.first_ms >= np.array(load.arrive_ms)).all()
    assert engine._held == 0
    assert engine._state.context == 0


def test_a_trainer_that_is_never_stopped_does_what_a_card_of_its_own_does():
    idle = replace(drawn(0.01, 300.0), arrive_ms=(), prompt=(), answer=())
    outcome = Engine(idle, ADA8B, Temporal(), SETTING).run()
    assert outcome.tokens_s == pytest.approx(dedicated(ADA8B, SETTING), rel=0.02)


@pytest.mark.parametrize("name", ["llmstation", "flexllm_greedy", "chunked"])
def test_tiles_that_fill_a_direction_end_it(name):
    """What is left of a layer must not be planned again and again, each time less."""
    load = drawn(3.0, 40.0)
    outcome = Engine(load, ADA8B, MAKERS[name](Goal(step_ms=80.0), ADA8B, SETTING, 0.0), SETTING).run()
    layers = outcome.units / SETTING.micro_tokens
    assert layers > 0.3 * len(outcome.steps_ms)


def test_a_request_waits_for_what_runs_while_nobody_is_served():
    """The whole step of `temporal`, one layer of the others, a stop of `idle`."""
    load = replace(drawn(1.0, 10.0), arrive_ms=(3333.3,), prompt=(100,), answer=(2,))
    waits = {
        name: run(name, ADA8B, [load], Goal(step_ms=1e3), SETTING).ttft99_ms
        for name in ("separate", "idle", "temporal", "ours")
    }
    layer_ms = ADA8B.unit_ms(1024)
    assert 0 < waits["idle"] - waits["separate"] < 2.0
    assert waits["ours"] - waits["separate"] <= layer_ms + 1.0
    assert waits["temporal"] - waits["separate"] > layer_ms


def test_layers_of_the_trained_base_make_room_for_the_cache_and_never_the_other_way():
    memory = Memory(roofline(A100_40, LLAMA8B), StaticShare(), Setting(micro_tokens=2048))
    shares = [memory.resident(held) for held in range(0, int(memory.pool) + 1, 5_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] < 1.0
    assert memory.resident(int(memory.pool)) == pytest.approx(0.0, abs=1e-3)


def test_a_smaller_trained_base_trains_faster():
    pair = replace(ADA8B, job=replace(ADA8B, base=QWEN7B, layers=4))
    assert dedicated(pair, SETTING) > 4 * dedicated(ADA8B, SETTING)


def test_ours_keeps_the_target_where_the_service_alone_does(cells):
    (group,) = shared.groups(cells).values()
    assert group["separate"].keeps
    assert group["ours"].keeps
    assert group["ours_shared"].keeps
    assert group["ours"].misses <= 0.01


def test_ours_trains_no_less_than_any_rival_that_keeps_the_target(cells):
    (group,) = shared.groups(cells).values()
    most = max(cell.kept_tokens for name, cell in group.items() if not name.startswith("ours"))
    assert group["ours"].kept_tokens >= 0.97 * most


def test_a_rival_that_misses_the_target_gets_nothing(cells):
    (group,) = shared.groups(cells).values()
    for cell in group.values():
        assert (cell.kept_tokens > 0) == cell.keeps


def test_who_leaves_the_engine_alone_needs_no_patch_and_the_others_say_so(cells):
    (group,) = shared.groups(cells).values()
    assert {name for name, cell in group.items() if not cell.needs_engine} == {
        "separate",
        "idle",
        "granted",
        "gpreempt_paced",
        "lithos",
        "static_share",
    }


def _with(cell: Cell, factor: float) -> Cell:
    return replace(cell, tokens_s=tuple(factor * one for one in cell.tokens_s))


def test_a_claim_fails_where_harli_would_train_too_little():
    tasks = [task for task in harli.quick() if task.note == "bandwidth"]
    found = [harli.work(task) for task in tasks if task.policy in {"separate", "static_share", "harli_closest"}]
    exact = {law: harli.accuracy(contention) for law, contention in harli.CONTENTION.items()}
    good = {(one.claim, one.pair): one.ok for one in harli.claims(found, exact)}
    worse = [_with(cell, 0.5) if cell.policy == "harli_closest" else cell for cell in found]
    bad = {(one.claim, one.pair): one.ok for one in harli.claims(worse, exact)}
    for claim in ("H1 harli_closest over Separate, Ada, mean", "H2 harli_closest over Static, worst pair"):
        assert good[claim, "bandwidth"]
        assert not bad[claim, "bandwidth"]


def test_the_page_names_every_claim_and_the_planners_that_made_it(tmp_path, capsys):
    assert main(["shared", "--quick", "--jobs", "1", "--out", str(tmp_path)]) in (0, 3)
    text = (tmp_path / "shared.md").read_text()
    for claim in shared.claims(shared.work(shared.quick()[0])):
        assert claim.claim in text
    assert "roofline" in text
    assert list(tmp_path.glob("*.svg"))
    assert main(["stale", "--out", str(tmp_path)]) == 0
    (tmp_path / "shared.md").write_text(text.replace("sha256 `", "sha256 `0"))
    assert main(["stale", "--out", str(tmp_path)]) == 3
    assert "shared.md" in capsys.readouterr().out


def test_idle_rules_are_all_known_to_the_engine():
    load = replace(drawn(1.0, 2.0), arrive_ms=(500.0,), prompt=(10,), answer=(3,))
    for idle in WhenIdle:
        planner = Greedy()
        planner.idle = idle
        outcome = Engine(load, ADA8B, planner, SETTING).run()
        assert (outcome.lanes.get(Lane.PAUSE, 0.0) > 0) == (idle is not WhenIdle.NOTHING)


@pytest.fixture(scope="module")
def points():
    return [one for task in llmstation.quick() for one in llmstation.work(task)]


def test_llmstation_uses_its_slack_only_without_its_clamp(points):
    """With the clamp, backward layers run beside decode and nowhere else, whatever the target leaves."""
    by_system = llmstation.series(points, "steady", "padded")
    clamped, whole = by_system["llmstation"][-1], by_system[llmstation.WHOLE][-1]
    assert clamped.tpot99_ms <= llmstation.GOAL.step_ms
    assert whole.tpot99_ms <= llmstation.GOAL.step_ms
    assert whole.tokens_s > 1.2 * clamped.tokens_s


def test_a_claim_fails_where_llmstation_would_train_nothing(points):
    none = [replace(one, tokens_s=0.0) if one.system.startswith("llmstation") else one for one in points]
    for one in llmstation.claims(none):
        if one.claim.startswith("L2"):
            assert not one.ok


def test_llmstations_page_says_that_its_machines_are_rooflines(points):
    pages = llmstation_page(points)
    assert "roofline" in pages["llmstation.md"].split("## Claims")[1]
    assert any(name.endswith(".svg") for name in pages)
