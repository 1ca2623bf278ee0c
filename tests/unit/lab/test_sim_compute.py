"""Each compute policy's mechanics on worlds small enough to compute by hand: who waits, how often, for how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_worlds import GAP_MS, MS, RESUME_MS, STOP_MS, lengths_of, trace_of, world_of
from valve_tools.sim.machine import MODELS
from valve_tools.sim.memory_policies import NoShare, Prism
from valve_tools.sim.ours import ProductWake
from valve_tools.sim.world import Compute, HostGap, OfflineSide, OnlineSide, StopTimes, run

ROWS = [(100.0, 100, 20), (600.0, 100, 20), (1100.0, 100, 20)]
"""Three requests far apart: three busy periods of about 140 ms."""


def shared(rows=ROWS, *, hinted=True, **changes):
    return run(world_of(rows, hinted=hinted, **changes), Prism(online_reserve=20), ProductWake(hinted=hinted))


def solo(rows=ROWS, **changes):
    return run(world_of(rows, compute=Compute.ALONE, **changes), NoShare())


def test_channel_costs_one_stop_per_busy_period_and_nothing_per_token():
    ours, alone = shared(gate_on_hint=False), solo()

    assert (ours.ttft_ms - alone.ttft_ms) == pytest.approx([STOP_MS] * 3, abs=1e-3)
    assert (ours.tpot_ms - alone.tpot_ms) == pytest.approx([0.0] * 3, abs=1e-3)
    assert ours.gates_per_request.tolist() == [1, 1, 1]


def test_a_stop_that_the_hint_begins_is_over_when_the_host_gap_is():
    """A stop of 0.5 ms fits into a host gap of 1 ms; of one of 1.4 ms the launch waits for what is left."""
    long_stop = StopTimes(median_ns=1.4 * MS, sigma=0.0, max_ns=1e9, resume_ns=int(RESUME_MS * MS))

    assert shared().ttft_ms.tolist() == solo().ttft_ms.tolist()
    assert (shared(stop=long_stop).ttft_ms - solo().ttft_ms) == pytest.approx([1.4 - GAP_MS] * 3, abs=1e-3)
    assert shared().gates_per_request.tolist() == [1, 1, 1]


def test_channel_runs_offline_in_all_idle_time_but_wake_and_stop():
    ours, alone = shared(), solo()
    idle_ms = alone.totals["idle_ns"] / MS
    expected = idle_ms + 3 * (STOP_MS - RESUME_MS)  # the stop begins with the request, and offline runs until it ends

    assert expected == pytest.approx(ours.totals["offline_busy_ns"] / MS, abs=0.01)


def test_a_serial_lock_multiplies_the_stop_by_the_gpus_and_a_patched_driver_does_not():
    service = OnlineSide(model=MODELS["70B"], tp=4, gap=HostGap(median_ns=GAP_MS * MS, sigma=0.0))
    job = OfflineSide(model=MODELS["14B"], tp=4, lengths=lengths_of(1000, 200))
    serial = shared(service=service, job=job, serial_gate=True)
    flat = shared(service=service, job=job, serial_gate=False)

    assert serial.gate_took_ns.tolist() == [4 * STOP_MS * MS] * 3
    assert flat.gate_took_ns.tolist() == [STOP_MS * MS] * 3


def test_without_a_hint_offline_wakes_only_after_a_quiet_cooldown():
    with_hint, without = shared(hinted=True), shared(hinted=False)
    lost_ms = (with_hint.totals["offline_busy_ns"] - without.totals["offline_busy_ns"]) / MS

    assert pytest.approx(lost_ms, abs=4.0) == 3 * 20.0


def test_a_stall_longer_than_the_cooldown_preempts_a_request_twice_without_a_hint_and_once_with_one():
    stalls = OnlineSide(model=MODELS["8B"], gap=HostGap(median_ns=30 * MS, sigma=0.0, max_ns=30 * MS))
    rows = [(100.0, 100, 5)]

    assert shared(rows, hinted=False, service=stalls).gates_per_request[0] > 1
    assert shared(rows, hinted=True, service=stalls).gates_per_request[0] == 1


def test_edge_preempts_in_every_gap():
    result = shared(compute=Compute.EDGE)
    launches = 20

    assert [launches] * 3 == result.gates_per_request.tolist()
    assert (result.tpot_ms - solo().tpot_ms) == pytest.approx([STOP_MS] * 3, abs=1e-3)


def test_gpreempt_pays_its_switch_at_every_launch_and_runs_in_gaps():
    result = shared(
        compute=Compute.GPREEMPT, stop=StopTimes(median_ns=0.1 * MS, sigma=0.0, max_ns=1e9, resume_ns=100_000)
    )

    assert (result.tpot_ms - solo().tpot_ms) == pytest.approx([0.1] * 3, abs=1e-3)
    assert (result.ttft_ms - solo().ttft_ms) == pytest.approx([0.1] * 3, abs=1e-3)


def test_gpreempt_without_its_hint_adds_a_tenth_of_a_millisecond():
    stop = StopTimes(median_ns=0.1 * MS, sigma=0.0, max_ns=1e9, hintless_ns=0.1 * MS, resume_ns=100_000)
    result = shared(compute=Compute.GPREEMPT, stop=stop)

    assert (result.tpot_ms - solo().tpot_ms) == pytest.approx([0.2] * 3, abs=1e-3)


def test_kernel_preemption_waits_for_the_graph_that_runs():
    result, alone = shared(compute=Compute.KERNEL_STRICT), solo()
    waited = result.ttft_ms - alone.ttft_ms

    assert (result.gate_took_ns / MS) == pytest.approx(waited, abs=1e-3)
    assert (waited > 5.0).any()
    assert (result.tpot_ms - alone.tpot_ms) == pytest.approx([0.0] * 3, abs=1e-3)


def test_layer_preemption_waits_a_layer_at_most_and_repeats_the_iteration():
    job = OfflineSide(model=MODELS["8B"], train_tokens=2048, train_memory_gib=1.0)
    layered = shared(compute=Compute.LAYER, job=job)
    strict = shared(compute=Compute.KERNEL_STRICT, job=job)
    step_ms = 4 * MODELS["8B"].params * 2048 / (989e12 * 0.45) * 1e3 + 0.5

    assert (layered.gate_took_ns / MS).max() <= step_ms / 32
    assert layered.totals["offline_useful_tokens"] < strict.totals["offline_useful_tokens"]


def test_the_rate_controller_is_slow_to_start_and_backs_off_beside_a_busy_service():
    busy = [(i * 10.0, 50, 40) for i in range(150)]
    beside = shared(busy, compute=Compute.KERNEL_TGS)
    idle = shared([(1990.0, 10, 1)], compute=Compute.KERNEL_TGS)

    assert idle.utilisation_gain > 0.75
    assert beside.utilisation_gain < 0.25


def test_one_engine_for_both_gives_online_the_batch_first_but_offline_stretches_it():
    world = world_of(ROWS, compute=Compute.SAME_ENGINE, seconds=4.0)
    result, alone = run(world, NoShare()), solo()

    assert world.handles > replace(world, compute=Compute.CHANNEL).handles
    assert np.isfinite(result.tpot_ms).all()
    assert (result.tpot_ms > alone.tpot_ms).all()
    assert result.totals["offline_useful_tokens"] > shared(seconds=4.0).totals["offline_useful_tokens"]


def test_the_last_rank_of_a_misaligned_service_keeps_offline_out_for_longer():
    service = OnlineSide(model=MODELS["32B"], tp=2, gap=HostGap(median_ns=GAP_MS * MS, sigma=0.0))
    job = OfflineSide(model=MODELS["14B"], tp=2, lengths=lengths_of(1000, 200))
    aligned = shared(service=service, job=job)
    skewed = shared(service=replace(service, skew_max=0.3), job=job)

    assert skewed.totals["offline_busy_ns"] < aligned.totals["offline_busy_ns"]
    assert aligned.ttft_ms.tolist() == skewed.ttft_ms.tolist()


def test_no_request_no_gate():
    result = shared(trace=trace_of([]))

    assert len(result.gate_at_ns) == 0
