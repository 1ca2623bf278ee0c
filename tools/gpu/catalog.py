"""Every experiment, in order of value and safety: the batches of the lab."""

from __future__ import annotations

from collections.abc import Iterable

from valve_tools.gpu.errors import LabError
from valve_tools.gpu.experiment import Experiment, ExperimentBatch
from valve_tools.gpu.steps import bracket, calls, contact, edges, green, memory, pause, product, rivals

BATCHES: tuple[ExperimentBatch, ...] = (
    contact.BATCH,
    pause.BATCH,
    memory.BATCH,
    calls.BATCH,
    edges.BATCH,
    rivals.BATCH,
    product.BATCH,
    bracket.BATCH,
    green.BATCH,
    edges.LAST,
)
BATCH_LIMIT_S = 540  # a call to a lent machine may end after ten minutes; building and starting take some of it


def experiments() -> dict[str, tuple[ExperimentBatch, Experiment]]:
    """By name, in order."""
    return {each.name: (batch, each) for batch in BATCHES for each in batch.experiments}


def chosen(only: Iterable[str], batches: Iterable[str]) -> list[tuple[ExperimentBatch, Experiment]]:
    """What to run. Named experiments run whatever they are; without names, all but those that must be named."""
    known, wanted, names = experiments(), list(only), list(batches)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise LabError(f"no experiment {', '.join(unknown)}; there are: {', '.join(known)}")
    strangers = [name for name in names if name not in {batch.name for batch in BATCHES}]
    if strangers:
        raise LabError(f"no batch {', '.join(strangers)}; there are: {', '.join(batch.name for batch in BATCHES)}")
    if wanted:
        return [pair for name, pair in known.items() if name in wanted]
    return [(batch, each) for batch, each in known.values() if (batch.name in names if names else not each.opt_in)]
