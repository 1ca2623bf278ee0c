"""FineInfer: a whole optimizer step at a time, while no request runs; a request that comes waits for it.

The deferral of the first prompt is left out: it costs time to the first token, and a request waits already.
"""

from __future__ import annotations

from .interface import ALONE, Plan, Planner, State, WhenIdle


class Temporal(Planner):
    name = "temporal"
    needs_engine = True
    same_base = True
    copies = 1
    idle = WhenIdle.STEP

    def plan(self, state: State) -> Plan:
        return ALONE
