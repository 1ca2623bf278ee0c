"""Whatever happens to memory on two GPUs, in whatever order: books and cards agree, and no need stays for ever."""

from __future__ import annotations

import os

import pytest
from memory_crowd import Crowd
from msgspec.structs import replace

from valved.config import Config, MemoryTable, QuotaTable
from valved.model.ids import Remap

MEMORY = MemoryTable(
    handle_mib=2, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05, step_s=2.0
)
SEEDS = int(os.environ.get("VALVE_EXAMPLES", "12"))
FIRST = int(os.environ.get("VALVE_SEED", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
@pytest.mark.parametrize(
    ("remap", "layers"), [(Remap.HELPER, 1), (Remap.SPARSE, 1), (Remap.SPARSE, 3), (Remap.COOPERATIVE, 2)]
)
def test_nothing_that_happens_ever_leaves_memory_with_two_owners_or_a_need_without_end(remap, layers, seed):
    config = Config(memory=replace(MEMORY, remap=remap), quota=QuotaTable(clients_per_uid=1000))
    crowd = Crowd(seed, config, layers)
    try:
        crowd.walk(14)
    except Exception as error:
        error.add_note(f"seed {seed}: {crowd.told}")
        raise
