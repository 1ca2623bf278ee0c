"""Whatever call of a writer fails, or is valved's last: what was answered is known to the next valved."""

from __future__ import annotations

import os

import pytest
from state_walk import StateWalk

SEEDS = int(os.environ.get("VALVE_EXAMPLES", "30"))
FIRST = int(os.environ.get("VALVE_SEED", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_that_was_answered_is_ever_lost_with_a_valved_and_nothing_it_stopped_stands_for_ever(seed):
    walk = StateWalk(seed)
    try:
        walk.walk(40)
    except Exception as error:
        error.add_note(f"seed {seed}: {walk.told}")
        raise
