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
