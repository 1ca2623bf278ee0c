"""The engine model against timings computed by hand, and the invariants that it checks itself."""

from __future__ import annotations

import numpy as np
import pytest
from sim_worlds import GAP_MS, trace_of, world_of
from valve_tools.sim.machine import MODELS, Settings, Timing, timing
from valve_tools.sim.memory_policies import AllOffline, NoShare, Prism
from valve_tools.sim.native import load
from valve_tools.sim.ours import ProductWake
from valve_tools.sim.world import CHANNEL_STOP, Compute, run

ENGINE = timing(MODELS["8B"], 1, Settings(), budget_tokens=2048, max_seqs=256)


def step_ms(prefill: int = 0, seqs: int = 0, context: int = 0, pairs: float = 0.0, engine: Timing = ENGINE) -> float:
    linear = max(engine.base_ns, (prefill + seqs) * engine.prefill_token_ns)
    own = seqs * engine.seq_ns + context * engine.context_token_ns + pairs * engine.attention_pair_ns
    return (linear + engine.fixed_ns + own) / 1e6


def wake():
    return ProductWake(hinted=True)


def solo(rows, **changes):
    return run(world_of(rows, compute=Compute.ALONE, **changes), NoShare())


def test_the_core_and_the_formula_agree_on_one_iteration():
    ffi, lib = load()
    t = ffi.new("struct sim_timing *")
    for name in Timing.__slots__:
        setattr(t, name, getattr(ENGINE, name))

    found = lib.sim_iteration_ns(t, 3, 5000, 700, 1e5) / 1e6

    assert step_ms(700, 3, 5000, 1e5) == pytest.approx(found)


def test_a_short_request_takes_a_gap_a_prefill_and_one_decode_per_further_token():
    result = solo([(0.0, 100, 3)])
    first = GAP_MS + step_ms(prefill=100, pairs=100 * 50)
    decodes = [GAP_MS + step_ms(seqs=1, context=100), GAP_MS + step_ms(seqs=1, context=101)]

    assert first == pytest.approx(result.ttft_ms[0], abs=1e-3)
    assert sum(decodes) / 2 == pytest.approx(result.tpot_ms[0], abs=1e-3)


def test_a_long_prompt_is_cut_into_chunks_of_the_token_budget():
    result = solo([(0.0, 5000, 1)])
    chunks = [(0, 2048), (2048, 2048), (4096, 904)]
    expected = sum(GAP_MS + step_ms(prefill=n, pairs=n * (at + n / 2)) for at, n in chunks)

    assert result.totals["iterations"] == 3
    assert expected == pytest.approx(result.ttft_ms[0], abs=1e-3)


def test_a_decode_shares_the_iteration_with_anothers_prompt():
    alone = solo([(0.0, 100, 50)])
    shared = solo([(0.0, 100, 50), (100.0, 2000, 1)])

    slower = (shared.tpot_ms[0] - alone.tpot_ms[0]) * 49
    mixed = step_ms(prefill=2000, seqs=1, context=114, pairs=2000 * 1000)
    assert mixed - step_ms(seqs=1, context=114) == pytest.approx(slower, abs=0.1)


def test_a_request_larger_than_the_pool_is_refused_and_the_next_is_served():
    result = solo([(0.0, 5_000_000, 1), (1.0, 10, 1)])

    assert result.totals["refused"] == 1
    assert np.isnan(result.ttft_ms[0])
    assert np.isfinite(result.ttft_ms[1])


def test_without_memory_the_newest_request_is_preempted_and_recomputed():
    tight = Settings(memory_utilization=0.49)
    rows = [(0.0, 8000, 1500), (1.0, 8000, 1500)]
    result = solo(rows, settings=tight, seconds=60.0)

    assert 16_000 < world_of(rows, settings=tight).handles * 512 < 18_500
    assert result.totals["online_preempted"] > 0
    assert np.isfinite(result.tpot_ms).all()


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    rows = [(i * 40.0, 200 + i, 20) for i in range(40)]
    first, again, other = (
        run(world_of(rows, stop=CHANNEL_STOP, seed=seed), Prism(online_reserve=4), wake()) for seed in (1, 1, 2)
    )

    assert first.ttft_ms.tolist() == again.ttft_ms.tolist()
    assert first.totals == again.totals
    assert first.gate_took_ns.tolist() != other.gate_took_ns.tolist()


def test_offline_alone_uses_the_whole_gpu():
    result = run(world_of([], trace=trace_of([]), seconds=20.0), AllOffline())

    assert pytest.approx(result.utilisation_gain) == 1.0
    assert result.totals["offline_finished"] > 0
