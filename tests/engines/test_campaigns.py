"""Each kind of answer that a real vLLM gives, under reclaim: as undisturbed, and the same campaign sees the old fault.

One engine for each case. Its last trial takes what protects these answers out of the live hook, and must change some.
"""

from __future__ import annotations

import json
import math

import pytest
from engine_trials import is_sound, total

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
TRIALS = [
    {"seed": 0, "requests": 24, "every": 3, "held": 3},
    {"seed": 1, "requests": 24, "every": 3, "held": 3, "aborts": 6},
    {"seed": 2, "requests": 24, "every": 2, "held": 0},
]
FORM = "(t1[0-9]*t2[0-9]*t3[0-9]*){30}"  # so that a token that is believed twice, or not at all, breaks it
SEEDED = {"temperature": 1.0, "seeds": True}
WHOLE = 8192  # this CPU build cannot cut seeded prompts
CASES = {
    "sync": ({}, "none"),
    "async": ({"async": True}, "none"),
    "priority": ({"async": True, "policy": "priority"}, "none"),
    "two ranks": ({"ranks": 2}, "none"),
    "two ranks, async": ({"ranks": 2, "async": True}, "none"),
    "streams": ({"async": True, "asks": {"streams": True}}, "stale_output_delivered"),
    "structured, sync": ({"asks": {"structured": FORM}}, "none"),
    "structured, async": ({"async": True, "asks": {"structured": FORM}}, "none"),
    "logprobs": ({"async": True, "asks": {"logprobs": 2}}, "none"),
    "logprobs of the prompt, sync": ({"asks": {"prompt_logprobs": 2}}, "not_begun_again"),
    "logprobs of the prompt, async": ({"async": True, "asks": {"prompt_logprobs": 2}}, "none"),
    "seeds, sync": ({"asks": SEEDED, "budget": WHOLE}, "not_begun_again"),
    "seeds, async": ({"async": True, "asks": SEEDED, "budget": WHOLE}, "not_begun_again"),
    "two sequences, sync": ({"asks": {**SEEDED, "n": 2}, "budget": WHOLE}, "not_begun_again"),
    "two sequences, async": ({"async": True, "asks": {**SEEDED, "n": 2}, "budget": WHOLE}, "not_begun_again"),
}


def run(engines, options, ablation, good=TRIALS):
    bad = {"seed": 0, "requests": 24, "every": 2, "held": 3, "remove": ablation}
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if options.get("ranks") else {}
    *results, without = engines.campaign({**options, "trials": [*good, bad]}, **binding)
    told = {name: total(results, name) for name in ("requests", "events", "hit_requests", "wrong")}
    print(f"\n{json.dumps(told)}; without {ablation}: {without['wrong']} of {without['requests']} wrong")
    return results, without


@pytest.mark.parametrize("case", CASES)
def test_no_answer_of_any_kind_is_ever_wrong_and_the_campaign_sees_the_old_fault(engines, case):
    results, without = run(engines, *CASES[case])

    assert is_sound(results)
    assert total(results, "hit_requests") > 100
    assert without["wrong"] > 0


def chance_of_more(wrong: int, between: int, requests: int) -> float:
    """Fisher's exact test, one-sided: how likely so many of these mismatches or more fall on the reclaimed runs, were
    both kinds of runs alike.
    """
    both = wrong + between
    ways = [math.comb(requests, k) * math.comb(requests, both - k) for k in range(wrong, min(both, requests) + 1)]
    return sum(ways) / math.comb(2 * requests, both)


@pytest.mark.parametrize(("wrong", "between", "is_more"), [(0, 0, False), (9, 8, False), (20, 5, True)])
def test_the_rule_for_bf16_tells_more_mismatches_from_as_many(wrong, between, is_more):
    assert (chance_of_more(wrong, between, 240) < 0.05) is is_more


def test_in_bf16_reclaims_never_change_more_answers_than_other_batches_do(engines):
    """Its own rule: no more mismatches than between two undisturbed runs of other batch composition."""
    good = [{"seed": seed, "requests": 48, "every": 3, "held": 3, "is_compared": True} for seed in range(5)]
    results, without = run(engines, {"async": True, "dtype": "bfloat16"}, "none", good)
    requests, wrong, between = (total(results, name) for name in ("requests", "wrong", "between"))
    print(f"\n{requests} requests: {wrong} differ under reclaim, {between} in other batches")

    assert requests == 240
    assert chance_of_more(wrong, between, requests) >= 0.05
    assert {(trial["leak"], trial["crash"], trial["failures"]) for trial in results} == {("", "", 0)}
    assert chance_of_more(without["wrong"], 0, 24) < 0.001
