"""Which pending jobs became placeable, and which node to touch so that kube-scheduler tries them again. Pure.

A report that got better is no cluster event: kube-scheduler would look at the pod again after five minutes. A change of
an annotation of the node is one, so the node that just became good enough gets its capacity epoch bumped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from valve_scheduler.placement.rank import Fleet, GpuSets, Job, PlacementSettings, rank, ranked_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Nodes that would take each kind of pending job when last looked at."""

    feasible: Mapping[Job, frozenset[str]] = field(default_factory=dict)


def newly_feasible(
    before: Pending, fleet: Fleet, sets: Mapping[int, GpuSets], jobs: frozenset[Job], settings: PlacementSettings
) -> tuple[Pending, frozenset[str]]:
    """Per refused job the best node that takes it now and did not before.

    A job just seen was refused a moment ago, so any node that takes it has become good enough since.
    """
    feasible: dict[Job, frozenset[str]] = {}
    bumps = set()
    for job in jobs:
        ranking = rank(fleet, sets[job.gpus], job, settings)
        taking = ranked_nodes(fleet, ranking)
        now = frozenset(name for name, _ in taking)
        feasible[job] = now
        fresh = now - before.feasible.get(job, frozenset())
        bumps.update([name for name, _ in taking if name in fresh][:1])

    return Pending(feasible=feasible), frozenset(bumps)
