"""What offline owners got: the time their channels were allowed to run, summed over GPUs.

Each GPU's account counts the time it was open; a job's share is the difference between two readings.
"""

from __future__ import annotations

from collections import defaultdict

from valved.mechanism.stats import GpuAccount
from valved.model.ids import GpuIndex, ServiceId


class Harvest:
    def __init__(self, gpus: dict[GpuIndex, GpuAccount]) -> None:
        self._gpus = gpus
        self._from: dict[tuple[ServiceId, GpuIndex], int] = {}
        self._done: defaultdict[ServiceId, int] = defaultdict(int)

    def present(self, service: ServiceId, gpu: GpuIndex, is_present: bool, now_ns: int) -> None:
        """The service has compute channels on this GPU from now on, or no more."""
        key = (service, gpu)
        if is_present == (key in self._from):
            return
        account = self._gpus[gpu]
        account.advance(now_ns)
        if is_present:
            self._from[key] = account.open_ns
        else:
            self._done[service] += account.open_ns - self._from.pop(key)

    def harvest_ns(self, service: ServiceId, now_ns: int) -> int:
        """Precondition for exactness: the accounts were advanced to now."""
        running = 0
        for (owner, gpu), since_ns in self._from.items():
            if owner == service:
                self._gpus[gpu].advance(now_ns)
                running += self._gpus[gpu].open_ns - since_ns
        return self._done[service] + running

    def restore(self, service: ServiceId, harvest_ns: int) -> None:
        self._done[service] = harvest_ns

    def forget(self, service: ServiceId) -> None:
        self._done.pop(service, None)
