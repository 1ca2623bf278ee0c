"""`valve replay quick` (`make lab-quick`): the claims of the pages once more, small and loosely, in minutes.

Half an hour of the generated folder under one seed. A claim that holds on the page must hold here within twice its
mark, or three quarters of it where more is better; what is missed there is not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from valve_tools.replay.pair_results import PairTask, Results, claims_of, run_task
from valve_tools.replay.report import Report
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import BUDGET_ORACLE, ORACLE, SHIPPED
from valve_tools.sim.metrics import Claim
from valve_tools.sim.pairs import bind
from valve_tools.sim.rivals import PRISM
from valve_tools.sim.traces import Folder

SECONDS = 1800.0
NAMES = (PRISM, SHIPPED, ORACLE, BUDGET_ORACLE)
AT_MOST, AT_LEAST = 2.0, 0.75
FLOORS = ("offline kept", "level with")
"""Claims of which more is better."""
NOT_ASKED = frozenset(
    {
        *((f"TTFT {figure} increase %", pair) for figure in ("mean", "p99") for pair in ("P8", "P9")),
        *(("offline kept", pair) for pair in ("P8", "P9")),
    }
)
"""Services whose cache fills the card, and columns of 2.5 GiB in a small pool: missed on the pages, or nearly so."""


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    short = replace(folder, traces=tuple(trace.first(SECONDS) for trace in folder.traces))
    tasks = [PairTask(bound=bound, seed=seeds[0], names=NAMES) for bound in bind(short)]
    results = Results(spread(run_task, tasks, progress, workers or Workers(), label="quick"))
    claims = [claim for task in tasks for claim in claims_of(task.bound.pair.key, results)]
    return Report(
        name="quick",
        title="The claims once more, small and loosely",
        summary=(f"{SECONDS / 60:g} minutes of each load under one seed. It says that nothing broke, and no more.",),
        claims=tuple(loosely(claim) for claim in claims if is_asked(claim)),
        seeds=(seeds[0],),
    )


def is_asked(claim: Claim) -> bool:
    """What one seed cannot say is left to the pages: which methods are level within one per cent."""
    return (claim.claim, claim.pair) not in NOT_ASKED and not claim.claim.startswith("level")


def loosely(claim: Claim) -> Claim:
    """A count of preemptions stays what it is: at most one."""
    if claim.value is None or claim.claim.startswith("preemptions"):
        return claim
    if claim.claim.startswith(FLOORS):
        bound = AT_LEAST * claim.bound
        return replace(claim, bound=bound, ok=claim.value >= bound)
    bound = AT_MOST * claim.bound
    return replace(claim, bound=bound, ok=claim.value <= bound)
