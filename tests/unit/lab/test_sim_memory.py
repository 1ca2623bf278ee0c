"""Each memory policy's mechanics: who pays for a handle, who loses one, and what a clairvoyant would hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from sim_worlds import MS, lengths_of, world_of
from valve_tools.sim.machine import MODELS, Settings
from valve_tools.sim.memory_policies import (
    Clairvoyant,
    FixedHeadroom,
    NoShare,
    Prism,
    StaticMem,
    Uvm,
    budget_plan,
    hold_ahead,
)
from valve_tools.sim.ours import OurMemory, ProductWake
from valve_tools.sim.world import Compute, HandleView, OfflineSide, run

from valved.policy.handout import choose_column
from valved.policy.reservation import ReservationSettings

SMALL = Settings(memory_utilization=0.52)
"""A pool of a few GiB: about 60 handles of 512 tokens."""
BURST = [(8000.0, 4000, 30), (8001.0, 4000, 30)]
"""16 handles at once, after offline has filled the pool."""


def sharing(policy, rows=BURST, **changes):
    """The stop begins at the launch, so that its 0.5 ms stand beside what memory costs."""
    world = world_of(rows, settings=SMALL, **{"seconds": 20.0, "gate_on_hint": False, **changes})
    return run(world, policy, ProductWake(hinted=True))


def solo(rows=BURST, **changes):
    world = world_of(rows, settings=SMALL, compute=Compute.ALONE, **{"seconds": 20.0, **changes})
    return run(world, NoShare())


def test_our_memory_serves_a_burst_within_milliseconds_and_offline_recomputes():
    ours, alone = sharing(OurMemory()), solo()

    assert (ours.ttft_ms - alone.ttft_ms).max() < 0.5 + 16 * 0.1
    assert 1 <= len(ours.reclaim_at_ns) <= 4
    assert ours.totals["offline_lost_tokens"] > 0
    assert ours.kills == 0


def test_a_reclaimed_handle_costs_the_first_token_its_remapping():
    cheap = sharing(OurMemory(), remap_ns=1000)
    dear = sharing(OurMemory(), remap_ns=2 * MS)
    slower_ms = (dear.ttft_ms - cheap.ttft_ms).max()

    assert dear.totals["memory_wait_ns"] / MS == pytest.approx(slower_ms, abs=10.0)
    assert slower_ms > 3.0  # two handles


def test_headroom_that_covers_the_burst_makes_the_reclaim_free():
    roomy = ReservationSettings(headroom_min_handles=24, pressure_ratio=1.0)
    result = sharing(OurMemory(settings=roomy))

    assert result.totals["memory_wait_ns"] == 0
    assert (result.ttft_ms - solo().ttft_ms).max() == pytest.approx(0.5, abs=0.01)


def test_a_kept_prefix_loses_fewer_tokens():
    kept = sharing(OurMemory(), keep_prefix=True)
    dropped = sharing(OurMemory(), keep_prefix=False)

    assert kept.totals["offline_lost_tokens"] < dropped.totals["offline_lost_tokens"]


def test_sharing_without_reclaim_makes_online_wait_until_offline_lets_go():
    prism, ours = sharing(Prism(online_reserve=0)), sharing(OurMemory())

    assert prism.totals["stalls"] > 0
    assert np.nanmax(prism.ttft_ms) > 100 * np.nanmax(ours.ttft_ms - solo().ttft_ms)
    assert len(prism.reclaim_at_ns) == 0


def test_a_reserve_as_large_as_the_burst_keeps_prism_from_waiting():
    prism = sharing(Prism(online_reserve=20))

    assert prism.totals["stalls"] == 0
    assert (prism.ttft_ms - solo().ttft_ms).max() == pytest.approx(0.5, abs=0.01)


def test_managed_memory_charges_online_for_every_page_that_it_pushes_out():
    managed, alone = sharing(Uvm()), solo()
    evicted_ms = 64 * (1 << 20) / 22e9 * 1e3 + 0.04
    waited = managed.totals["uvm_wait_ns"] / MS

    assert waited > 8 * evicted_ms
    assert (managed.ttft_ms - alone.ttft_ms).max() > 4 * evicted_ms


def test_static_memory_kills_the_job_on_a_burst_beyond_its_limit():
    killed = sharing(StaticMem(restart_ns=2000 * MS, first_hour_peak=2))
    spared = sharing(StaticMem(restart_ns=2000 * MS, first_hour_peak=20))

    assert (killed.kills, spared.kills) == (1, 0)
    assert killed.totals["offline_busy_ns"] < spared.totals["offline_busy_ns"] - 1900 * MS
    assert (killed.ttft_ms - solo().ttft_ms).max() < 0.5 + 10 + 60 * 0.025 + 60 * 0.04


def test_a_clairvoyant_reservation_costs_online_its_stop_alone():
    alone = solo()
    result = sharing(Clairvoyant(usage=alone.usage))

    assert (result.ttft_ms - alone.ttft_ms).max() == pytest.approx(0.5, abs=0.01)
    assert result.totals["memory_wait_ns"] == 0


def test_hold_ahead_is_the_peak_of_the_coming_seconds_and_one():
    usage = np.array([[3, 10], [5, 4]])

    assert hold_ahead(usage, 8, 2) == [1, 11, 11, 11, 5, 5, 1, 1, 1]


def test_a_budget_of_raises_is_spent_where_it_saves_most():
    usage = np.array([[0, 9], [4, 3], [9, 8]])

    unlimited = budget_plan(usage, 12, 3600, step_s=1)
    once = budget_plan(usage, 12, 300, step_s=1)

    assert unlimited == [10, 1, 1, 1, 4, 1, 1, 1, 1, 9, 1, 1]
    assert once == [10, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1]


def test_a_training_step_needs_all_its_memory_and_repeats_when_it_loses_some():
    job = OfflineSide(model=MODELS["8B"], train_tokens=2048, train_memory_gib=2.0)
    result = sharing(OurMemory(), job=job)
    starved = sharing(Clairvoyant(usage=solo().usage, hold=[48] * 30), job=job)

    assert result.totals["offline_useful_tokens"] % 2048 == 0
    assert result.totals["offline_useful_tokens"] > 0
    assert starved.totals["offline_useful_tokens"] == 0


class Watching(Prism):
    """Looks at the block tables once, when the first iteration has been planned."""

    def begin(self, memory: HandleView) -> None:
        self.memory = memory
        self.tables: list[tuple[list[int], list[int]]] = []
        memory.back_offline(memory.handles)
        memory.tick_at(5 * MS)

    def on_tick(self, now_ns: int) -> None:
        ptr, columns, _ = self.memory.block_tables()
        self.tables.append((ptr.tolist(), columns.tolist()))


def test_the_core_hands_out_blocks_by_the_products_rule():
    watching = Watching(online_reserve=0, offline_elastic=False)
    job = OfflineSide(model=MODELS["8B"], lengths=lengths_of(1000, 200), budget_tokens=16_384)
    world = replace(world_of([], job=job, settings=SMALL), seconds=0.01)
    run(world, watching, ProductWake(hinted=True))
    (ptr, columns) = watching.tables[0]

    free = [32] * world.handles
    expected = []
    for first, stop in itertools.pairwise(ptr):
        current = None
        for _ in range(first, stop):
            current = choose_column(free, current)
            assert current is not None
            free[current] -= 1
            expected.append(current)

    assert len(expected) > 400
    assert expected == columns


def test_a_fixed_headroom_serves_a_burst_within_it_and_returns_the_rest_within_a_second():
    wide, narrow = sharing(FixedHeadroom(share=0.4)), sharing(FixedHeadroom(share=0.05))

    assert (len(wide.reclaim_at_ns), len(narrow.reclaim_at_ns) > 0) == (0, True)
    assert narrow.totals["memory_wait_ns"] > wide.totals["memory_wait_ns"] == 0


def test_memory_that_waits_for_an_offline_step_costs_no_more_than_the_step_beside_online_work():
    gated, waiting = sharing(OurMemory()), sharing(OurMemory(step_ns=100 * MS))
    later_ms = (waiting.ttft_ms - gated.ttft_ms).max()

    assert 5.0 < later_ms < 2 * 100.0 * len(waiting.reclaim_at_ns)


def test_headroom_that_covers_the_burst_makes_the_wait_for_a_step_free():
    roomy = ReservationSettings(headroom_min_handles=24)
    result = sharing(OurMemory(settings=roomy, step_ns=100 * MS))

    assert result.totals["memory_wait_ns"] == 0
