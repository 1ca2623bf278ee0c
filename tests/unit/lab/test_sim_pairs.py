"""Shapes, pairs and the seeded folder: a pair finds its trace by shape, whatever the files are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_worlds import trace_of
from valve_tools.sim.combinations import as_shipped, run_own, run_solo
from valve_tools.sim.generator import RECIPES, generate, make
from valve_tools.sim.metrics import increase, interval
from valve_tools.sim.pairs import PAIRS, bind
from valve_tools.sim.shape import LoadShape, ShapedTrace, assign, measure
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Tuning

from valved.config import Config


def shape(harvestable: float, idle: float, kv: float) -> LoadShape:
    return LoadShape(harvestable=harvestable, idle_per_hour=idle, kv_peak_tokens=kv)


def offered(**shapes: LoadShape) -> list[ShapedTrace]:
    return [ShapedTrace(trace=trace_of([(0.0, 1, 1)], name), shape=one) for name, one in shapes.items()]


def test_each_pair_gets_the_nearest_shape_and_no_trace_twice():
    wanted = {"a": shape(0.5, 1000, 7000), "b": shape(0.5, 50, 250_000)}
    chosen = assign(wanted, offered(x=shape(0.5, 60, 200_000), y=shape(0.45, 900, 9000), z=shape(0.5, 1000, 90_000)))

    assert {pair: one.trace.name for pair, one in chosen.items()} == {"a": "y", "b": "x"}


def test_a_folder_with_one_trace_serves_every_pair():
    wanted = {"a": shape(0.5, 1000, 7000), "b": shape(0.1, 50, 250_000)}
    chosen = assign(wanted, offered(only=shape(0.9, 1, 10)))

    assert [chosen[pair].trace.name for pair in wanted] == ["only", "only"]


def test_names_of_files_do_not_decide():
    folder = generate(3)
    short = tuple(trace.first(600.0) for trace in folder.traces)
    renamed = tuple(replace(trace, name=f"t{i}") for i, trace in enumerate(short))

    def lengths(traces):
        return [bound.trace.requests for bound in bind(Folder(traces=traces, lengths=(), ignored=()))]

    assert lengths(short) == lengths(renamed)
    assert len(PAIRS) == len(lengths(short))


def test_the_shape_of_a_trace_is_its_idle_time_and_its_largest_kv():
    found, is_overload = measure(trace_of([(1000.0 * i, 1000, 2) for i in range(10)]))

    assert not is_overload
    assert 0.94 < found.harvestable < 0.97
    assert pytest.approx(found.idle_per_hour) == 10 * 3600 / 10
    assert found.kv_peak_tokens == 1024


def test_more_than_one_gpu_can_serve_is_seen_as_overload():
    _, is_overload = measure(trace_of([(10.0 * i, 4000, 2) for i in range(200)]))

    assert is_overload


def test_the_generated_folder_depends_on_its_seed_alone():
    first, again, other = (make(RECIPES[0], np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert first.arrive_ns.tolist() == again.arrive_ns.tolist()
    assert first.arrive_ns.tolist() != other.arrive_ns.tolist()
    assert (np.diff(first.arrive_ns) >= 0).all()


def test_an_increase_is_taken_over_the_same_figure_of_the_reference():
    found = increase(np.array([2.0, 4.0]), np.array([1.0, 4.0]))

    assert pytest.approx(found["mean"]) == 20.0
    assert pytest.approx(found["p50"]) == 20.0


def test_an_interval_of_five_seeds_uses_students_t():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * (2.5**0.5) / 5**0.5

    assert (3.0, 3.0 - half, 3.0 + half) == pytest.approx((found.mean, found.low, found.high))


def test_one_seed_has_a_point_for_an_interval():
    found = interval([2.0])

    assert (found.low, found.high, found.n) == (2.0, 2.0, 1)


def test_the_service_on_its_own_gpu_never_shares_its_pool_with_the_jobs_weights():
    bound = bind(Folder(traces=(trace_of([(1000.0 * i, 1000, 2) for i in range(10)]),), lengths=(), ignored=()))[0]

    assert run_own(bound, 1).handles > run_solo(bound, 1).handles


def test_what_is_simulated_as_shipped_moves_the_columns_that_a_default_installation_moves():
    bound = bind(Folder(traces=(trace_of([(0.0, 1, 1)]),), lengths=(), ignored=()))[0]
    shipped = as_shipped(bound, Tuning())

    assert shipped.settings.handle_mib == 2 * 32 * 16  # K and V of 32 layers apart, handles of the default size
    assert shipped.reservation == Config().reservation_settings(1 << 30)
