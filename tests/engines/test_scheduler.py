"""vLLM's own scheduler and block pool, without a model: what the hook's order of blocks leaves of the prefix cache."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("reclaim", [(), ("--reclaim",)], ids=["reclaim off", "reclaim on"])
def test_no_workload_loses_its_prefix_cache_to_the_columns_on_the_real_scheduler(engines, reclaim):
    """Four workloads with shared prefixes: of the stock order's hit rate, in tokens."""
    out = engines.run("vllm_hit_rate.py", str(engines.model), "8", "64", "256", *reclaim, paths=(engines.tools,))
    shares = json.loads(out.splitlines()[-1])
    every = [share for workloads in shares.values() for share in workloads.values()]
    print(f"\nof the stock hit rate, by blocks of a column: {shares}, mean {sum(every) / len(every):.3f}")

    assert len(every) == 12
    assert min(every) >= 0.93
    assert sum(every) / len(every) >= 0.95


def test_the_hook_never_fails_beside_the_real_scheduler_and_is_measured_there(engines):
    """`valve bench hook` judges the figures; a test does not, on a machine that others use."""
    out = engines.run("../../tools/engines/scheduler_cost.py", str(engines.model), paths=(engines.tools,))
    result = json.loads(out.splitlines()[-1])

    assert result["failures"] == 0
    assert all(len(result[part]["own_us"]) == 160 for part in ("decode", "surplus", "all at once"))
    assert len(result["event_ms"]) == 12


FAULTS = ["daemon_dies", "link_is_cut", "table_is_left", "hook_raises"]


def faults(engines, tmp_path, plan):
    out = engines.run("vllm_faults.py", str(engines.model), str(tmp_path), json.dumps(plan))
    trials = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(trials) == len(plan["seeds"])
    told = {name: sum(trial[name] for trial in trials) for name in ("requests", "wrong", "lost", "errors", "events")}
    print(f"\n{told}, faults {[trial['faults'] for trial in trials]}")
    return trials


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_fault_of_link_daemon_or_hook_ever_makes_an_answer_wrong_or_lost(engines, tmp_path, is_async):
    trials = faults(engines, tmp_path, {"async": is_async, "seeds": list(range(42))})

    assert {(trial["wrong"], trial["lost"], trial["crash"], trial["leak"]) for trial in trials} == {(0, 0, "", "")}
    assert sum(trial["requests"] for trial in trials) >= 1000
    assert all(sum(trial["faults"].get(name, 0) for trial in trials) > 10 for name in FAULTS)
    assert sum(trial["errors"] for trial in trials) < 300


def test_a_loss_in_a_table_that_valved_left_makes_answers_wrong_where_nobody_heeds_it(engines, tmp_path):
    """The control run: the campaign sees this old fault."""
    trials = faults(engines, tmp_path, {"async": True, "handling": "detached_is_deaf", "seeds": [0, 1, 2]})

    assert sum(trial["wrong"] for trial in trials) > 0
