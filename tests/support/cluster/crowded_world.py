"""A best-effort pod whose GPUs online work keeps busy, and another node that may have room."""

from __future__ import annotations

from typing import Any

from controller_world import World
from reports import pod, uuids
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.controller.rounds import ControllerSettings

Json = dict[str, Any]
SETTINGS = ControllerSettings(monitor=MonitorSettings(warm_up_s=0.0, min_runtime_s=0.0))
WINDOW_S = SETTINGS.monitor.window_s
HOUR = SETTINGS.monitor.floor_windows


def best_effort(owner: str = "job-1") -> Json:
    found = pod(node="n1", held=uuids("n1")[0], phase="Running", owner=owner)
    for reference in found["metadata"]["ownerReferences"]:
        reference |= {"apiVersion": "batch/v1", "kind": "Job", "name": "batch"}
    found["status"]["startTime"] = "2020-01-01T00:00:00Z"
    return found


class Crowded(World):
    """A pod on n1 that gets a share of its time, window after window; n2 is what else there is."""

    def __init__(self, elsewhere: float = 0.5, owner: str = "job-1", **spec: Any) -> None:
        super().__init__(SETTINGS)
        one = best_effort(owner)
        one["spec"] |= spec
        self.pods.sink.put(one)
        self.elsewhere, self.ran_s, self.demand_s = elsewhere, 0.0, 0.0
        self.look()

    def window(self, share: float, **status: Any) -> list[str]:
        self.now_s += WINDOW_S
        self.demand_s += WINDOW_S
        self.ran_s += WINDOW_S * share
        return self.look(**status)

    def look(self, **status: Any) -> list[str]:
        """Reasons of the evictions of a round."""
        entry = {"podUID": "uid-p1", "demandSeconds": self.demand_s, "runnableSeconds": self.ran_s}
        self.report("n1", offline=[entry], idle=0.0, **status)
        self.report("n2", idle=self.elsewhere)
        self.round()
        return [reason for reason, _ in self.events()]
