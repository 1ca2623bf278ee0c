"""The target of reclaims of a GPU, whose engines' bursts come in the same instant or at any time.

The shipped Reserve on virtual time, over a card of which all that is not held belongs to an offline job.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from valve_tools.sim.eviction_headroom import BURSTY, STATIONARY, demand

from valved.kv.grow import Grown
from valved.kv.reserve import Reserve
from valved.model.ids import GpuIndex, Role
from valved.model.memory import OnlineMemory, ReservationAction, ReservationDecision
from valved.policy.reservation import SECOND_NS, ReservationSettings
from valved.policy.sharing import last, shared, sharers

COLUMNS = 576
NOTHING = np.zeros(0, np.int64)
LOADS = {"stationary": STATIONARY, "bursty": BURSTY}


class FakeEngine:
    """Its hook offers at once what is beyond its target."""

    blocks_per_column = handles_per_column = 1
    role, is_complete, rung_ns, changes = Role.ONLINE, True, None, 0

    def __init__(self, number):
        self.service, self.columns, self.gpus = number, COLUMNS, frozenset({GpuIndex(0)})
        self.used, self.mapped = 0, 2
        self.table = SimpleNamespace(set_target=self._set_target, epoch=0, blocks=COLUMNS)

    def _set_target(self, columns):
        self.mapped = max(min(columns, self.mapped), self.used)

    def view(self):
        return SimpleNamespace(used_blocks=min(self.used, self.mapped), wanted_blocks=self.used, epoch_seen=0)

    def mapped_columns(self):
        return self.mapped

    standing_count = mapped_columns

    def bare_columns(self):
        return np.arange(self.mapped, COLUMNS)

    def backed_columns(self):
        return np.ones(self.mapped, np.int64)

    def partial_columns(self):
        return NOTHING

    offered_columns = partial_columns

    def offered_though_wanted(self, wanted):
        return NOTHING

    def fitting(self, bare, reach):
        return 0


class FakeGrowth:
    """All that it gives was offline work's."""

    is_hurrying = True

    def calm(self):
        pass

    def would_stop(self, engine, columns):
        return frozenset()

    async def grow(self, engine, columns, rung_ns):
        engine.mapped += len(columns)
        return Grown(came=len(columns), has_cost=True)


class FakeFirsts:
    """Foresees nothing."""

    def foreseen_by(self, engine):
        return None

    def foresee(self, engine, mapped, free, most):
        return None


def reserve_of(engines, settings):
    """The shipped one; and its clock."""
    clock = SimpleNamespace(ns=0, now_ns=lambda: clock.ns)
    books = SimpleNamespace(
        pool=SimpleNamespace(handle_bytes=1),
        engines_with=lambda role: [engine for engine in engines if engine.role is role],
    )
    supply = SimpleNamespace(
        within_reach=lambda engine: 0, obtainable=lambda engine, within: engine.columns - engine.mapped
    )
    config = SimpleNamespace(
        memory=SimpleNamespace(target_per_hour=settings.target_per_hour), reservation_settings=lambda size: settings
    )
    silent = SimpleNamespace(emit=lambda *_, **__: None, put=lambda change: None)
    rungs = SimpleNamespace(settings=lambda engine, usual: usual)
    uuids = {GpuIndex(0): b"a" * 16}
    return Reserve(books, supply, FakeFirsts(), FakeGrowth(), None, rungs, silent, clock, config, uuids, silent), clock


def run(uses, settings):
    """Seconds at which memory was reclaimed, and columns held in the mean of an engine after the first hour."""
    engines = [FakeEngine(number) for number in range(len(uses))]
    reserve, clock = reserve_of(engines, settings)
    at, held, note = [], [], reserve.budget.note

    def noted(gpus, now_ns):
        at.append(now_ns // SECOND_NS)
        note(gpus, now_ns)

    reserve.budget.note = noted
    for second, used in enumerate(np.transpose(uses).tolist()):
        clock.ns = (second + 1) * SECOND_NS
        for engine, now_used in zip(engines, used, strict=True):
            engine.used = now_used
            reserve.serve(engine)
        held.append(sum(engine.mapped for engine in engines))
    return np.array(at), float(np.mean(held[3600:])) / len(engines)


def worst_hour(at):
    """Most in any 3,600 s."""
    return max(np.searchsorted(at, at + 3600) - np.arange(len(at)))


@pytest.mark.parametrize(("load", "seed"), [("stationary", 0), ("bursty", 1)])
@pytest.mark.parametrize("target", [6, 30])
@pytest.mark.parametrize("engines", [2, 4, 8])
def test_bursts_of_one_instant_never_exceed_the_target_of_their_gpu(engines, target, load, seed):
    """With more engines than reclaims a burst of all costs one of each, whatever the rule: no more than that."""
    used = demand(replace(LOADS[load], hours=2), seed)

    at, _ = run([used] * engines, ReservationSettings(target_per_hour=target))

    assert worst_hour(at) <= max(target, engines)


@pytest.mark.parametrize("load", sorted(LOADS))
@pytest.mark.parametrize("target", [6, 30])
@pytest.mark.parametrize("engines", [2, 4, 8])
def test_engines_that_share_a_gpu_never_exceed_its_target_whenever_their_bursts_come(engines, target, load):
    uses = [demand(replace(LOADS[load], hours=2), seed) for seed in range(engines)]

    at, _ = run(uses, ReservationSettings(target_per_hour=target))

    assert worst_hour(at) <= max(target, engines)


def test_a_target_that_is_smaller_than_the_count_of_engines_never_keeps_idle_memory_for_good():
    used = demand(replace(BURSTY, hours=3), 0)
    used[3600:] = 0

    _, held = run([used] * 4, ReservationSettings(target_per_hour=2))

    assert held < 300  # it went back when the hour of the bursts was over


def test_an_engine_alone_on_its_gpu_never_decides_by_other_settings():
    usual = ReservationSettings(target_per_hour=2)
    memory = OnlineMemory(used_handles=4, mapped_handles=4, unmet_handles=2, pool_handles=64)
    take = ReservationDecision(
        action=ReservationAction.TAKE,
        handles=4,
        is_reclaim=True,
        headroom_handles=2,
        tau_ns=1,
        reclaims_per_hour=9,
        memory=memory,
        reason="",
    )

    assert [sharers(gpus, [(0,), (1,), (1, 2)]) for gpus in ((0,), (1,), (1, 2), (2,), ())] == [1, 2, 2, 1, 1]
    assert shared(usual, 1) is usual
    assert last(take, memory, 9, 1, usual) is take
    assert last(take, memory, 9, 2, usual).handles == 60
