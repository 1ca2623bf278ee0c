"""Counts what offline owners got: the time in which their channels could run, summed over GPUs.

The account of each GPU counts the time in which the GPU was open. A job's share is the difference of two readings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from valved.model.ids import GpuIndex, ServiceId
from valved.state.stats import GpuAccount


class Harvest:
    def __init__(self, gpus: dict[GpuIndex, GpuAccount]) -> None:
        self._gpus = gpus
        self._from: defaultdict[ServiceId, dict[GpuIndex, int]] = defaultdict(dict)  # open_ns when it came
        self._done: defaultdict[ServiceId, int] = defaultdict(int)

    def present(self, service: ServiceId, gpu: GpuIndex, is_present: bool, now_ns: int) -> None:
        """The service has compute channels on this GPU from now on, or no more."""
        came = self._from[service]
        if is_present == (gpu in came):
            return
        account = self._gpus[gpu]
        account.advance(now_ns)
        if is_present:
            came[gpu] = account.open_ns
        else:
            self._done[service] += account.open_ns - came.pop(gpu)

    def harvest_ns(self, service: ServiceId, now_ns: int) -> int:
        running_ns = 0
        for gpu, since_ns in self._from.get(service, {}).items():
            self._gpus[gpu].advance(now_ns)
            running_ns += self._gpus[gpu].open_ns - since_ns
        return self._done.get(service, 0) + running_ns

    def restore(self, service: ServiceId, harvest_ns: int) -> None:
        self._done[service] = harvest_ns

    def forget(self, service: ServiceId) -> None:
        self._done.pop(service, None)
        self._from.pop(service, None)


def held_by(accounts: Mapping[GpuIndex, GpuAccount], service: ServiceId) -> frozenset[GpuIndex]:
    return frozenset(gpu for gpu, account in accounts.items() if service in account.holders)


def book_hold(
    accounts: Mapping[GpuIndex, GpuAccount], service: ServiceId, gpus: Iterable[GpuIndex], at_ns: int
) -> None:
    for gpu in gpus:
        if gpu in accounts:
            accounts[gpu].hold(service, at_ns)
