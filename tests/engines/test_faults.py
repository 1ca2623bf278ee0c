"""Link cuts, daemon kills, slow and refused attachments, and functions of the hook that raise, under real engines.

Each trial has 24 requests and another function that raises; the two ways of an engine to schedule make 2,064 requests.
"""

from __future__ import annotations

import json

import pytest
from engine_trials import total
from sglang_plugin import run_with_plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ALL = list(range(43))
KINDS = {
    *("daemon_dies", "link_is_cut", "table_is_left", "attach_is_slow", "attach_is_refused", "layout_is_refused"),
    "hook_raises",
}
COUNTS = ("requests", "wrong", "tied", "lost", "errors", "events", "raised")


def of_vllm(engines, folder, plan):
    out = engines.run("vllm_faults.py", str(engines.model), str(folder), json.dumps(plan), timeout_s=3000)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def of_sglang(engines, folder, plan):
    return run_with_plugin(engines, folder, "sglang_faults", json.dumps(plan), timeout_s=3000)


def faults(trials, plan):
    """How often each kind happened; what every trial came to is printed."""
    assert len(trials) == len(plan["seeds"])
    done = {kind: sum(trial["faults"].get(kind, 0) for trial in trials) for kind in KINDS}
    print(f"\n{ ({name: total(trials, name) for name in COUNTS if name in trials[0]}) }, faults {done}")
    return done


CAMPAIGNS = [
    pytest.param(of_vllm, {"async": False}, id="vllm sync"),
    pytest.param(of_vllm, {"async": True}, id="vllm async"),
    pytest.param(of_sglang, {"overlap": False}, id="sglang without overlap"),
    pytest.param(of_sglang, {"overlap": True}, id="sglang with overlap"),
]


@pytest.mark.parametrize(("campaign", "options"), CAMPAIGNS)
def test_no_fault_of_link_daemon_or_hook_ever_makes_an_answer_wrong_or_lost(engines, tmp_path, campaign, options):
    plan = {**options, "seeds": ALL}
    trials = campaign(engines, tmp_path, plan)
    done = faults(trials, plan)
    told = [(trial["seed"], trial["raises"], trial["wrong"], trial["lost"], trial["broken"]) for trial in trials]

    assert [each for each in told if each[2:] != (0, 0, "")] == []
    assert total(trials, "requests") == 24 * len(ALL)
    assert total(trials, "errors") < 100
    assert min(done.values()) > 10
    assert len({trial["raises"] for trial in trials if trial["raised"]}) > 25


@pytest.mark.parametrize(("campaign", "options"), CAMPAIGNS[1::2])
def test_a_loss_in_a_table_that_valved_left_makes_answers_wrong_where_nobody_heeds_it(
    engines, tmp_path, campaign, options
):
    """The control run: the campaign sees this old fault."""
    plan = {**options, "handling": "detached_is_deaf", "seeds": [0, 1, 2]}
    trials = campaign(engines, tmp_path, plan)
    faults(trials, plan)

    assert total(trials, "wrong") > 0
