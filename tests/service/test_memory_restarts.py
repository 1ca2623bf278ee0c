"""valved dies in the middle of whatever it does: books, tables and cards agree, and nothing is stopped for ever."""

from __future__ import annotations

import os

import pytest
from memory_restarts import Restarts
from msgspec.structs import replace

from valved.config import Config, MemoryTable, QuotaTable
from valved.model.ids import Remap

MEMORY = MemoryTable(
    handle_mib=2, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05, step_s=2.0
)
SEEDS = int(os.environ.get("VALVE_EXAMPLES", "8"))
FIRST = int(os.environ.get("VALVE_SEED", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
@pytest.mark.parametrize(
    ("remap", "layers"), [(Remap.HELPER, 1), (Remap.SPARSE, 1), (Remap.SPARSE, 2), (Remap.COOPERATIVE, 2)]
)
def test_a_valved_that_dies_never_leaves_memory_with_two_owners_or_work_stopped_for_ever(remap, layers, seed):
    config = Config(memory=replace(MEMORY, remap=remap), quota=QuotaTable(clients_per_uid=1000))
    crowd = Restarts(seed, config, layers)
    try:
        crowd.walk(14)
    except Exception as error:
        error.add_note(f"seed {seed}: {crowd.told}")
        raise
