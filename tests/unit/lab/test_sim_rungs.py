"""What is simulated as a way to take memory is what the product does by its settings, at the cost that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_worlds import lengths_of, trace_of
from valve_tools.sim.combinations import BY_NAME, COOPERATIVE, HELPER, SHIPPED, by_way, world_of
from valve_tools.sim.machine import MODELS, Settings
from valve_tools.sim.pairs import bind
from valve_tools.sim.rungs import TAKE_MS, cut, rung_of, step_ns, waited_ns
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Tuning
from valve_tools.sim.world import OfflineSide

from valved.config import Config
from valved.kv.rungs import step_tokens
from valved.model.ids import Remap

MS = 1_000_000
PLANES = 2 * 32


def bound_of(key: str):
    folder = Folder(traces=(trace_of([(0.0, 1, 1)]),), lengths=(), ignored=())
    return next(one for one in bind(folder) if one.pair.key == key)


def test_a_column_of_many_handles_never_moves_at_the_price_of_one():
    for way, took_ms in TAKE_MS.items():
        assert rung_of(way, PLANES).take_ns == round(took_ms * MS)
    assert rung_of(Remap.SPARSE, 2 * 80).take_ns > 2 * rung_of(Remap.SPARSE, PLANES).take_ns
    assert rung_of(Remap.SPARSE, PLANES).map_ns > MS


def test_what_is_simulated_as_shipped_pays_for_every_handle_of_its_column():
    bound = bound_of("P1")
    world = world_of(bound, 1, BY_NAME[SHIPPED].tuned(bound, Tuning()))

    assert world.settings.handle_mib == PLANES * Config().memory.handle_mib
    assert (world.remap_ns, world.map_ns) == (
        rung_of(Remap.SPARSE, PLANES).take_ns,
        rung_of(Remap.SPARSE, PLANES).map_ns,
    )


def test_memory_between_two_steps_is_asked_for_as_early_and_in_steps_as_short_as_the_product_asks():
    bound, table = bound_of("P1"), Config().memory
    tuned = BY_NAME[COOPERATIVE].tuned(bound, Tuning())
    world = world_of(bound, 1, tuned)

    assert tuned.reservation.pressure_ratio == table.cooperative_ratio < table.pressure_ratio
    assert world.job is not None
    assert world.job.budget_tokens == step_tokens(table)
    assert tuned.let_ns == table.let_ms * MS
    assert tuned.offline_step_ns == step_ns(world.job, world.settings) > 10 * MS
    assert tuned.world["remap_ns"] == rung_of(Remap.HELPER, PLANES).take_ns


@pytest.mark.parametrize("name", [SHIPPED, HELPER])
def test_memory_taken_under_the_gate_waits_for_no_step(name):
    tuned = BY_NAME[name].tuned(bound_of("P1"), Tuning())

    assert (tuned.offline_step_ns, tuned.offline_step_tokens, tuned.let_ns) == (0, 0, 0)


def test_other_settings_give_another_rung():
    config = Config()
    short = replace_memory(config, offline_step_ms=10.0, let_ms=20.0, cooperative_ratio=0.7)

    found = rung_of(Remap.COOPERATIVE, PLANES, short)
    assert (found.pressure_ratio, found.let_ns) == (0.7, 20 * MS)
    assert found.step_tokens * 2 < rung_of(Remap.COOPERATIVE, PLANES, config).step_tokens


def replace_memory(config: Config, **changes: object) -> Config:
    import msgspec

    return msgspec.structs.replace(config, memory=msgspec.structs.replace(config.memory, **changes))


def test_a_training_step_is_never_cut():
    job = OfflineSide(model=MODELS["8B"], train_tokens=2048, train_memory_gib=1.0)
    batch = OfflineSide(model=MODELS["8B"], lengths=lengths_of(1000, 200))

    assert cut(job, 500) == job
    assert step_ns(cut(batch, 500), Settings()) < step_ns(batch, Settings())
    assert cut(batch, 10_000) == replace(batch)


def test_a_step_that_outlasts_what_it_is_let_run_rests_in_between():
    assert waited_ns(30 * MS, 100 * MS) == 60 * MS
    assert waited_ns(120 * MS, 100 * MS) == 240 * MS + 2 * 1000 * MS
    assert waited_ns(120 * MS, 0) == 240 * MS
    assert by_way(Remap.AUTO)(bound_of("P1"), Tuning()) == by_way(Remap.SPARSE)(bound_of("P1"), Tuning())
